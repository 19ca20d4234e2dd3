"""Policies at the seats of text envs: language models, endpoints, scripts and experts."""
