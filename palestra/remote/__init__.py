"""Envs on other machines, over gRPC: a server that plays them, and an env that asks it."""

SERVICE = "palestra.remote.Envs"
LARGEST = 16 * 2**20  # bytes of a request
MOST = 1024  # requests in a message
PROTOCOL = 1  # of client and server; another where they would misunderstand each other
