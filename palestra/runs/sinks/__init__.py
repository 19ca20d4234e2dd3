"""Sinks: copy a run's metrics to TensorBoard, Weights & Biases, MLflow or Trackio. Each needs an optional extra."""
