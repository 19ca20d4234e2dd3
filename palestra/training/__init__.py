"""Training loops and what keeps several processes in step."""
