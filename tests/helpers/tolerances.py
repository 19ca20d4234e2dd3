"""Tolerances of tests whose two sides sum float32 numbers in different orders, as other CPUs, batches and kernels do.

README.md in this folder explains the tolerances.
"""

LOGPROB_ATOL = 1e-4  # nats, of log-probabilities, logits and values of a model; the engine's own promise
GRADIENTS = {"rtol": 1e-3, "atol": 1e-5}  # of a whole pass through a model
