"""Continuous batching: requests, scheduler, sampler, scores."""
