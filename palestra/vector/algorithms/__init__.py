"""Algorithms for small networks: policy gradients, Q-learning, and replay with continuous actions."""
