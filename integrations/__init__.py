"""Integrations with frameworks, installed as `ncclguard.integrations`: a module for each, imported when asked for."""
