"""The contract of samplers over HTTP: the same tests for palestra's server, which always runs, and for the official
vLLM if there is one (`-m gpu`; PALESTRA_VLLM_URL is the address of a running one with the base `tiny`)."""

import asyncio
import gc
import importlib.util
import json
import math
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from helpers.raw import answer as reply_on
from helpers.raw import ask, connected, endless, head, resident
from helpers.samplers import official, serving
from helpers.small_models import random_adapter
from helpers.tolerances import LOGPROB_ATOL
from transformers import MistralConfig, MistralForCausalLM

from palestra.core.http.retry import RetryPolicy
from palestra.engine.bases.model import Engine
from palestra.engine.lora.adapters import Snapshot
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.request import Completion, Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.engine.training.peft_format import load_adapter
from palestra.testing import tiny_tokenizer
from palestra.text.samplers import vllm
from palestra.text.samplers.adapter_store import AdapterStore
from palestra.text.samplers.logprob_check import SampledPolicy, check_logprobs
from palestra.text.samplers.vllm import RequestTimeouts, SamplerServer, VllmSampler

KEY = "open sesame"
WORDS = SamplingConfig(max_tokens=6)
MORE = 5000  # more tokens than the base has positions


class ServerInfo(NamedTuple):
    """A server, and what a client needs to know of it."""

    url: str
    ours: bool
    key: str


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("tiny", device="cpu")


@pytest.fixture(scope="module", params=["ours", pytest.param("vllm", marks=pytest.mark.gpu)])
def there(request: pytest.FixtureRequest) -> Iterator[ServerInfo]:
    with ExitStack() as stack:
        if request.param == "ours":
            url, _ = stack.enter_context(serving("--base", "tiny", key=KEY))
            yield ServerInfo(url, True, KEY)
        elif url := os.environ.get("PALESTRA_VLLM_URL", ""):
            yield ServerInfo(url, False, os.environ.get("VLLM_API_KEY", ""))
        elif importlib.util.find_spec("vllm") and torch.cuda.is_available():
            yield ServerInfo(stack.enter_context(official("tiny")), False, "")
        else:
            pytest.skip("no vLLM here: set PALESTRA_VLLM_URL, or install vllm beside a GPU")


def open_sampler(there: ServerInfo, **options: Any) -> VllmSampler:
    sampler = VllmSampler(
        [SamplerServer(there.url)], AdapterStore(None, "tiny"), RequestTimeouts(60.0, 1.0), there.key, **options
    )
    sampler.connect()
    return sampler


@pytest.fixture
def sampler(there: ServerInfo) -> Iterator[VllmSampler]:
    made = open_sampler(there)
    yield made
    made.close()


def prompt(engine: Engine, text: str = "up down left") -> np.ndarray:
    return np.array(engine.tokenizer.encode(text), np.int32)


def strong_adapter(engine: Engine, name: str, seed: int = 0, rank: int = 4) -> Snapshot:
    """An adapter that changes the outputs strongly."""
    return random_adapter(engine, LoraConfig(rank=rank, alpha=8), seed, 0.1).snapshot(name)


def sample_together(sampler: VllmSampler, *requests: Request) -> list[list[Completion]]:
    async def asked() -> list[list[Completion]]:
        return await asyncio.gather(*(sampler.sample(request) for request in requests))

    return asyncio.run(asked())


def tokens(answers: list[Completion]) -> list[list[int]]:
    return [answer.token_ids.tolist() for answer in answers]


def logprobs(answers: list[list[Completion]]) -> np.ndarray:
    return np.concatenate([answer.logprobs for each in answers for answer in each])


def adapters_at(there: ServerInfo) -> set[str]:
    call = urllib.request.Request(f"{there.url}/v1/models", headers={"Authorization": f"Bearer {there.key}"})
    with urllib.request.urlopen(call) as answer:
        return {card["id"] for card in json.load(answer)["data"] if card["parent"]}


