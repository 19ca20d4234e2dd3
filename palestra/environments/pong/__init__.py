"""Pong for two, on pixels."""
