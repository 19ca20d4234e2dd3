"""Imported last by the fork server. Collections in its forks then leave out what it has imported: they would write to,
and so copy, all of it. The server's own end, that of its parent, removes the folder of its socket: a parent that was
killed does not."""

import atexit
import gc
import os
import shutil

from palestra.parallel.fork_server import SOCKET_FOLDER


def _remove(folder: str, server: int) -> None:
    if os.getpid() == server:  # forks have the same list of what to do at their end
        shutil.rmtree(folder, ignore_errors=True)


atexit.register(_remove, os.environ[SOCKET_FOLDER], os.getpid())
gc.collect()
gc.freeze()
