"""Builds what a run needs from its config: config models, envs, policies, algorithms and engines."""
