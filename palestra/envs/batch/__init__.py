"""Many copies of an env at once: in one process, in several, and as arrays."""
