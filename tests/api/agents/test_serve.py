"""A trained agent behind an endpoint: a real server process, called by OpenAI's own client."""

import json
import os
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from helpers import raw
from helpers.command_line import palestra, refused
from helpers.trained import two_agents
from helpers.warm_processes import PALESTRA

from palestra.core.http.completions import HTTP_LIMITS

pytestmark = pytest.mark.slow  # the process loads torch, on a machine that may be busy

KEY = "a-key-of-ours"
ASK = [{"role": "user", "content": "say 0 or 1"}]


@contextmanager
def serving(*arguments, **environment):
    """The address of a server process, which must exit with code 0 on SIGTERM."""
    command = [*PALESTRA, "serve-agent", *map(str, arguments), "--port", "0"]
    # to import the env's module
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": paths} | environment,
    )
    try:
        line = process.stdout.readline()
        found = re.search(r" at (http\S+)", line)
        assert found, line + process.stdout.read()
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 0, out


@pytest.fixture(scope="module")
def served(base, tmp_path_factory):
    """A run's agents, and the address of a server that serves both and requires a key."""
    folder = tmp_path_factory.mktemp("served")
    run = two_agents(base, folder)
    with serving(run, "--key-env", "AGENT_KEY", AGENT_KEY=KEY) as url:
        yield run, url


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=served[1], api_key=KEY, max_retries=0) as client:
        yield client


def complete(client, **settings):
    return client.chat.completions.create(**{"model": "guide", "messages": ASK, "temperature": 0} | settings)


def test_openai_client_works(client):
    assert [model.id for model in client.models.list()] == ["guide", "walker"]
    said = complete(client)
    assert said.model == "guide" and said.choices[0].message.role == "assistant"
    assert said.choices[0].finish_reason in ("stop", "length") and said.usage.completion_tokens <= 2
    assert said.usage.prompt_tokens > 5
    assert complete(client, max_tokens=1).usage.completion_tokens == 1
    assert complete(client, max_completion_tokens=7, temperature=1, top_p=0.9, stop=["x"]).usage.completion_tokens <= 7


def test_streams_add_up_to_the_whole_answer(client):
    whole = complete(client).choices[0]
    chunks = [chunk.choices[0] for chunk in complete(client, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].finish_reason == whole.finish_reason


def test_seed_fixes_the_answer_under_concurrency(client):
    settings = {"temperature": 1, "max_tokens": 12}
    with ThreadPoolExecutor(8) as threads:
        texts = list(
            threads.map(lambda i: complete(client, seed=i % 2, **settings).choices[0].message.content, range(16))
        )
    assert len(set(texts[::2])) == len(set(texts[1::2])) == 1 and texts[0] != texts[1]


def test_top_k_of_one_leaves_nothing_to_chance(client):
    settings = {"temperature": 1, "max_tokens": 8, "extra_body": {"top_k": 1}}
    said = {complete(client, seed=seed, **settings).choices[0].message.content for seed in range(4)}
    free = {complete(client, seed=seed, temperature=1, max_tokens=8).choices[0].message.content for seed in range(4)}
    assert len(said) == 1 < len(free)


def test_stream_ends_with_token_counts_if_they_are_asked_for(client):
    *_, last = complete(client, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage == complete(client).usage


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "nobody"}, "no model 'nobody' here, but guide, walker"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": [{"role": "user", "content": "0 1 " * 20_000}]}, "token"),
        ({"n": 2}, "n must be 1"),
        ({"response_format": {"type": "grammar"}}, "'response_format' is "),
        ({"extra_body": {"min_p": 0.5}}, "'min_p' is not used here: leave it out, or send 0"),
        ({"tool_choice": "required"}, "tool_choice asks for a call, and there are no tools"),
    ],
)
def test_invalid_call_gets_an_openai_error(client, settings, message):
    with pytest.raises(openai.BadRequestError, match=message) as error:
        complete(client, **settings)
    assert error.value.body["type"] == "invalid_request_error"


