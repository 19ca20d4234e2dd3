"""Samplers in other processes and on other machines (vLLM's protocol) for a learner here."""
