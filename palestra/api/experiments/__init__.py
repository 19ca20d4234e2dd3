"""Experiments: grids of algorithms, tasks and seeds from one file, and their aggregate statistics."""
