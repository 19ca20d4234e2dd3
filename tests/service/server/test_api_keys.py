"""API keys: hashed in a file, read again when it changes."""

import hashlib
import os
import threading
from contextlib import suppress

import pytest
from helpers.warm_processes import start_palestra

from palestra.service.server import api_keys as module
from palestra.service.server.api_keys import ANONYMOUS_OWNER, ApiKeys, add_key, read_keys, remove_keys


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys"


def test_only_the_hash_of_a_key_is_stored(path):
    key = add_key(path, "ann")
    assert key.startswith("tml-") and key not in path.read_text() and path.stat().st_mode & 0o777 == 0o600
    keys = ApiKeys(path)
    assert keys.owner_of(key) == "ann"
    assert keys.owner_of(key + "x") is None and keys.owner_of("") is None and keys.owner_of(None) is None


def test_keys_are_accepted_with_the_prefix_of_official_clients(path):
    path.write_text(f"ann {hashlib.sha256(b'sk-mine').hexdigest()}\n")
    keys = ApiKeys(path)
    assert keys.owner_of("sk-mine") == keys.owner_of("tml-sk-mine") == "ann"
    assert keys.owner_of("tml-tml-sk-mine") is None and keys.owner_of("tml-") is None


def test_every_key_is_accepted_without_a_key_file(path):
    assert ApiKeys(None).owner_of("anything") == ApiKeys(None).owner_of(None) == ANONYMOUS_OWNER


def test_keys_added_and_removed_at_once_are_all_in_the_file(path):
    add_key(path, "gone")
    processes = [start_palestra("keys", "add", f"owner{number}", "--auth", str(path)) for number in range(6)]
    processes.append(start_palestra("keys", "remove", "gone", "--auth", str(path)))
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0] * 7, outputs
    keys = ApiKeys(path)
    owners = [keys.owner_of(out.strip()) for out, _ in outputs[:-1]]
    assert owners == [f"owner{number}" for number in range(6)]
    assert len(read_keys(path)) == 6


def test_key_files_are_private_from_the_first_byte_whatever_the_umask(path):
    """Reads the mode of every file in the folder while keys are added."""
    before, seen = os.umask(0), set()
    stop = threading.Event()

    def watch():
        while not stop.is_set():
            for file in path.parent.glob("*keys"):
                with suppress(FileNotFoundError):
                    seen.add(file.stat().st_mode & 0o777)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for number in range(50):
            add_key(path, f"owner{number}")
    finally:
        stop.set()
        watcher.join()
        os.umask(before)
    assert seen == {0o600}


def test_removed_keys_are_refused_at_once(path):
    first, second, other = add_key(path, "ann"), add_key(path, "ann"), add_key(path, "bob")
    keys = ApiKeys(path)
    assert [keys.owner_of(key) for key in (first, second, other)] == ["ann", "ann", "bob"]
    token = keys.issue_token("ann")
    assert keys.owner_of(token) == "ann"
    assert remove_keys(path, "ann") == 2
    os.utime(path, (1, 1))  # a clock of coarse grain
    assert [keys.owner_of(key) for key in (first, second, other, token)] == [None, None, "bob", None]


def test_tokens_are_bound_to_one_server_and_one_hour(path, monkeypatch):
    add_key(path, "ann")
    keys = ApiKeys(path)
    assert ApiKeys(path).owner_of(keys.issue_token("ann")) is None
    monkeypatch.setattr(module, "TOKEN_TTL_S", -10.0)
    assert keys.owner_of(keys.issue_token("ann")) is None


@pytest.mark.parametrize("junk", ["eyJ.x.y", "\udce4", "a" * 10_000, "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbm4ifQ."])
def test_malformed_keys_are_refused(path, junk):
    add_key(path, "ann")
    assert ApiKeys(path).owner_of(junk) is None


def test_invalid_key_files_are_refused_with_the_reason(path):
    with pytest.raises(ValueError, match="palestra keys add"):
        ApiKeys(path)
    with pytest.raises(ValueError, match="cannot own keys"):
        add_key(path, "two words")
    path.write_text("ann notahash\n")
    with pytest.raises(ValueError, match="palestra keys add"):
        read_keys(path)