def test_token_ids_are_sent_and_received(there: ServerInfo, engine: Engine, sampler: VllmSampler) -> None:
    (answers,) = sample_together(sampler, Request(prompt(engine), 4, WORDS, seed=2**63 - 9))
    assert len(answers) == 4 and len({tuple(ids) for ids in tokens(answers)}) > 1
    for answer in answers:
        assert 1 <= len(answer.token_ids) == len(answer.logprobs) <= 6
        assert (
            answer.token_ids.dtype == np.int32 and answer.logprobs.dtype == np.float32 and (answer.logprobs < 0).all()
        )
        ended = answer.token_ids[-1] == engine.tokenizer.eos_token_id
        assert answer.stop_reason == ("stop" if ended else "length") and (ended or len(answer.token_ids) == 6)


def test_samples_depend_on_the_seed_only(there: ServerInfo, engine: Engine, sampler: VllmSampler) -> None:
    red, blue = strong_adapter(engine, "red@1", 1), strong_adapter(engine, "blue@2", 2, rank=2)
    asked = [Request(prompt(engine), 3, WORDS, adapter, seed) for adapter in (red, blue) for seed in (5, 6)]
    alone = [sample_together(sampler, request)[0] for request in asked]
    shared = sample_together(sampler, *asked)
    assert [tokens(answers) for answers in shared] == [tokens(answers) for answers in alone]
    assert len({str(tokens(answers)) for answers in shared}) == 4
    for a, b in zip(shared, alone, strict=True):
        assert np.concatenate([x.logprobs for x in a]) == pytest.approx(
            np.concatenate([x.logprobs for x in b]), abs=1e-4
        )


