"""A coder and a tester on programming problems; programs run in a sandbox."""
