"""A client of the training service, as learner and sampler."""