def test_palestra_sampler_server_equals_the_engine(there: ServerInfo, engine: Engine, sampler: VllmSampler) -> None:
    if not there.ours:
        pytest.skip("vLLM draws from another generator")
    cut = SamplingConfig(max_tokens=6, temperature=0.7, top_k=20, top_p=0.9, stop=(" down",))
    red = strong_adapter(engine, "red@1")
    kept = cut.model_copy(update={"keep_sampling_mask": True})
    asked = [
        Request(prompt(engine), 4, sampling, adapter, seed, keep_kv=seed == 1)
        for seed, (sampling, adapter) in enumerate([(WORDS, None), (cut, red), (WORDS, red), (kept, red)])
    ]
    here, elsewhere = Sampler(engine).sample_all(asked), sample_together(sampler, *asked)
    assert [tokens(answers) for answers in elsewhere] == [tokens(answers) for answers in here]
    for ours, theirs in zip(here, elsewhere, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert b.stop_reason == a.stop_reason and b.logprobs == pytest.approx(a.logprobs, abs=LOGPROB_ATOL)
            masks = [own.sampling_mask and own.sampling_mask.rows() for own in (a, b)]
            assert masks[0] == masks[1] and bool(masks[0]) == (ours is here[-1])


def test_choices_bind_a_server_of_ours_too(there: ServerInfo, engine: Engine, sampler: VllmSampler) -> None:
    if not there.ours:
        pytest.skip("vLLM's servers are refused at the start, see below")
    end = int(engine.tokenizer.eos_token_id)
    choices = ((20, end), (20, 21, end), (22, end))
    asked = Request(prompt(engine), 40, SamplingConfig(max_tokens=3, legal_only=True), seed=3, choices=choices)
    (here,), (elsewhere,) = Sampler(engine).sample_all([asked]), sample_together(sampler, asked)
    assert {tuple(ids) for ids in tokens(elsewhere)} <= set(choices)
    assert tokens(elsewhere) == tokens(here) and len(here) == 40
    for ours, theirs in zip(here, elsewhere, strict=True):
        assert ours.sampling_mask is not None and theirs.sampling_mask is not None
        assert theirs.sampling_mask.rows() == ours.sampling_mask.rows()


def test_stop_token_is_part_of_the_answer(there: ServerInfo, engine: Engine, sampler: VllmSampler) -> None:
    start, greedy = prompt(engine), SamplingConfig(max_tokens=8, temperature=0, stop_at_eos=False)
    ((whole, twin),) = sample_together(sampler, Request(start, 2, greedy))
    assert len(whole.token_ids) == 8 and whole.stop_reason == "length" and tokens([twin]) == tokens([whole])
    third = int(whole.token_ids[2])
    first = whole.token_ids.tolist().index(third) + 1
    by_id = greedy.model_copy(update={"stop_token_ids": (third,)})
    by_text = greedy.model_copy(update={"stop": (engine.tokenizer.decode([third]),)})
    for stopped in sample_together(sampler, Request(start, 1, by_id), Request(start, 1, by_text)):
        assert tokens(stopped) == [whole.token_ids[:first].tolist()] and stopped[0].stop_reason == "stop"


def test_trainer_and_sampler_agree_on_base_and_adapters_in_one_batch(
    there: ServerInfo, engine: Engine, sampler: VllmSampler
) -> None:
    claims = [
        SampledPolicy("red", LoraConfig(rank=4), WORDS),
        SampledPolicy("plain", None, WORDS),
        SampledPolicy("blue", LoraConfig(rank=8), WORDS),
    ]
    check_logprobs(sampler, engine, claims, None)
    assert sampler.zero_adapter is not None


def test_sampling_masks_are_checked_and_refused_for_vllm(
    there: ServerInfo, engine: Engine, sampler: VllmSampler
) -> None:
    cut = SamplingConfig(top_k=20, top_p=0.9, temperature=0.7, keep_sampling_mask=True)
    policies = [SampledPolicy("red", LoraConfig(rank=4), cut)]
    if there.ours:
        check_logprobs(sampler, engine, policies, None)
    sampler.servers[0].is_palestra = False
    with pytest.raises(ValueError, match=rf"policies.red.sampling keeps only some tokens .* at {there.url} does not"):
        check_logprobs(sampler, engine, policies, None)


def test_sampler_with_other_weights_is_refused(there: ServerInfo, engine: Engine, sampler: VllmSampler) -> None:
    other = Engine.load("tiny", device="cpu")
    with torch.no_grad():
        next(iter(other.linear_layers.values())).weight.mul_(1.1)
    with pytest.raises(ValueError, match=rf'{there.url} does not agree .* policy "red" .* differ by .*0\.001'):
        check_logprobs(sampler, other, [SampledPolicy("red", LoraConfig(rank=4), WORDS)], None)
    check_logprobs(sampler, other, [SampledPolicy("red", LoraConfig(rank=4), WORDS)], tolerance=10.0)


def test_sampler_without_the_windows_of_the_base_is_refused(tmp_path: Path) -> None:
    """The same weights on both sides, but the server attends to all keys, the trainer to the last 32: shorter prompts
    of 12 tokens would not show it."""

    def save(name: str, window: int | None) -> str:
        shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = MistralConfig(**shape, intermediate_size=96, vocab_size=256, eos_token_id=4, sliding_window=window)
        torch.manual_seed(0)
        MistralForCausalLM(config).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    whole = save("whole", None)
    with serving("--base", whole) as (url, _):
        sampler = open_sampler(ServerInfo(url, True, ""))
        claims = [SampledPolicy("red", LoraConfig(rank=4), WORDS)]
        check_logprobs(sampler, Engine.load(whole, device="cpu"), claims, None)
        with pytest.raises(ValueError, match=r'does not agree .* policy "red"'):
            check_logprobs(sampler, Engine.load(save("windowed", 32), device="cpu"), claims, None)


def test_adapter_versions_have_unique_names_and_are_unloaded(
    there: ServerInfo, engine: Engine, sampler: VllmSampler
) -> None:
    before, sampler.zero_adapter = adapters_at(there), None
    first, second = strong_adapter(engine, "red@1", 1), strong_adapter(engine, "red@1", 2)
    (a,), (b,) = sample_together(sampler, *(Request(prompt(engine), 1, WORDS, each, 3) for each in (first, second)))
    names = {sampler.adapter_store.adapter_name(each) for each in (first, second)}
    assert adapters_at(there) - before == names and all(name.startswith("red@1.") for name in names)
    assert a.logprobs[0] != pytest.approx(b.logprobs[0], abs=1e-3)
    folder = sampler.adapter_store.folder
    saved = load_adapter(folder / sampler.adapter_store.adapter_name(first), engine).snapshot()
    assert all(
        torch.equal(w, v) for k in first.weights for w, v in zip(first.weights[k], saved.weights[k], strict=True)
    )
    gone = sampler.adapter_store.adapter_name(first)
    del first
    gc.collect()
    until = time.monotonic() + 10
    while (gone in adapters_at(there) or (folder / gone).exists()) and time.monotonic() < until:
        time.sleep(0.02)
    assert adapters_at(there) - before == names - {gone} and not (folder / gone).exists()
    assert tokens(sample_together(sampler, Request(prompt(engine), 1, WORDS, second, 3))[0]) == tokens([b])


def test_lost_adapters_are_reloaded(there: ServerInfo, engine: Engine, sampler: VllmSampler) -> None:
    red = strong_adapter(engine, "red@1")
    request = Request(prompt(engine), 2, WORDS, red, 4)
    (before,) = sample_together(sampler, request)
    send(there, "/v1/unload_lora_adapter", {"lora_name": sampler.adapter_store.adapter_name(red)})  # as a restart does
    (after,) = sample_together(sampler, request)
    assert tokens(after) == tokens(before)


def test_adapter_that_could_not_be_written_is_written_by_a_later_request(
    there: ServerInfo, engine: Engine, sampler: VllmSampler
) -> None:
    """Also by the same request, if that is possible before the retry time is over."""
    folder = sampler.adapter_store.folder
    request = Request(prompt(engine), 1, WORDS, strong_adapter(engine, "red@1"), 4)
    (expected,) = sample_together(sampler, replace(request, adapter=strong_adapter(engine, "red@0")))
    away = folder.rename(folder.with_suffix(".away"))
    folder.touch()  # in its place: a write raises an OSError

    def put_back() -> None:
        folder.unlink()
        away.rename(folder)

    sampler.timeouts = RequestTimeouts(60.0, 0.1)
    with pytest.raises(ValueError, match=r"cannot write an adapter for the samplers: .*Is the disk full"):
        sample_together(sampler, request)
    sampler.timeouts = RequestTimeouts(60.0, 10.0)
    timer = threading.Timer(0.15, put_back)
    timer.start()
    (found,) = sample_together(sampler, request)
    timer.join()
    assert tokens(found) == tokens(expected)


def send(there: ServerInfo, path: str, body: dict[str, Any], key: str | None = None) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {key or there.key}", "Content-Type": "application/json"}
    call = urllib.request.Request(there.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(call) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_server_refusals_are_reported(there: ServerInfo, engine: Engine, sampler: VllmSampler) -> None:
    status, said = send(there, "/v1/completions", {"model": "nobody@3", "prompt": [5], "max_tokens": 1})
    assert status == 404 and "nobody@3" in said
    status, said = send(there, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"})
    assert status in (400, 404, 500) and "/nowhere" in said
    with pytest.raises(ValueError, match=f"{there.url} answered 400: "):
        sample_together(sampler, Request(np.full(MORE, 7, np.int32), 1, WORDS))
    with pytest.raises(ValueError, match=r'serves tiny, not "huge": set sampler\.model'):
        VllmSampler(
            [SamplerServer(there.url, "huge")], AdapterStore(None, "tiny"), RequestTimeouts(), there.key
        ).connect()


def test_web_page_cannot_load_an_adapter(there: ServerInfo, engine: Engine, sampler: VllmSampler) -> None:
    """Also not with the key, by a simple request without CORS, or with a rebound name."""
    if not there.ours:
        pytest.skip("vLLM has no such check")
    red = strong_adapter(engine, "red@1")
    sample_together(sampler, Request(prompt(engine), 1, WORDS, red, 4))
    before, body = adapters_at(there), json.dumps({"lora_name": sampler.adapter_store.adapter_name(red)}).encode()
    host = urlsplit(there.url).netloc
    for page in (
        {"Origin": "https://evil.example"},
        {"Origin": f"http://{host}"},  # it serves no pages
        {"Origin": "http://evil.example:8001", "Host": "evil.example:8001"},
        {"Host": "evil.example:8001"},
    ):
        sent = {"Content_Type": "text/plain", "Authorization": f"Bearer {there.key}", **page}
        assert ask(there.url, "POST", "/v1/unload_lora_adapter", body, **sent).status == 403
        assert ask(there.url, "GET", "/v1/models", **sent).status == 403
    assert adapters_at(there) == before
    assert ask(there.url, "GET", "/health").status == 200


def test_sampler_request_bodies_are_limited(there: ServerInfo) -> None:
    if not there.ours:
        pytest.skip("vLLM has bounds of its own")
    key = f"Bearer {there.key}"
    with connected(there.url) as wire:
        wire.sendall(head(there.url, "POST", vllm.COMPLETIONS_PATH, Content_Length=str(700 * 2**20), Authorization=key))
        assert reply_on(wire).status == 413
    reply, _ = endless(there.url, vllm.COMPLETIONS_PATH, 3, Authorization=key)
    assert reply.status == 413


@pytest.mark.slow
def test_flood_of_bytes_takes_no_memory() -> None:
    """To a server without a key, as any program on the machine may send it."""
    with serving("--base", "tiny") as (url, process):
        assert ask(url, "POST", vllm.COMPLETIONS_PATH, json.dumps(BASE).encode()).status == 200
        before = resident(process.pid)
        reply, _ = endless(url, vllm.COMPLETIONS_PATH, 700)
        assert reply.status in (413, 0) and resident(process.pid, peak=True) < before + 100


BASE = {"model": "tiny", "prompt": [5], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", b""),
        ("completions", b"[" * 200_000),
        ("completions", b'{"model": "tiny", "prompt": ' + b"[" * 5_000 + b"]" * 5_000 + b"}"),
        ("completions", b'{"model": "\\ud800", "prompt": [5]}'),
        ("completions", b'{"model": "tiny", "prompt": [5], "temperature": NaN}'),
        ("completions", b'{"model": "tiny", "prompt": [5], "temperature": 1e999}'),
        ("completions", json.dumps({**BASE, "stop": [""]}).encode()),
        ("completions", json.dumps({**BASE, "stop": ["x"] * 100_000}).encode()),
        ("completions", json.dumps({**BASE, "prompt": [2**31 - 1]}).encode()),
        ("completions", json.dumps({**BASE, "prompt": []}).encode()),
        ("completions", json.dumps({**BASE, "max_tokens": 10**400}).encode()),
        ("completions", json.dumps({**BASE, "choices": [[5, 6], [7, 8]], "stop": ["x"]}).encode()),
        ("completions", json.dumps({**BASE, "choices": [[5, 6]], "max_tokens": 1}).encode()),
        ("completions", json.dumps({**BASE, "max_tokens": 10**12}).encode()),
        ("completions", json.dumps({**BASE, "n": 2**40}).encode()),
        ("completions", json.dumps({**BASE, "seed": 2**64}).encode()),
        ("load_lora_adapter", b'{"lora_name": "x", "lora_path": "a\\u0000b"}'),
        ("load_lora_adapter", json.dumps({"lora_name": "x", "lora_path": "../" * 1_000 + "etc"}).encode()),
        ("load_lora_adapter", json.dumps({"lora_name": "x", "lora_path": "y" * 3_000}).encode()),
        ("load_lora_adapter", json.dumps({"lora_name": "x" * 10_000, "lora_path": "y"}).encode()),
        ("load_lora_adapter", b'{"lora_name": ["x"], "lora_path": {}}'),
    ],
)
def test_malformed_calls_get_400(there: ServerInfo, path: str, body: bytes) -> None:
    if not there.ours:
        pytest.skip("of our server alone")
    reply = ask(there.url, "POST", f"/v1/{path}", body, Authorization=f"Bearer {there.key}")
    assert reply.status == 400 and reply.json()["error"]["message"]


@pytest.mark.parametrize("temperature", [1e-320, 1e300])
def test_extreme_temperature_does_not_affect_the_batch(there: ServerInfo, temperature: float) -> None:
    if not there.ours:
        pytest.skip("of our server alone")
    status, said = send(there, vllm.COMPLETIONS_PATH, {**BASE, "temperature": temperature, "logprobs": 0})
    assert status == 200 and math.isfinite(json.loads(said)["choices"][0]["logprobs"]["token_logprobs"][0])


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (b"[]", b""),
        (b"[" * 100_000, b""),
        (b'{"peft_type": "LORA"}', b"no tensors"),
        (b'{"peft_type": "LORA", "r": "x", "lora_alpha": null}', b"\xff" * 64),
        (b"\xff", b""),
        (None, b""),
    ],
)
def test_invalid_adapter_is_refused(there: ServerInfo, tmp_path: Path, config: bytes | None, weights: bytes) -> None:
    if not there.ours:
        pytest.skip("of our server alone")
    if config is None:
        (tmp_path / "adapter_config.json").mkdir()
    else:
        (tmp_path / "adapter_config.json").write_bytes(config)
    (tmp_path / "adapter_model.safetensors").write_bytes(weights)
    status, said = send(there, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(tmp_path)})
    assert status == 400 and "cannot load the adapter" in said


