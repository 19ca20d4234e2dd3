"""The HTTP API of the training service."""
