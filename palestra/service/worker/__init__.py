"""The worker process of the training service."""
