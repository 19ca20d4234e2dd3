"""Conversations of a base: rendered by its chat template, and read back from what it samples."""
