"""Evaluates policies: held-out success, comparisons, cross-play and exploitability."""
