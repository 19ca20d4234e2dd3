"""OpenAI-compatible chat completions over HTTP: a client of any endpoint, and a local server."""
