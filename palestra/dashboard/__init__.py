"""Runs in the browser: a server that reads run directories and nothing else, and the built page that it serves."""
