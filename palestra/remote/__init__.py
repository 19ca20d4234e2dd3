"""Remote envs over gRPC and remote samplers over HTTP: servers, clients and their configuration."""

SERVICE = "palestra.remote.Envs"
LARGEST = 16 * 2**20  # bytes of one request
MOST = 1024  # requests in one message
PROTOCOL = 1  # version of the protocol; client and server must have the same one