def test_missing_key_gets_401(served):
    for key in ("wrong", "ключ"):
        headers = {"Authorization": f"Bearer {key}".encode()}
        reply = httpx.post(f"{served[1]}/chat/completions", json={"model": "guide", "messages": ASK}, headers=headers)
        assert reply.status_code == 401 and "key" in reply.json()["error"]["message"]
    assert httpx.get(f"{served[1]}/models").status_code == 401


def test_protocol_errors_have_the_openai_format(served):
    reply = httpx.get(f"{served[1]}/nothing", headers={"Authorization": f"Bearer {KEY}"})
    assert reply.status_code == 404 and reply.json()["error"]["code"] == 404
    reply = httpx.post(f"{served[1]}/chat/completions", content=b"{", headers={"Authorization": f"Bearer {KEY}"})
    assert reply.status_code == 400 and reply.json()["error"]["message"]


@pytest.mark.parametrize("size", [15 * 2**20, 20 * 2**20])
def test_too_long_text_is_refused_without_blocking(served, client, size):
    """A text longer than any token could spell is not tokenised; a body beyond the limit is not read."""
    _, url = served
    text = json.dumps({"model": "guide", "messages": [{"role": "user", "content": "0 1 " * (size // 4)}]}).encode()
    with ThreadPoolExecutor(1) as aside:
        began = time.monotonic()
        large = aside.submit(raw.ask, url, "POST", "/v1/chat/completions", text, Authorization=f"Bearer {KEY}")
        complete(client)
        assert time.monotonic() - began < 20  # 61 s if it were tokenised first
        reply = large.result()
    assert reply.status == (400 if size < HTTP_LIMITS.max_body_bytes else 413)
    assert reply.status == 413 or "does not fit the" in reply.json()["error"]["message"]


def tool_call_answer(arguments):
    """An answer that calls a tool with a JSON text."""
    return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"messages": [{"role": "user", "content": "x", "tool_calls": 5}]},
        {"messages": [{"role": {"a": 1}, "content": "x"}]},
        {"messages": tool_call_answer("[" * 600 + "]" * 600)},
        {"tools": [5]},
        {"stop": 5},
        {"stop": [""]},
        {"stop": {"a": "b"}},
        {"temperature": "hot"},
        {"temperature": 10**400},
        {"max_tokens": 10**400},
        {"seed": 1.5},
        {"seed": [1]},
    ],
    ids=range(13),
)
def test_malformed_calls_get_400(served, change):
    body = json.dumps({"model": "guide", "messages": ASK, "max_tokens": 1} | change).encode()
    reply = raw.ask(served[1], "POST", "/v1/chat/completions", body, Authorization=f"Bearer {KEY}")
    assert reply.status == 400 and reply.json()["error"]["message"]


def test_unusual_valid_calls_are_answered(client):
    assert complete(client, seed=10**300).choices
    with pytest.raises(openai.BadRequestError, match="no chat template that writes them"):
        complete(client, messages=tool_call_answer("[" * 50))
    assert complete(client, temperature=1e-320).choices


def test_browser_origin_is_refused(served):
    body, key = json.dumps({"model": "guide", "messages": ASK}).encode(), f"Bearer {KEY}"
    for page in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
        reply = raw.ask(served[1], "POST", "/v1/chat/completions", body, Authorization=key, **page)
        assert reply.status == 403


def test_invalid_server_options_are_refused(served, tmp_path, monkeypatch):
    run, url = served
    port = re.search(r":(\d+)/", url)[1]
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    assert f"cannot listen at 127.0.0.1:{port}" in refused("serve-agent", run, "--port", port)
    assert "there is no key in the variable NO_SUCH_KEY" in refused("serve-agent", run, "--key-env", "NO_SUCH_KEY")
    assert "there is no key in" in refused("serve-agent", run, "--key-file", tmp_path / "none")
    assert "two agents are called guide" in refused("serve-agent", run, run)


def test_published_agent_answers_identically(served, client, tmp_path):
    run, _ = served
    palestra("publish", run, "--member", "guide", "--out", tmp_path / "guide")
    (tmp_path / "key").write_text(f"{KEY}\n")
    with (
        serving(tmp_path / "guide", "--key-file", tmp_path / "key") as url,
        openai.OpenAI(base_url=url, api_key=KEY) as other,
    ):
        assert complete(other).choices[0].message == complete(client).choices[0].message
