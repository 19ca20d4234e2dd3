"""Trained agents: found on disk, published as folders, described by model cards and served over HTTP."""
