"""`python -m palestra`: the command line, for launchers that start a module, such as torchrun."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]  # Python puts the working folder there, and modules in it would replace installed ones

from palestra.cli.main import app

app()
