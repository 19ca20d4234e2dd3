"""The sampler: ends of answers, the loop that drives it, and failures that stay with their request."""

import asyncio
from functools import partial

import numpy as np
import pytest
import torch
from helpers.small_models import plain_logps
from helpers.tolerances import LOGPROB_ATOL
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from palestra.engine.cache.kv_pages import PAGE_TOKENS
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling import scheduler
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig, StopStringMatcher, counter_uniform
from palestra.testing import tiny_lm, tiny_tokenizer

END = 4  # tiny_lm's end token


def prompt(seed=0, length=6):
    return np.random.default_rng(seed).integers(5, 250, length).astype(np.int32)


def ask(seed=0, n=3, *, adapter=None, top=0, **sampling):
    return Request(prompt(seed), n, SamplingConfig(**{"max_tokens": 8} | sampling), adapter, seed, top_logprobs=top)


def drive(sampler, requests):
    """Outcomes of the requests, by `submit` and `step`."""
    outcomes = [None] * len(requests)
    for i, request in enumerate(requests):
        sampler.submit(request, partial(outcomes.__setitem__, i))
    while sampler.step():
        pass
    return outcomes


def tokens(answers):
    return [a.token_ids.tolist() for a in answers]


def random_snapshot(engine, seed):
    """A snapshot that differs from the base."""
    adapter = Adapter(engine.linear_layers, LoraConfig(rank=2), seed=seed)
    with torch.no_grad():
        for _, b in adapter.weights.values():
            b.normal_(0, 0.3)
    return adapter.snapshot(f"trained-{seed}")


@pytest.fixture(scope="module")
def engine():
    return tiny_lm(4)


# ---- ends of answers


def test_stop_ids_end_an_answer_and_are_included(engine):
    free = Sampler(engine).sample_all([ask(n=8, max_tokens=60)])[0]
    stop_ids = (free[0].token_ids[3].item(), free[1].token_ids[5].item())
    for plain, cut in zip(
        free, Sampler(engine).sample_all([ask(n=8, max_tokens=60, stop_token_ids=stop_ids)])[0], strict=True
    ):
        hits = np.flatnonzero(np.isin(plain.token_ids, stop_ids))
        length = hits[0] + 1 if len(hits) else len(plain.token_ids)
        assert cut.token_ids.tolist() == plain.token_ids[:length].tolist()
        assert cut.stop_reason == ("stop" if len(hits) else plain.stop_reason) and len(cut.logprobs) == length


def test_eos_tokens_can_be_ignored(engine):
    ends = Sampler(engine).sample_all([ask(n=32, max_tokens=150)])[0]
    goes_on = Sampler(engine).sample_all([ask(n=32, max_tokens=150, stop_at_eos=False)])[0]
    ended = [(a, b) for a, b in zip(ends, goes_on, strict=True) if a.stop_reason == "stop"]
    assert ended and all(a.token_ids[-1] == END for a, _ in ended)
    assert all(b.stop_reason == "length" and len(b.token_ids) == 150 for b in goes_on)
    assert all(a.token_ids.tolist() == b.token_ids[: len(a.token_ids)].tolist() for a, b in ended)
    stopped = Sampler(engine).sample_all([ask(n=32, max_tokens=150, stop_at_eos=False, stop_token_ids=(END,))])[0]
    assert tokens(stopped) == tokens(ends)


def first_hit(tokenizer, ids, stops):
    """The number of tokens after which the text of all so far holds a stop string, or None."""
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:n], skip_special_tokens=True)
        if any(stop in text for stop in stops):
            return n
    return None


def found_after(tokenizer, ids, stops):
    finder, tail = StopStringMatcher(tokenizer), StopStringMatcher.empty_tail(stops)
    return next((n for n, token in enumerate(ids, 1) if finder.append_and_match(stops, tail, token)), None)


def llama_like_tokenizer():
    """Words with a space mark, single bytes for the rest, and a decoder that drops the space at a text's start."""
    words = ["<unk>", "</s>", "▁", "▁the", "▁a", "a", "b", "ab", ".", "▁ab", "User", ":", "▁User"]
    pieces = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


