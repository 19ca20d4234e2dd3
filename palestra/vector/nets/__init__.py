"""Networks of vector envs, replay buffers, and estimators of advantages."""
