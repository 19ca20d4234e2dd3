"""Caches of keys and values."""
