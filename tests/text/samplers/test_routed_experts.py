"""Routed experts from a server that answers as documented for vLLM 0.22 (CompletionResponseChoice.routed_experts), in
the samples of the algorithm, and after recording."""

import asyncio
import base64
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from palestra.core.types import Answer, Episode, Node
from palestra.engine.conversation.encoder import ChatEncoder
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.runs.episodes import load_episodes, to_table
from palestra.testing import tiny_tokenizer
from palestra.text.algorithms.base import build_sample
from palestra.text.policies.base import Query
from palestra.text.policies.lm import LanguagePolicy
from palestra.text.samplers.adapter_store import AdapterStore
from palestra.text.samplers.vllm import RequestTimeouts, SamplerServer, VllmSampler

TOKENS = [7, 8, 9]


def experts_of(prompt: int) -> np.ndarray:
    """Expert numbers [P + T - 1, 3 layers, 2] as small integers."""
    return np.arange((prompt + len(TOKENS) - 1) * 6, dtype=np.uint8).reshape(-1, 3, 2)


class Vllm(BaseHTTPRequestHandler):
    """A server that gives two answers with equal tokens to every prompt."""

    old = False

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send({"data": [{"id": "base", "owned_by": "vllm", "parent": None}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        experts, file = experts_of(len(body["prompt"])), io.BytesIO()
        np.save(file, experts)
        found = experts.tolist() if self.old else base64.b64encode(file.getvalue()).decode()
        logprobs = {"token_logprobs": [-1.0] * len(TOKENS)}
        answer = {"token_ids": TOKENS, "logprobs": logprobs, "finish_reason": "stop", "routed_experts": found}
        self._send({"choices": [{"index": i, "text": "", **answer} for i in range(body["n"])]})

    def _send(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def policy() -> Iterator[LanguagePolicy]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Vllm)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    sampler = VllmSampler([SamplerServer(url)], AdapterStore(None, "tiny"), RequestTimeouts(20.0, 1.0))
    sampler.connect()
    yield LanguagePolicy("solver@3", sampler, ChatEncoder(tiny_tokenizer()), SamplingConfig(max_tokens=3))
    sampler.close()
    server.shutdown()
    server.server_close()


def test_experts_reach_the_sample_and_survive_a_recording(policy, tmp_path):
    answers = asyncio.run(policy.act(Query("", "up", n=2)))
    expected = experts_of(len(answers[0].prompt_ids))
    episode = Episode("toy", 0, {"a": "solver", "b": "script"})
    episode.nodes.append(Node(0, None, 0, {"a": "up"}, {"a": answers[0], "b": Answer("x", "script")}, done=True))
    pq.write_table(to_table(0, [episode]), tmp_path / "episodes.parquet")
    (again,) = load_episodes(tmp_path / "episodes.parquet")
    assert again.nodes[0].answers["b"].routed_experts is None
    for answer in (*answers, again.nodes[0].answers["a"]):
        sample = build_sample(answer, np.ones(3, np.float32))
        np.testing.assert_array_equal(sample.routed_experts, expected)
        assert len(sample.routed_experts) == len(sample.prompt_ids) + len(sample.token_ids) - 1


def test_lists_of_an_older_server_are_refused(policy, monkeypatch):
    monkeypatch.setattr(Vllm, "old", True)
    with pytest.raises(ValueError, match=r"of vLLM 0\.21 cannot be read"):
        asyncio.run(policy.act(Query("", "up")))
