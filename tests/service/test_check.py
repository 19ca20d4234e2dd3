"""`palestra serve --check`: what an operator is told before anything is served."""

import socket
from pathlib import Path

import pytest
from helpers.command_line import invoke
from helpers.terminal_text import plain

from palestra.core.files import acquire_lock
from palestra.service.check import Finding, check_options
from palestra.service.serve import ServeOptions
from palestra.service.server.api_keys import add_key


def found(data: Path, **options: object) -> dict[str, list[Finding]]:
    """The findings by what was looked at."""
    by_name: dict[str, list[Finding]] = {}
    for finding in check_options(ServeOptions(data=data, **{"port": 0} | options)):
        by_name.setdefault(finding.what, []).append(finding)
    return by_name


def test_a_server_that_works_has_no_failure(tmp_path: Path) -> None:
    shown = found(tmp_path / "data", aliases={"Qwen/Qwen3-0.6B": "tiny"})
    verdicts = {finding.verdict for findings in shown.values() for finding in findings}
    assert "fails" not in verdicts
    base = shown["base tiny"]
    assert "up to 2,048 tokens, as tiny, Qwen/Qwen3-0.6B" in base[0].text
    assert any("does not show tools" in finding.text and finding.verdict == "note" for finding in base)
    assert "of weights (float32) on cpu" in shown["memory"][0].text
    assert not (tmp_path / "data").exists()  # looking leaves nothing behind


@pytest.mark.parametrize(
    ("options", "what", "text"),
    [
        ({"bases": {"gone": "/nowhere"}}, "bases", "no model at /nowhere"),
        ({"aliases": {"public": "other"}}, "aliases", "public means other, which is not served: add --base other"),
        ({"device": "cuda:7"}, "memory", "cuda:7 is not there"),
        ({"dtype": "float33"}, "memory", "write auto, float32 or bfloat16"),
        ({"kv_cache_gib": 1e6}, "memory", "leaves no memory for models in training"),
        ({"auth": Path("/nowhere/keys")}, "keys", "make one with `palestra keys add NAME"),
        ({"store": "postgresql+psycopg://ada:secret@127.0.0.1:9/none"}, "store", "cannot open the database"),
        ({"front_only": True}, "data", "no server has been on"),
    ],
)
def test_what_will_not_work_is_named(tmp_path: Path, options: dict[str, object], what: str, text: str) -> None:
    (failed,) = [one for findings in found(tmp_path, **options).values() for one in findings if one.verdict == "fails"]
    assert (failed.what, text in failed.text) == (what, True), failed
    assert "secret" not in failed.text


def test_a_taken_port_and_a_folder_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, acquire_lock(tmp_path / "server.lock", "it"):
        shown = found(tmp_path, port=taken.getsockname()[1])
    assert "Choose another --port" in shown["port"][0].text
    assert "is writing the server's data" in shown["data"][0].text


def test_who_is_let_in(tmp_path: Path) -> None:
    assert found(tmp_path)["keys"][0].verdict == "ok"
    assert "anyone who reaches this machine" in found(tmp_path, host="0.0.0.0")["keys"][0].text
    keys = tmp_path / "keys.txt"
    keys.write_text("# nobody yet\n")
    assert "has no key, so nobody is let in" in found(tmp_path, auth=keys)["keys"][0].text
    add_key(keys, "ada")
    keys.chmod(0o644)
    assert [one.verdict for one in found(tmp_path, auth=keys)["keys"]] == ["ok", "note"]


def test_command_prints_the_findings_and_fails_if_one_does(tmp_path: Path) -> None:
    good = invoke("serve", "--check", "--port", 0, "--data", tmp_path)
    assert good.exit_code == 0 and "runs on packed rows" in plain(good.output)
    bad = invoke("serve", "--check", "--port", 0, "--data", tmp_path, "--alias", "public=other")
    assert bad.exit_code == 2 and "1 of these will not work" in " ".join(plain(bad.output).split())
