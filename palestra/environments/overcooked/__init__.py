"""Overcooked, with the numbers of JaxMARL."""
