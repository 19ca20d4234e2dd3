"""The contract of samplers over HTTP: the same tests for a server of ours, which always runs, and for the official vLLM
where there is one (`-m gpu`; PALESTRA_VLLM_URL names one of the base `tiny` that runs already)."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from samplers import official, serving

from palestra.engine.checkpoints import load_adapter
from palestra.engine.lora import Adapter, LoraConfig, Snapshot
from palestra.engine.models import Engine
from palestra.engine.sampler import Request, Sampled, Sampler, Sampling
from palestra.remote import vllm
from palestra.remote.agreement import Claim, check
from palestra.remote.exchange import Exchange
from palestra.remote.vllm import Patience, Server, VllmSampler

KEY = "open sesame"
WORDS = Sampling(max_tokens=6)
MORE = 5000  # tokens than the base has positions


class There(NamedTuple):
    """A server, and what a client must know of it."""

    url: str
    ours: bool
    key: str


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load("tiny", device="cpu")


@pytest.fixture(scope="module", params=["ours", pytest.param("vllm", marks=pytest.mark.gpu)])
def there(request: pytest.FixtureRequest) -> Iterator[There]:
    with ExitStack() as stack:
        if request.param == "ours":
            url, _ = stack.enter_context(serving("--base", "tiny", key=KEY))
            yield There(url, True, KEY)
        elif url := os.environ.get("PALESTRA_VLLM_URL", ""):
            yield There(url, False, os.environ.get("VLLM_API_KEY", ""))
        elif importlib.util.find_spec("vllm") and torch.cuda.is_available():
            yield There(stack.enter_context(official("tiny")), False, "")
        else:
            pytest.skip("no vLLM here: set PALESTRA_VLLM_URL, or install vllm beside a GPU")


def opened(there: There, **options: Any) -> VllmSampler:
    sampler = VllmSampler([Server(there.url)], Exchange(None, "tiny"), Patience(60.0, 1.0), there.key, **options)
    sampler.meet()
    return sampler


@pytest.fixture
def sampler(there: There) -> Iterator[VllmSampler]:
    made = opened(there)
    yield made
    made.close()


def prompt(engine: Engine, text: str = "up down left") -> np.ndarray:
    return np.array(engine.tokenizer.encode(text), np.int32)


def strong(engine: Engine, name: str, seed: int = 0, rank: int = 4) -> Snapshot:
    """An adapter that changes much."""
    adapter = Adapter(engine.linears, LoraConfig(rank=rank, alpha=8), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, b in adapter.weights.values():
            b.normal_(0, 0.1, generator=generator)
    return adapter.snapshot(name)


def together(sampler: VllmSampler, *requests: Request) -> list[list[Sampled]]:
    async def asked() -> list[list[Sampled]]:
        return await asyncio.gather(*(sampler.sample(request) for request in requests))

    return asyncio.run(asked())


def tokens(answers: list[Sampled]) -> list[list[int]]:
    return [answer.token_ids.tolist() for answer in answers]


def logprobs(answers: list[list[Sampled]]) -> np.ndarray:
    return np.concatenate([answer.logprobs for each in answers for answer in each])


def adapters_at(there: There) -> set[str]:
    call = urllib.request.Request(f"{there.url}/v1/models", headers={"Authorization": f"Bearer {there.key}"})
    with urllib.request.urlopen(call) as answer:
        return {card["id"] for card in json.load(answer)["data"] if card["parent"]}


def test_token_ids_go_in_and_come_out(there: There, engine: Engine, sampler: VllmSampler) -> None:
    (answers,) = together(sampler, Request(prompt(engine), 4, WORDS, seed=2**63 - 9))
    assert len(answers) == 4 and len({tuple(ids) for ids in tokens(answers)}) > 1
    for answer in answers:
        assert 1 <= len(answer.token_ids) == len(answer.logprobs) <= 6
        assert (
            answer.token_ids.dtype == np.int32 and answer.logprobs.dtype == np.float32 and (answer.logprobs < 0).all()
        )
        ended = answer.token_ids[-1] == engine.tokenizer.eos_token_id
        assert answer.stop == ("stop" if ended else "length") and (ended or len(answer.token_ids) == 6)


def test_what_is_drawn_hangs_on_the_seed_alone(there: There, engine: Engine, sampler: VllmSampler) -> None:
    red, blue = strong(engine, "red@1", 1), strong(engine, "blue@2", 2, rank=2)
    asked = [Request(prompt(engine), 3, WORDS, adapter, seed) for adapter in (red, blue) for seed in (5, 6)]
    alone = [together(sampler, request)[0] for request in asked]
    shared = together(sampler, *asked)
    assert [tokens(answers) for answers in shared] == [tokens(answers) for answers in alone]
    assert len({str(tokens(answers)) for answers in shared}) == 4
    for a, b in zip(shared, alone, strict=True):
        assert np.concatenate([x.logprobs for x in a]) == pytest.approx(
            np.concatenate([x.logprobs for x in b]), abs=1e-4
        )


def test_ours_draws_what_the_engine_draws_in_process(there: There, engine: Engine, sampler: VllmSampler) -> None:
    if not there.ours:
        pytest.skip("vLLM draws from another generator")
    cut = Sampling(max_tokens=6, temperature=0.7, top_k=20, top_p=0.9, stop=(" down",))
    red = strong(engine, "red@1")
    asked = [
        Request(prompt(engine), 4, sampling, adapter, seed, keep=seed == 1)
        for seed, (sampling, adapter) in enumerate([(WORDS, None), (cut, red), (WORDS, red)])
    ]
    here, elsewhere = Sampler(engine).sample_all(asked), together(sampler, *asked)
    assert [tokens(answers) for answers in elsewhere] == [tokens(answers) for answers in here]
    for ours, theirs in zip(here, elsewhere, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert b.stop == a.stop and b.logprobs == pytest.approx(a.logprobs, abs=1e-5)


def test_what_ends_an_answer_is_part_of_it(there: There, engine: Engine, sampler: VllmSampler) -> None:
    start, greedy = prompt(engine), Sampling(max_tokens=8, temperature=0, end=False)
    ((whole, twin),) = together(sampler, Request(start, 2, greedy))
    assert len(whole.token_ids) == 8 and whole.stop == "length" and tokens([twin]) == tokens([whole])
    third = int(whole.token_ids[2])
    first = whole.token_ids.tolist().index(third) + 1
    by_id = greedy.model_copy(update={"stop_ids": (third,)})
    by_text = greedy.model_copy(update={"stop": (engine.tokenizer.decode([third]),)})
    for stopped in together(sampler, Request(start, 1, by_id), Request(start, 1, by_text)):
        assert tokens(stopped) == [whole.token_ids[:first].tolist()] and stopped[0].stop == "stop"


def test_trainer_and_sampler_agree_on_base_and_adapters_in_one_batch(
    there: There, engine: Engine, sampler: VllmSampler
) -> None:
    claims = [
        Claim("red", LoraConfig(rank=4), WORDS),
        Claim("plain", None, WORDS),
        Claim("blue", LoraConfig(rank=8), WORDS),
    ]
    check(sampler, engine, claims, None)
    assert sampler.zero is not None


def test_a_sampler_of_other_weights_is_refused(there: There, engine: Engine, sampler: VllmSampler) -> None:
    other = Engine.load("tiny", device="cpu")
    with torch.no_grad():
        next(iter(other.linears.values())).weight.mul_(1.1)
    with pytest.raises(ValueError, match=rf'{there.url} does not agree .* policy "red" .* differ by .*0\.001'):
        check(sampler, other, [Claim("red", LoraConfig(rank=4), WORDS)], None)
    check(sampler, other, [Claim("red", LoraConfig(rank=4), WORDS)], tolerance=10.0)


def test_a_version_has_a_name_of_its_own_and_leaves_when_nobody_can_ask_for_it(
    there: There, engine: Engine, sampler: VllmSampler
) -> None:
    before, sampler.zero = adapters_at(there), None
    first, second = strong(engine, "red@1", 1), strong(engine, "red@1", 2)
    (a,), (b,) = together(sampler, *(Request(prompt(engine), 1, WORDS, each, 3) for each in (first, second)))
    names = {sampler.exchange.name(each) for each in (first, second)}
    assert adapters_at(there) - before == names and all(name.startswith("red@1.") for name in names)
    assert a.logprobs[0] != pytest.approx(b.logprobs[0], abs=1e-3)
    folder = sampler.exchange.folder
    saved = load_adapter(folder / sampler.exchange.name(first), engine).snapshot()
    assert all(
        torch.equal(w, v) for k in first.weights for w, v in zip(first.weights[k], saved.weights[k], strict=True)
    )
    gone = sampler.exchange.name(first)
    del first
    gc.collect()
    until = time.monotonic() + 10
    while (gone in adapters_at(there) or (folder / gone).exists()) and time.monotonic() < until:
        time.sleep(0.02)
    assert adapters_at(there) - before == names - {gone} and not (folder / gone).exists()
    assert tokens(together(sampler, Request(prompt(engine), 1, WORDS, second, 3))[0]) == tokens([b])


def test_adapters_that_a_server_lost_are_loaded_again(there: There, engine: Engine, sampler: VllmSampler) -> None:
    red = strong(engine, "red@1")
    request = Request(prompt(engine), 2, WORDS, red, 4)
    (before,) = together(sampler, request)
    send(there, "/v1/unload_lora_adapter", {"lora_name": sampler.exchange.name(red)})  # as a restart does
    (after,) = together(sampler, request)
    assert tokens(after) == tokens(before)


def send(there: There, path: str, body: dict[str, Any], key: str | None = None) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {key or there.key}", "Content-Type": "application/json"}
    call = urllib.request.Request(there.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(call) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_what_a_server_refuses_is_told(there: There, engine: Engine, sampler: VllmSampler) -> None:
    status, said = send(there, "/v1/completions", {"model": "nobody@3", "prompt": [5], "max_tokens": 1})
    assert status == 404 and "nobody@3" in said
    status, said = send(there, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"})
    assert status in (400, 404, 500) and "/nowhere" in said
    with pytest.raises(ValueError, match=f"{there.url} answered 400: "):
        together(sampler, Request(np.full(MORE, 7, np.int32), 1, WORDS))
    with pytest.raises(ValueError, match=r'serves tiny, not "huge": set sampler\.model'):
        VllmSampler([Server(there.url, "huge")], Exchange(None, "tiny"), Patience(), there.key).meet()


def test_a_wrong_key_is_told(there: There) -> None:
    if not there.key:
        pytest.skip("this server wants no key")
    with pytest.raises(ValueError, match=r"answered 401.*sampler\.key_env"):
        opened(there._replace(key="friend"))


def test_no_server_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"no answer from the sampler at http://127.0.0.1:9.*Is it running"):
        opened(There("http://127.0.0.1:9", True, ""))
    assert time.monotonic() - began < 10


def test_another_server_answers_for_one_that_is_gone(there: There, engine: Engine) -> None:
    servers = [Server("http://127.0.0.1:9", "tiny", ours=there.ours), Server(there.url, "tiny", ours=there.ours)]
    made = VllmSampler(servers, Exchange(None, "tiny"), Patience(60.0, 5.0), there.key)
    red = strong(engine, "red@1")
    found = together(made, *(Request(prompt(engine), 1, WORDS, red, seed) for seed in range(6)))
    assert len(found) == 6 and servers[0].failures and not servers[1].failures
    made.close()


def test_a_run_ends_where_no_sampler_is_left(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "PAUSES", (0.05, 0.1))
    made = VllmSampler([Server("http://127.0.0.1:9", "tiny")], Exchange(None, "tiny"), Patience(60.0, 0.3))
    with pytest.raises(ValueError, match="no sampler answered for 0 seconds"):
        together(made, Request(prompt(engine), 1, WORDS))
    with pytest.raises(ValueError, match="no sampler answered"):
        made.forget()
    made.close()
