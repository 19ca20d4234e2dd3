"""PettingZoo in both directions: its envs as vector envs (games.py), and vector envs as its envs (export.py)."""
