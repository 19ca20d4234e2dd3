"""MinT's older sample, as a program against a running server."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import serving

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The output of the sample."""
    with serving(tmp_path_factory.mktemp("data")) as url:
        env = os.environ | {"MINT_BASE_URL": url, "MINT_API_KEY": "sk-any", "TINKER_TELEMETRY": "0"}
        command = [sys.executable, str(Path(__file__).with_name("mint_sample.py"))]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow  # the client itself is in many fast tests
def test_documented_older_example_runs(seen: Any) -> None:
    first, second = seen["losses"]
    assert len(first) == len(second) == 4
    assert first[0] < 0 < second[0]  # PPO's loss has the sign opposite to the advantage
    assert first[0] != first[2]  # a step changed the weights in between


def test_official_call_shapes_work(seen: Any) -> None:
    loss, again, plain = seen["loss"]
    assert loss == again == pytest.approx(plain, rel=1e-5)
    assert seen["is"] and seen["path"].startswith("tinker://")


def test_scalar_advantage_is_broadcast_to_tokens(seen: Any) -> None:
    assert seen["size"] > 1
    assert seen["spread"][0] == pytest.approx(seen["spread"][1])


def test_alternatives_to_the_tokens_of_a_prompt_are_drawn(seen: Any) -> None:
    found = seen["alternatives"]
    assert found["shape"] == [found["prompt"] - 1, 5]
    assert all(0 <= token < 512 for row in found["drawn"] for token in row)
    assert max(len(set(row)) for row in found["drawn"]) > 1  # an untrained adapter is not sure of anything


def test_optimizer_that_is_not_public_is_refused_with_the_remedy(seen: Any) -> None:
    at_creation, at_a_step = seen["dimuon"]
    assert 'this server has no optimizer "dimuon". Leave it out, or name "adamw".' in at_creation
    assert "this server steps with AdamW only. Send adam_params" in at_a_step


def test_other_names_are_the_official_clients() -> None:
    code = (
        "import tinker, palestra.service.mint_compat as c;"
        "print(c.types is tinker.types, c.APIFuture is tinker.APIFuture)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_missing_official_client_is_reported_with_the_install_command() -> None:
    code = "import sys; sys.modules['tinker'] = None; import palestra.service.mint_compat"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "pip install tinker" in done.stderr
