"""`palestra` and `python -m palestra`: the command line."""

import os
import sys


def main() -> None:
    """Runs the command line.

    While its modules are imported, Ctrl-C ends the process by the signal itself, as it does most programs: Python's
    KeyboardInterrupt would print a traceback of the import.
    """
    import signal  # not before: in the folder in which `python -m` is typed there may be another

    handles_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handles_interrupts:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from palestra.cli.main import app

    if handles_interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    app()


if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]  # Python puts the working folder there, and modules in it would replace installed ones
    main()
