"""Envs on other machines, over gRPC: a server that plays them, and an env that asks it."""

SERVICE = "palestra.remote.Envs"
PROTOCOL = 1  # of client and server; another where they would misunderstand each other
