"""The command line `palestra`: one module per group of commands."""