def test_wrong_key_is_reported(there: ServerInfo) -> None:
    if not there.key:
        pytest.skip("this server wants no key")
    with pytest.raises(ValueError, match=r"answered 401.*sampler\.key_env"):
        open_sampler(there._replace(key="friend"))


def test_missing_server_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"no answer from the sampler at http://127.0.0.1:9.*Is it running"):
        open_sampler(ServerInfo("http://127.0.0.1:9", True, ""))
    assert time.monotonic() - began < 10


def test_failover_to_another_server(there: ServerInfo, engine: Engine) -> None:
    servers = [
        SamplerServer("http://127.0.0.1:9", "tiny", is_palestra=there.ours),
        SamplerServer(there.url, "tiny", is_palestra=there.ours),
    ]
    made = VllmSampler(servers, AdapterStore(None, "tiny"), RequestTimeouts(60.0, 5.0), there.key)
    red = strong_adapter(engine, "red@1")
    found = sample_together(made, *(Request(prompt(engine), 1, WORDS, red, seed) for seed in range(6)))
    assert len(found) == 6 and servers[0].failures and not servers[1].failures
    made.close()


def test_run_ends_without_samplers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "PAUSES", RetryPolicy(0.05, 0.1))
    made = VllmSampler(
        [SamplerServer("http://127.0.0.1:9", "tiny")], AdapterStore(None, "tiny"), RequestTimeouts(60.0, 0.3)
    )
    with pytest.raises(ValueError, match="no sampler answered for 0 seconds"):
        sample_together(made, Request(prompt(engine), 1, WORDS))
    with pytest.raises(ValueError, match="no sampler answered"):
        made.clear_cache()
    made.close()
