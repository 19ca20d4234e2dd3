"""Learners of networks: stacks of policies of one shape, and their optimizers."""
