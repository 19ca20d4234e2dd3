"""Checks at load: which path a model runs on, compared with its own forward."""