TINY, LLAMA = tiny_tokenizer(), llama_like_tokenizer()
WORDS = st.sampled_from(["a", "b", "ab", " ", "\n", "é", "€", "😀", "User", ":", " a", "\n\nUser:", ".", "aab", "é\n"])


def spell(text, tokenizer):
    """`text` as the smallest tokens: its bytes, or a word for some letters."""
    if tokenizer is TINY:
        return tokenizer.encode(text, add_special_tokens=False)
    byte = tokenizer.convert_tokens_to_ids("<0x00>")
    return [
        i
        for c in text
        for i in ([tokenizer.convert_tokens_to_ids(c)] if c in "ab.:" else [byte + b for b in c.encode()])
    ]


@pytest.mark.parametrize("tokenizer", [TINY, LLAMA], ids=["bytes", "llama"])
@given(
    words=st.lists(WORDS, max_size=30),
    stops=st.lists(WORDS, min_size=1, max_size=3),
    noise=st.lists(st.tuples(st.integers(0, 60), st.sampled_from(["special", "unknown", "word"])), max_size=8),
)
def test_stop_string_search_in_a_tail_equals_full_decoding(tokenizer, words, stops, noise):
    """After every token, decoding a bounded tail finds the same stop strings as decoding everything: with characters
    and strings split over tokens, special tokens, and ids without a token in between."""
    extra = {
        "special": tokenizer.eos_token_id,
        "unknown": 100_000,
        "word": tokenizer.encode("a", add_special_tokens=False)[0] if tokenizer is TINY else 3,
    }
    ids = spell("".join(words), tokenizer)
    cuts = [0, *(i + 1 for i in range(len(ids)) if is_whole(tokenizer, ids[: i + 1]))]
    for place, kind in noise:
        # between characters only: inside a split character a word token has no defined text
        at = cuts[place % len(cuts)] if kind == "word" else place % (len(ids) + 1)
        ids = [*ids[:at], extra[kind], *ids[at:]]
        cuts = [c if c <= at else c + 1 for c in cuts]
    assert found_after(tokenizer, ids, stops) == first_hit(tokenizer, ids, stops)


def is_whole(tokenizer, ids):
    return not tokenizer.decode(ids).endswith("\ufffd")


def test_stop_strings_by_hand():
    assert found_after(TINY, spell("x\n\nUser: y", TINY), ["\n\nUser:"]) == 8
    assert found_after(TINY, spell("é€!", TINY), ["€"]) == 5  # two bytes and three
    assert found_after(TINY, spell("abc", TINY), ["d", "ca"]) is None
    assert found_after(TINY, spell("a😀😀😀", TINY), ["😀😀😀"]) == 13  # as many tokens as bytes, not as characters
    llama = LLAMA.convert_tokens_to_ids
    assert found_after(LLAMA, llama(["▁a", "▁User", ":"]), [" User:"]) == 3  # its space is dropped at a text's start
    assert found_after(LLAMA, llama(["▁User", ":"]), [" User:"]) is None
    assert found_after(LLAMA, llama(["a", "▁", "b"]), ["a b"]) == 3  # a lone space is shown, except at the start
    assert found_after(LLAMA, spell("€€€\n", LLAMA), ["\n"]) == 10  # the window would start inside a euro sign


def test_stop_check_decodes_a_bounded_tail():
    class Counting:
        longest = 0

        def decode(self, ids, skip_special_tokens):
            self.longest = max(self.longest, len(ids))
            return TINY.decode(ids, skip_special_tokens=skip_special_tokens)

    tokenizer, ids = Counting(), spell("a long way to go " * 50, TINY)
    assert found_after(tokenizer, ids, ["\n\nUser:", "!"]) is None
    assert tokenizer.longest <= len("\n\nUser:") + 4


def test_answer_ends_with_the_token_that_completes_a_stop_string(engine):
    free = Sampler(engine).sample_all([ask(n=6, max_tokens=80, stop_at_eos=False)])[0]
    stops = ("ab", engine.tokenizer.decode(free[2].token_ids[10:14], skip_special_tokens=True))
    cut = Sampler(engine).sample_all([ask(n=6, max_tokens=80, stop_at_eos=False, stop=stops)])[0]
    for plain, answer in zip(free, cut, strict=True):
        hit = first_hit(engine.tokenizer, plain.token_ids.tolist(), stops)
        assert answer.token_ids.tolist() == plain.token_ids[:hit].tolist()
        assert answer.stop_reason == ("stop" if hit else "length")
    assert cut[2].stop_reason == "stop"


