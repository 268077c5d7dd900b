"""The environment of a distributed job: set it right, prove it, say what is wrong."""
