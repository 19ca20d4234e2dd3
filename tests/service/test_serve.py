"""The whole server: two processes, started, called and stopped as by a user."""

import os
import re
import signal
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.command_line import invoke
from helpers.processes import children_of, workers_of
from helpers.raw import ask
from helpers.warm_processes import run_palestra, start_palestra
from transformers import AutoConfig

from palestra.service.serve import load_base_info
from palestra.testing import tiny_tokenizer

SITES = ("none", "cross-site", "same-site")  # of requests without Origin: a user, or an image in a page


class Server:
    """`palestra serve` on a free port."""

    def __init__(self, data: Path, *options: str, forked: bool = False) -> None:
        words = ["serve", "--port", "0", "--data", data, *options]
        self.process = start_palestra(*words, with_stderr=False, forked=forked)
        self.line = self.process.stdout.readline()
        found = re.search(r"TINKER_BASE_URL=(\S+)", self.line)
        assert found, self.line + self.process.stdout.read()
        self.url = found[1]

    def complete(self, prompt: str = "hi") -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
        return httpx.post(f"{self.url}/oai/api/v1/completions", json=body, timeout=60)

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(60)


LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 4.0}
LONGROPE |= {"short_factor": [1.0] * 16, "long_factor": [8.0] * 16}
LENGTHS: dict[str, tuple[dict[str, Any], int]] = {
    "phi3": ({"rope_parameters": LONGROPE, "original_max_position_embeddings": 64, "max_position_embeddings": 256}, 64),
    "llama": ({"max_position_embeddings": 256}, 256),
    "mpt": ({"max_seq_len": 48}, 48),
    **{kind: ({}, 32_768) for kind in ("mamba", "mamba2", "falcon_mamba", "bloom", "xlstm")},
}


@pytest.mark.parametrize("kind", LENGTHS)
def test_context_length_is_that_of_the_engine(kind: str, tmp_path: Path) -> None:
    changes, expected = LENGTHS[kind]
    sizes = {"hidden_size": 64, "num_attention_heads": 2} if kind == "phi3" else {}
    AutoConfig.for_model(kind, vocab_size=272, **sizes, **changes).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load_base_info(kind, str(tmp_path), {}).max_length == expected


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def server(data: Path) -> Iterator[Server]:
    started = Server(data, "--alias", "Qwen/Qwen3-0.6B=tiny", "--root-path", "/train")
    yield started
    started.process.kill()
    started.process.communicate()


def children(pid: int) -> list[int]:
    return [*children_of(pid), *workers_of(pid)]


def has_ended(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "State:\tZ" in status.read_text()


def wait_until_ended(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while not all(has_ended(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert all(has_ended(pid) for pid in pids)


def modes(folder: Path) -> dict[str, str]:
    """Permissions of a folder, by path, as in "drwx------"."""
    paths = [folder, *folder.rglob("*")]
    return {path.relative_to(folder.parent).as_posix(): stat.filemode(path.stat().st_mode) for path in paths}


def is_private(mode: str) -> bool:
    return mode in ("drwx------", "-rw-------")


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.slow
def test_files_are_private_and_embedded_requests_of_pages_refused(open_umask: None, data: Path) -> None:
    server = Server(data)
    try:
        found = modes(data)
        assert {"data", "data/secret", "data/weights", "data/store.sqlite", "data/server.lock"} <= set(found)
        assert {path: mode for path, mode in found.items() if not is_private(mode)} == {}
        sites = {site: ask(server.url, "GET", "/api/v1/healthz", Sec_Fetch_Site=site).status for site in SITES}
        assert sites == {"none": 200, "cross-site": 403, "same-site": 403}
        assert ask(server.url, "GET", "/api/v1/healthz").status == 200
    finally:
        server.process.kill()
        server.process.communicate()


@pytest.mark.slow
def test_trained_weights_are_private(open_umask: None, data: Path, tmp_path: Path) -> None:
    server = Server(data)
    try:
        words = ["train", "configs/demo.yaml", "--root", tmp_path, "--name", "a", "--engine", server.url]
        done = run_palestra(*words, "--set", "steps=1")
        assert done.returncode == 0, done.stderr
        found = modes(data)
        assert [path for path in found if path.endswith(".safetensors")]
        assert {"data/store.sqlite-wal", "data/store.sqlite-shm"} <= set(found)
        assert {path: mode for path, mode in found.items() if not is_private(mode)} == {}
    finally:
        server.process.kill()
        server.process.communicate()


@pytest.mark.slow
def test_server_answers_refuses_a_second_server_and_exits_cleanly(server: Server, data: Path) -> None:
    assert server.url.endswith("/train")
    assert server.complete().json()["usage"]["completion_tokens"] > 0
    second = run_palestra("serve", "--port", "0", "--data", data)
    assert second.returncode == 2
    assert "is writing the server's data" in second.stderr
    workers = children(server.process.pid)
    assert server.end(signal.SIGTERM) == 0
    wait_until_ended(workers)  # multiprocessing's resource tracker ends after the server


@pytest.mark.slow
def test_dead_worker_is_replaced_and_orphaned_worker_exits(server: Server) -> None:
    before = server.complete().json()["choices"]
    for pid in workers_of(server.process.pid):
        os.kill(pid, signal.SIGKILL)
    assert server.complete().json()["choices"] == before
    workers = children(server.process.pid)
    assert server.end(signal.SIGKILL) != 0
    wait_until_ended(workers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--alias", "x=none"], 'alias "x" means base "none"'),
        (["--base", "none=/none"], "no model at /none"),
        (["--auth", "/none"], "no file of keys"),
        (["--host", "256.0.0.1"], "cannot listen"),
    ],
)
def test_invalid_serve_options_are_explained(data: Path, options: list[str], message: str) -> None:
    done = run_palestra("serve", "--data", data, *options)
    assert done.returncode == 2
    assert message in done.stderr


def test_keys_are_added_listed_and_removed(tmp_path: Path) -> None:
    def keys(*words: str) -> Any:
        return invoke("keys", *words, "--auth", tmp_path / "keys")

    assert keys("list").exit_code == 2
    key = keys("add", "ada").stdout.strip()
    assert key.startswith("tml-")
    assert key not in (tmp_path / "keys").read_text()
    assert keys("list").stdout.split() == ["ada", "1"]
    assert keys("remove", "ada").exit_code == 0
    assert keys("remove", "ada").exit_code == 2


def test_a_folder_that_was_there_keeps_its_mode(data: Path) -> None:
    data.mkdir()
    data.chmod(0o755)
    server = Server(data, forked=True)
    try:
        assert server.process.stdout.readline().endswith(f"chmod 700 {data}\n")
        found = modes(data)
        assert found.pop("data") == "drwxr-xr-x"
        assert found and all(map(is_private, found.values()))
    finally:
        server.process.kill()
        server.process.communicate()
