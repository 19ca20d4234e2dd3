"""The training service: training and sampling over HTTP for clients of Tinker and MinT."""
