"""The packages behind the adapters conflict with each other: each venv runs the tests of its own package."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.append(str(Path(__file__).parents[4] / "helpers"))  # verifiers finds a taskset as a module without a package
PACKAGES = {"test_textarena.py": "textarena", "test_verifiers.py": "verifiers", "test_openenv.py": "openenv"}

collect_ignore = [file for file, package in PACKAGES.items() if not find_spec(package)]
collect_ignore += [] if find_spec("openenv") else ["openenv_server.py"]
