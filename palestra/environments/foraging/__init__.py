"""Level-based foraging."""
