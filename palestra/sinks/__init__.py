"""A run's figures, sent on to trackers: TensorBoard, Weights & Biases, MLflow, Trackio. Each needs an extra."""
