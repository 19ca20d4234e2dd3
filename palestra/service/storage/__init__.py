"""Storage of the training service: requests, models, checkpoints and weights."""
