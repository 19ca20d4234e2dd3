"""Algorithms for language agents: from episodes to samples with advantages, and the losses of their updates."""
