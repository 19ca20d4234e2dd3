"""SkyRL's tests of its own Tinker server, run against palestra's: those that do not depend on SkyRL's internals.

`make test-clients` fetches SkyRL's source. Its test file is changed only in the address. A script in place of `uv run`,
which starts SkyRL's server, starts palestra's, on a random base that, like SkyRL's, seldom ends an answer.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.official import CLIENTS, seed_hub

from palestra.testing import tiny_lm

SKYRL = CLIENTS.parent / "skyrl"
MODEL = "trl-internal-testing/tiny-Qwen3ForCausalLM"
OWN = {
    "test_training_workflow": "reads `elementwise_loss`, an output of SkyRL's own",
    "test_delete_checkpoint": "looks for SkyRL's files on the disk",
    "test_sample_prompt_logprobs": "wants topk_prompt_logprobs refused, which are served here",
    "test_sample_with_stop_strings": "seeks a stop string in the text of special tokens, which is left out here",
    "test_stale_session_cleanup": "reads SkyRL's log",
    "test_build_cmd_engine": "is of the command that starts SkyRL's engine",
    "test_build_cmd_engine_invalid_arg": "likewise",
}
UV = """#!{python}
import os, sys
given = dict(zip(sys.argv, sys.argv[1:]))
data = os.path.dirname(given["--database-url"].removeprefix("sqlite:///"))
command = ["serve", "--port", given["--port"], "--data", os.path.join(data, "palestra")]
os.environ.pop("PYTHONPATH")
os.execv("{python}", ["{python}", "-c", "from palestra.cli.main import app; app()", *command, "--base", "rand={base}",
    "--alias", given["--base-model"] + "=rand"])
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A folder with SkyRL's test file, the modules that it imports, and the script in place of `uv`."""
    if not (SKYRL / "tests" / "tinker" / "test_api.py").exists():
        pytest.skip(f"SkyRL's source is not at {SKYRL}: `make test-clients` fetches it where GitHub can be reached")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    tests = tmp_path / "tests" / "tinker"
    shutil.copytree(SKYRL / "tests" / "tinker", tests, ignore=shutil.ignore_patterns("skyrl_train"))
    (tmp_path / "tests" / "__init__.py").touch()
    text = (tests / "test_api.py").read_text().replace("0.0.0.0", "127.0.0.1")
    (tests / "test_api.py").write_text(text.replace("TEST_SERVER_PORT = 8000", f"TEST_SERVER_PORT = {port}"))
    package = tmp_path / "skyrl" / "tinker"
    package.mkdir(parents=True)
    (package / "api.py").write_text("_build_uv_run_cmd_engine = None\n")
    (package / "config.py").write_text("class EngineConfig(dict):\n    pass\n")
    # the most likely tokens differ between prompts, and are seldom the end token
    engine = tiny_lm(6, initializer_range=0.3)
    engine.model.save_pretrained(tmp_path / "base")
    engine.tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "uv").write_text(UV.format(python=sys.executable, base=tmp_path / "base"))
    (tmp_path / "bin" / "uv").chmod(0o755)
    return tmp_path


@pytest.mark.clients
@pytest.mark.timeout(900)
def test_skyrl_api_tests_pass(suite: Path) -> None:
    seed_hub(suite / "hf", {MODEL: suite / "base"})
    deselected = [f"--deselect=tests/tinker/test_api.py::{name}" for name in OWN]
    done = subprocess.run(
        [CLIENTS / "b" / "bin" / "python", "-m", "pytest", "tests/tinker/test_api.py", "-q", *deselected],
        cwd=suite,
        env=os.environ
        | {"PATH": f"{suite / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(suite)}
        | {"HF_HOME": str(suite / "hf"), "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"},
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0 and re.search(r"\b6 passed", done.stdout), done.stdout[-6000:]
