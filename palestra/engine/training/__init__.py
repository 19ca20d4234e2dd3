"""Gradients: micro-batches, losses over tokens, optimizers, checkpoints of adapters."""
