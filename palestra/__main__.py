"""`python -m palestra`: the command line, for those who start modules, such as torchrun."""

from palestra.cli.main import app

app()
