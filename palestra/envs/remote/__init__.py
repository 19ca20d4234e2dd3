"""Envs over gRPC: the server that steps them and the client env."""

SERVICE = "palestra.remote.Envs"
MAX_REQUEST_BYTES = 16 * 2**20  # bytes of one request
MAX_REQUESTS_PER_MESSAGE = 1024  # requests in one message
PROTOCOL_VERSION = 1  # version of the protocol; client and server must have the same one