# ---- the loop


def test_submit_and_advance_equals_sample_all(engine):
    requests = [ask(seed, n=1 + seed % 4) for seed in range(9)]
    driven = drive(Sampler(engine, max_num_seqs=6), requests)
    together = Sampler(engine, max_num_seqs=6).sample_all(requests)

    async def gathered():
        sampler = Sampler(engine, max_num_seqs=6)
        return await asyncio.gather(*map(sampler.sample, requests))

    awaited = asyncio.run(gathered())
    for a, b, c in zip(driven, together, awaited, strict=True):
        assert tokens(a) == tokens(b) == tokens(c)


def test_advance_samples_one_token_and_returns_false_if_idle(engine):
    sampler, outcomes = Sampler(engine), []
    assert not sampler.step() and not sampler.has_requests
    sampler.submit(ask(max_tokens=4, stop_at_eos=False), outcomes.append)
    steps = 0
    while sampler.step():
        steps += 1
    assert steps == 3 and not sampler.has_requests  # the prompt's pass samples the first token, this one the second
    assert [len(a.token_ids) for a in outcomes[0]] == [4, 4, 4]


def test_requests_join_a_running_batch(engine):
    sampler, outcomes = Sampler(engine), {}
    sampler.submit(ask(1, max_tokens=20), partial(outcomes.__setitem__, 1))
    for _ in range(5):
        sampler.step()
    # counted from its `done`
    sampler.submit(ask(2), lambda outcome: sampler.submit(ask(3), partial(outcomes.__setitem__, 3)))
    while sampler.step():
        pass
    assert tokens(outcomes[1]) == tokens(Sampler(engine).sample_all([ask(1, max_tokens=20)])[0])
    assert tokens(outcomes[3]) == tokens(Sampler(engine).sample_all([ask(3)])[0])


def test_equal_prompts_are_computed_once(engine):
    """For one adapter. Each request gets the answers, and keeps the keys and values, that it has alone."""
    torch.manual_seed(0)
    adapters = [None, *(random_snapshot(engine, seed) for seed in (1, 2))]
    asked = [(prompt_, adapter, seed) for seed in range(4) for adapter in adapters for prompt_ in (5, 6)]
    requests = [
        Request(
            prompt(which, which),
            1 + seed % 3,
            SamplingConfig(max_tokens=5, stop_at_eos=False),
            adapter,
            seed,
            keep_kv=True,
        )
        for which, adapter, seed in asked
    ]
    sampler = Sampler(engine)
    for answers, request in zip(sampler.sample_all(requests), requests, strict=True):
        alone = Sampler(engine).sample_all([request])[0]
        assert tokens(answers) == tokens(alone)
        for ours, theirs in zip(answers, alone, strict=True):
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=LOGPROB_ATOL)
    assert sampler.batch.counts["prefill_tokens"] == len(adapters) * (5 + 6)
    assert sampler.batch.counts["reused_tokens"] == 3 * len(adapters) * (5 + 6)
    said = Sampler(engine).sample_all(requests[:1])[0][0].token_ids
    on = np.concatenate([requests[0].prompt_ids, said, [7]])
    went_on = Request(on, 1, SamplingConfig(max_tokens=5, stop_at_eos=False), None, 9)
    assert tokens(sampler.sample_all([went_on])[0]) == tokens(Sampler(engine).sample_all([went_on])[0])
    assert sampler.batch.counts["prefill_tokens"] == len(adapters) * (5 + 6) + 2


