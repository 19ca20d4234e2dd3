"""What the training service keeps: requests, models, checkpoints and weights."""
