"""The env my_env, for palestra."""