def test_answers_are_bit_identical_for_any_arrival_if_max_num_seqs_is_one_group(engine):
    """Siblings end at different times; no row of the next request starts in their place, so batches stay the same."""
    requests = [ask(seed, max_tokens=12, stop=["a", "e", "1"]) for seed in range(4)]

    def answers(steps_between):
        sampler, outcomes = Sampler(engine, max_num_seqs=3), {}
        for seed, request in enumerate(requests):
            sampler.submit(request, partial(outcomes.__setitem__, seed))
            for _ in range(steps_between):
                sampler.step()
                assert len({row.group for row in sampler.batch.rows}) <= 1
        while sampler.step():
            assert len({row.group for row in sampler.batch.rows}) <= 1
        return [[(a.token_ids.tobytes(), a.logprobs.tobytes()) for a in outcomes[seed]] for seed in range(4)]

    at_once = answers(0)
    assert len({len(token_ids) for group in at_once for token_ids, _ in group}) > 2
    assert all(answers(steps) == at_once for steps in (1, 2, 5, 12))


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_cancelled_request_does_not_affect_others(engine, steps):
    sampler, outcomes = Sampler(engine, max_num_seqs=9), {}
    groups = {
        seed: sampler.submit(ask(seed, max_tokens=12, stop_at_eos=False), partial(outcomes.__setitem__, seed))
        for seed in range(4)
    }
    for _ in range(steps):
        sampler.step()
    sampler.cancel(groups[0])  # live, unless it still waits
    sampler.cancel(groups[3])  # waits: three groups of three rows fill the sampler
    while sampler.step():
        pass
    assert sorted(outcomes) == [1, 2] and not sampler.has_requests
    for seed, outcome in outcomes.items():
        assert tokens(outcome) == tokens(Sampler(engine).sample_all([ask(seed, max_tokens=12, stop_at_eos=False)])[0])
    sampler.cancel(groups[1])  # it has ended: nothing happens
    assert tokens(sampler.sample_all([ask(7)])[0]) == tokens(Sampler(engine).sample_all([ask(7)])[0])


def test_cancelled_coroutine_frees_its_rows(engine):
    async def main():
        sampler = Sampler(engine)
        task = asyncio.create_task(sampler.sample(ask(1, max_tokens=400, stop_at_eos=False)))
        other = asyncio.create_task(sampler.sample(ask(2)))
        while not sampler.batch.groups:
            await asyncio.sleep(0)
        task.cancel()
        answers = await other
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        return answers, sampler.has_requests

    answers, busy = asyncio.run(main())
    assert tokens(answers) == tokens(Sampler(engine).sample_all([ask(2)])[0]) and not busy


# ---- failures


def foreign_snapshot(engine):
    """A snapshot with the shapes of another base."""
    other = tiny_lm(0, hidden_size=32)
    torch.manual_seed(0)
    return Adapter(other.linear_layers, LoraConfig(), seed=0).snapshot("alien")


def test_failed_request_does_not_affect_others(engine):
    requests = [ask(0), ask(1, adapter=foreign_snapshot(engine)), ask(2), ask(3)]
    outcomes = drive(Sampler(engine), requests)
    assert isinstance(outcomes[1], Exception)
    for i in (0, 2, 3):
        assert tokens(outcomes[i]) == tokens(Sampler(engine).sample_all([requests[i]])[0])
    with pytest.raises(RuntimeError):
        Sampler(engine).sample_all(requests)


def test_failure_in_mid_answer_does_not_affect_others(engine):
    """Here the tail's decoder fails on one request's text, at its fourth token."""
    sampler, requests = Sampler(engine), [ask(0), ask(1, stop=("never",)), ask(2)]
    found, calls = sampler.batch._stop_strings.append_and_match, []

    def failing(*args):
        calls.append(args)
        if len(calls) > 9:
            raise RuntimeError("no such text")
        return found(*args)

    sampler.batch._stop_strings.append_and_match = failing
    outcomes = drive(sampler, requests)
    assert str(outcomes[1]) == "no such text"
    for i in (0, 2):
        assert tokens(outcomes[i]) == tokens(Sampler(engine).sample_all([requests[i]])[0])
    assert not sampler.has_requests


def test_unattributable_error_fails_all_requests(engine, monkeypatch):
    sampler = Sampler(engine)
    monkeypatch.setattr(sampler, "_retire", lambda: 1 / 0)
    outcomes = drive(sampler, [ask(0), ask(1)])
    assert all(isinstance(outcome, ZeroDivisionError) for outcome in outcomes) and not sampler.has_requests

    async def main():
        await asyncio.gather(sampler.sample(ask(0)), sampler.sample(ask(1)))

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())


