"""Questions that are answered by calls of tools: calculator, Python, files, search, own functions."""
