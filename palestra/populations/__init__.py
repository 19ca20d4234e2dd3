"""Trains populations: their members, the payoffs between them, and the plans that match members for games."""
