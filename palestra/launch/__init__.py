"""Starts runs: single process, several processes, Ray, populations."""