def test_nobody_waits_for_sampling_that_was_stopped(engine, monkeypatch):
    """As a test's time limit stops it: by something that is no Exception."""

    class Stop(BaseException):
        pass

    def stop():
        raise Stop

    sampler = Sampler(engine)
    monkeypatch.setattr(sampler, "_retire", stop)

    async def main():
        return await asyncio.wait_for(
            asyncio.gather(sampler.sample(ask(0)), sampler.sample(ask(1)), return_exceptions=True), timeout=30
        )

    assert [str(error) for error in asyncio.run(main())] == ["sampling was ended by Stop"] * 2
    assert not sampler.has_requests


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(np.zeros(0, np.int32), 1, SamplingConfig()), "at least one token"),
        (Request(prompt(), 0, SamplingConfig()), "n of at least 1"),
        (Request(np.array([5, 272]), 1, SamplingConfig()), "from 0 to 271"),
        (Request(np.array([-1]), 1, SamplingConfig()), "from 0 to 271"),
        (Request(prompt(), 1, SamplingConfig(), top_logprobs=273), "0 to 272"),
    ],
)
def test_invalid_requests_are_refused_at_once(engine, request_, message):
    sampler = Sampler(engine)
    with pytest.raises(ValueError, match=message):
        sampler.submit(request_, print)
    with pytest.raises(ValueError, match=message):
        sampler.sample_all([ask(0), request_])
    assert not sampler.has_requests


# ---- alternatives, seeds, long answers


def test_top_logprobs_use_the_temperature(engine):
    settings = [{"temperature": 1.0}, {"temperature": 0.5, "top_k": 3}, {"temperature": 0.0}, {"temperature": 2.0}]
    requests = [ask(i, n=2, top=k, **s) for i, (k, s) in enumerate(zip((4, 2, 1, 0), settings, strict=True))]
    results = Sampler(engine).sample_all(requests)
    for request, answers in zip(requests, results, strict=True):
        for answer in answers:
            if not request.top_logprobs:
                assert answer.top_ids is None and answer.top_logprobs is None
                continue
            assert answer.top_ids.shape == answer.top_logprobs.shape == (len(answer.token_ids), request.top_logprobs)
            ids = np.concatenate([request.prompt_ids, answer.token_ids])
            logps = plain_logps(engine, ids, request.sampling.temperature or 1.0)[len(request.prompt_ids) - 1 : -1]
            np.testing.assert_allclose(answer.top_logprobs, -np.sort(-logps, 1)[:, : request.top_logprobs], atol=2e-5)
            np.testing.assert_allclose(np.take_along_axis(logps, answer.top_ids, 1), answer.top_logprobs, atol=2e-5)
            if request.sampling.temperature == 0:
                assert answer.top_ids[:, 0].tolist() == answer.token_ids.tolist()
    assert tokens(results[0]) == tokens(Sampler(engine).sample_all([ask(0, n=2, temperature=1.0)])[0])


def test_signed_and_unsigned_64_bit_seeds_are_accepted(engine):
    def answers(seed):
        return tokens(Sampler(engine).sample_all([Request(prompt(), 2, SamplingConfig(max_tokens=6), seed=seed)])[0])

    assert answers(-1) == answers(2**64 - 1) == answers(np.int64(-1)) == answers(np.uint64(2**64 - 1))
    assert answers(-(2**63)) == answers(2**63) != answers(0)
    assert answers(2**64 - 1) != answers(2**63)
    zero, one = np.zeros(1, np.uint64), np.ones(1, np.uint64)
    assert counter_uniform(zero, zero, one) != counter_uniform(one, zero, zero)


def test_cache_grows_with_the_answers_on_demand(engine):
    """Room for many tokens is taken only when needed."""
    sampler = Sampler(engine)
    sampler.submit(ask(n=8, max_tokens=400, stop_at_eos=False), lambda outcome: None)
    for tokens_of_each, pages in ((1, 1 + 8), (PAGE_TOKENS, 1 + 8), (PAGE_TOKENS + 1, 1 + 2 * 8)):
        while not sampler.batch.rows or sampler.batch.rows[0].slot.length < tokens_of_each:
            sampler.step()
        assert pages <= sampler.batch.cache.bytes // sampler.batch.cache.bytes_of(1) <= pages + pages // 8
    short = Sampler(engine)
    short.sample_all([ask(max_tokens=400, stop_token_ids=tuple(range(272)))])  # ends at once
    short.release_memory()
    assert not short.batch.cache.bytes


