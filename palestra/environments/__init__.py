"""The tasks that ship, each in a folder that the registry of palestra.envs finds by its name."""
