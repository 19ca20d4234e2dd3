"""Runs untrusted programs as processes without network or file access and with limits on all resources.

sandbox = open_sandbox()
outcome = await sandbox.run_python("print(int(input()) + 1)", stdin="41")
outcome.stdout  # "42\\n"
"""

from __future__ import annotations

from palestra.sandbox.base import ResourceLimits, RunResult, SandboxError
from palestra.sandbox.client import Sandbox, open_sandbox

__all__ = ["ResourceLimits", "RunResult", "Sandbox", "SandboxError", "open_sandbox"]
