"""Learners of language agents: the weights in training, and their configs."""
