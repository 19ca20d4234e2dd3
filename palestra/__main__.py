"""`python -m palestra`: the command line, for launchers that start a module, such as torchrun."""

from palestra.cli.main import app

app()
