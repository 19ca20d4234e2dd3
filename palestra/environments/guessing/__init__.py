"""Guessing games in words: a number, twenty questions, and words that another seat describes."""
