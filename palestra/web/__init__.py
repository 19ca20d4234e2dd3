"""OpenAI's chat completions on the wire: a client of any endpoint, and an endpoint of our own on this machine."""
