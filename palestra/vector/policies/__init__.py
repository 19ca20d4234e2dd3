"""Policies that are networks, in training or frozen."""
