"""Rollouts in vector envs, and their metrics."""
