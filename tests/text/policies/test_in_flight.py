"""In-flight updates while a request is prepared: it starts with the newest weights."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from helpers.adapter_versions import adapter_versions
from helpers.tolerances import LOGPROB_ATOL

from palestra.core.chat import Chat
from palestra.core.types import Answer, Sample
from palestra.engine.bases.model import Engine
from palestra.engine.conversation.encoder import ChatEncoder
from palestra.engine.lora.adapters import Snapshot
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.scoring import answer_logprobs
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.testing import tiny_lm
from palestra.text.policies import context
from palestra.text.policies.base import Query
from palestra.text.policies.context import ContextConfig
from palestra.text.policies.in_flight import InFlightPolicy, KVUpdate
from palestra.text.policies.lm import LanguagePolicy
from palestra.text.training.async_rollouts import answer_versions

EXAMPLES = ({"role": "system", "content": "add"}, {"role": "user", "content": "1 + 1 " * 20})
ASKED = Query("", Chat((*EXAMPLES, {"role": "user", "content": "2 + 2"}), num_shared=2), n=2, seed=3)
LONG = Query("", Chat((*EXAMPLES, {"role": "user", "content": "2 + 2"})), n=2, seed=3)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_lm(4)


@pytest.fixture(scope="module")
def snapshots(engine: Engine) -> list[Snapshot]:
    return adapter_versions(engine, 2)


def versions_of(engine: Engine, snapshots: list[Snapshot], **options: object) -> list[LanguagePolicy]:
    sampler, encoder = Sampler(engine), ChatEncoder(engine.tokenizer)
    sampling = SamplingConfig(max_tokens=8, stop_at_eos=False)
    return [LanguagePolicy(s.name, sampler, encoder, sampling, s, **options) for s in snapshots]


def check_version_1(engine: Engine, snapshots: list[Snapshot], answers: list[Answer]) -> None:
    """Asserts that all tokens are recorded as version 1's and have its probabilities."""
    for answer in answers:
        assert answer.policy == "walker@1" and answer_versions(answer).tolist() == [1] * 8
        sample = Sample(answer.prompt_ids, answer.token_ids, answer.logprobs, answer.logprobs)
        (expected,) = answer_logprobs(engine, snapshots[1], [sample])
        np.testing.assert_allclose(answer.logprobs, expected, atol=LOGPROB_ATOL, rtol=0)


@pytest.mark.parametrize("kv_update", ["recompute_kv", "keep_kv"])
def test_update_during_a_prefix_reaches_waiting_requests(
    engine: Engine, snapshots: list[Snapshot], kv_update: KVUpdate
) -> None:
    old, new = versions_of(engine, snapshots)
    now = [old]
    playing = InFlightPolicy(lambda: now[0], kv_update)

    async def play() -> list[list[Answer]]:
        asked = [asyncio.ensure_future(playing.act(ASKED)) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(old.sampler.waiting) == 1  # the prefix, for which both wait
        now[0] = new
        playing.update()
        return await asyncio.gather(*asked)

    for answers in asyncio.run(play()):
        check_version_1(engine, snapshots, answers)
    assert not old._prefixes and not new._prefixes


def test_update_during_a_rewrite_reaches_its_request(
    engine: Engine, snapshots: list[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    updated = asyncio.Event()

    async def wait(messages, limit, count_tokens):
        await updated.wait()
        return messages[-1:]

    monkeypatch.setitem(context.COMPRESSORS, "wait", wait)
    old, new = versions_of(engine, snapshots, context=ContextConfig(max_tokens=60, compress="wait"))
    now = [old]
    playing = InFlightPolicy(lambda: now[0], "recompute_kv")

    async def play() -> list[Answer]:
        asked = asyncio.ensure_future(playing.act(LONG))
        await asyncio.sleep(0)
        now[0] = new
        playing.update()
        updated.set()
        return await asked

    check_version_1(engine, snapshots, asyncio.run(play()))


def test_policy_without_updates_keeps_its_weights(engine: Engine, snapshots: list[Snapshot]) -> None:
    old, _ = versions_of(engine, snapshots)
    assert {answer.policy for answer in asyncio.run(old.act(ASKED))} == {"walker@0"}