# ---- several clients


def test_light_client_is_admitted_beside_a_heavy_one(engine):
    """Ada submits when bob fills all rows and has more waiting: her rows are admitted at once, and get extra passes.
    Her answers are those that she gets alone, and bob's are complete too."""
    sampler, outcomes = Sampler(engine, max_num_seqs=64), {}
    heavy = [
        Request(prompt(i), 48, SamplingConfig(max_tokens=40, stop_at_eos=False), seed=i, client="bob") for i in range(4)
    ]
    for i, request in enumerate(heavy):
        sampler.submit(request, partial(outcomes.__setitem__, i))
    for _ in range(3):
        sampler.step()
    assert len(sampler.batch.rows) == 64
    light = Request(prompt(9), 2, SamplingConfig(max_tokens=9, stop_at_eos=False), seed=9, client="ada")
    sampler.submit(light, partial(outcomes.__setitem__, "ada"))
    steps = 0
    while "ada" not in outcomes:
        sampler.step()
        steps += 1
    assert steps == 2 and len(outcomes) == 1  # one token by the prompt's pass, four by each step's extra passes
    assert len(sampler.batch.rows) == 64  # at most this many rows belong to one client
    while sampler.step():
        pass
    for answers, request in [(outcomes["ada"], light), (outcomes[0], heavy[0]), (outcomes[3], heavy[3])]:
        assert tokens(answers) == tokens(Sampler(engine).sample_all([request])[0])


def test_passes_are_short_while_a_light_client_waits(engine, monkeypatch):
    """From ada's first pass on, each pass has at most a quarter of bob's rows, in turn, and no new ones start; once ada
    has ended, passes have all rows again. The answers are unchanged."""
    sampler, outcomes, passes = Sampler(engine, max_num_seqs=64), {}, []
    decode = sampler.batch.decode
    monkeypatch.setattr(sampler.batch, "decode", lambda rows: (passes.append([*rows]), decode(rows)))
    heavy = [Request(prompt(i), 48, SamplingConfig(max_tokens=30), seed=i, client="bob") for i in range(4)]
    for i, request in enumerate(heavy):
        sampler.submit(request, partial(outcomes.__setitem__, i))
    sampler.step()
    assert len(passes[-1]) == 64
    light = Request(prompt(9), 1, SamplingConfig(max_tokens=5, stop_at_eos=False), seed=9, client="ada")
    sampler.submit(light, partial(outcomes.__setitem__, "ada"))
    monkeypatch.setattr(scheduler, "LIGHT_CLIENT_WINDOW_S", 3600.0)
    passes.clear()
    for _ in range(6):
        sampler.step()
    assert outcomes.keys() == {"ada"} and [len(rows) for rows in passes[:4]] == [1] * 4
    assert all(0 < len(rows) <= 16 for rows in passes[4:])
    lengths = [len(row.token_ids) for row in sampler.batch.rows if row.group.num_started == 48]
    assert max(lengths) - min(lengths) <= 2
    sampler.scheduler._light_until = 0.0
    passes.clear()
    sampler.step()
    assert len(passes[0]) > 32
    while sampler.step():
        pass
    for key, request in [("ada", light), *enumerate(heavy)]:
        assert tokens(outcomes[key]) == tokens(Sampler(engine).sample_all([request])[0])


def test_requests_of_a_client_keep_order_and_heavy_clients_share_rows(engine):
    sampler, order = Sampler(engine, max_num_seqs=32), []
    for i in range(6):
        for client in ("bob", "eve"):
            request = Request(prompt(i), 32, SamplingConfig(max_tokens=6, stop_at_eos=False), seed=i, client=client)
            sampler.submit(request, lambda outcome, who=client, i=i: order.append((who, i)))
    while sampler.step():
        held = [sum(row.group.request.client == who for row in sampler.batch.rows) for who in ("bob", "eve")]
        assert sum(held) <= 36
    for who in ("bob", "eve"):
        assert [i for name, i in order if name == who] == list(range(6))
    assert {name for name, _ in order[:2]} == {name for name, _ in order[-2:]} == {"bob", "eve"}
