"""Runs programs that nobody has read, as processes without network, without files, and with limits on all they use.

sandbox = open_sandbox()
outcome = await sandbox.run_python("print(int(input()) + 1)", stdin="41")
outcome.stdout  # "42\\n"
"""

from __future__ import annotations

from palestra.sandbox.base import Limits, Outcome, SandboxError
from palestra.sandbox.client import Sandbox, open_sandbox

__all__ = ["Limits", "Outcome", "Sandbox", "SandboxError", "open_sandbox"]
