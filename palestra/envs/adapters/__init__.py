"""Envs of other packages, and a user's own agent programs, as envs of palestra."""
