"""Doors for frameworks: installed as `ncclguard.integrations`, one module for each, none imported unless asked for."""
