"""Environments with text observations and text actions."""
