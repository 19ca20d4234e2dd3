"""Stand-ins for Slurm's `srun` and `scontrol`, which run the tasks of a job on this machine.

`install` puts both on PATH. Each call is appended to SLURM_CALLS. A task runs in its own session, whose number is in
the call's line: killing that session simulates the loss of the node.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path


def install(folder: Path) -> Path:
    """Makes a folder with both programs, to be put first on PATH."""
    folder.mkdir()
    for program in ("srun", "scontrol"):
        script = folder / program
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {program} "$@"\n')
        script.chmod(0o755)
    return folder


def srun(*words: str) -> int:
    """Runs the command after the options once for each of --ntasks, and passes SIGTERM on, as srun does."""
    count = next(number for number, word in enumerate(words) if not word.startswith("--"))
    options = dict(word.lstrip("-").partition("=")[::2] for word in words[:count])
    unknown = options.keys() - {"nodes", "ntasks", "nodelist", "no-kill", "kill-on-bad-exit"}
    assert not unknown, f"srun here has no {unknown}"
    tasks = [subprocess.Popen(words[count:], start_new_session=True) for _ in range(int(options["ntasks"]))]
    record("srun", options.get("nodelist", "all"), *(task.pid for task in tasks))
    signal.signal(signal.SIGTERM, lambda *_: [os.killpg(task.pid, signal.SIGTERM) for task in tasks if not task.poll()])
    return max(abs(task.wait()) for task in tasks)


def scontrol(*words: str) -> int:
    """`scontrol show hostnames LIST` prints names that all lead to this machine; `scontrol requeue JOB` is recorded."""
    record("scontrol", *words)
    if words[:2] == ("show", "hostnames"):
        print("\n".join(words[2].split(",")))
    return 0


def record(*words: object) -> None:
    with open(os.environ["SLURM_CALLS"], "a") as calls:
        calls.write(" ".join(map(str, words)) + "\n")


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol}[sys.argv[1]](*sys.argv[2:]))
