"""Shared by all rooms: data types, config trees, files, seeds, messages, losses over tokens, traces, HTTP."""
