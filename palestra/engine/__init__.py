"""Runs and trains one base model and the adapters on it: forward passes, sampling, gradients."""
