"""Rollouts in text envs: episodes and their branches, rows of data, metrics."""
