"""Conversations within a budget: rewriting, prompts and training of rewritten conversations, and the cost of long
ones."""

import asyncio
from itertools import pairwise

import numpy as np
import pytest
import torch

from palestra.core.chat import Chat, parse_assistant_message
from palestra.core.failures import ContextLengthExceeded
from palestra.core.types import Answer, Step
from palestra.engine.conversation.encoder import ChatEncoder
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.envs.base import Env
from palestra.testing import tiny_lm, tiny_tokenizer
from palestra.text.algorithms.grpo import GRPO
from palestra.text.learners.lm import LanguageLearner, build_weights
from palestra.text.learners.lm_config import LoraPolicyConfig
from palestra.text.policies.base import Query
from palestra.text.policies.context import DROPPED_RESULT, ContextConfig, drop_oldest
from palestra.text.policies.lm import LanguagePolicy
from palestra.text.rollouts.metrics import CONTEXT_FULL_KEY, answers_of
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec
from palestra.text.training.update import update_learner

ANSWER_TOKENS = 8


class Clerk(Env):
    """An agent with `turns` tool results of `size` characters each; an answer that starts with a digit is rewarded."""

    name = "clerk"
    seats = ("agent",)
    roles = {"agent": "s"}

    def __init__(self, turns: int, size: int) -> None:
        self.turns, self.size = turns, size

    def reset(self, seed):
        self.messages = ({"role": "system", "content": "s"}, {"role": "user", "content": f"look up {seed}"})
        self.turn = 0
        return Step({"agent": Chat(self.messages)})

    def step(self, actions):
        self.turn += 1
        result = f"{self.turn}:".ljust(self.size, "abcdefgh"[self.turn % 8])
        said = parse_assistant_message(actions["agent"])
        self.messages = (*self.messages, said, {"role": "tool", "content": result})
        paid = {"agent": float(actions["agent"][:1].isalnum())}
        return Step({"agent": Chat(self.messages)} if self.turn < self.turns else {}, paid)

    def fork(self):
        twin = Clerk(self.turns, self.size)
        twin.messages, twin.turn = self.messages, self.turn
        return twin


def tool_tokenizer():
    """The tests' tokenizer, whose template writes the tool role as text."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "m['role'] + '|>'", "m['role'].replace('tool', 'user') + '|>'"
    )
    return tokenizer


def policy_of(engine, **context) -> LanguagePolicy:
    sampling = SamplingConfig(max_tokens=ANSWER_TOKENS, stop_at_eos=False)
    encoder = ChatEncoder(tool_tokenizer())
    return LanguagePolicy("agent@0", Sampler(engine), encoder, sampling, context=ContextConfig(**context))


def play_once(policy, env, k=1):
    spec = EpisodeSpec(3, {"agent": policy}, 1)
    return asyncio.run(EpisodeRunner(lambda: env, "clerk").play(spec, Branching(branch_at="root", group_size=k)))


# ---- rewriting


def conversation(turns):
    """A system message and a question, then `turns` answers, each with a tool's result of ten words."""
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]
    for i in range(turns):
        messages += [{"role": "assistant", "content": f"call {i}"}, {"role": "tool", "content": f"{i} " * 10}]
    return messages


def words(messages):
    return sum(len(message["content"].split()) for message in messages)


def test_oldest_tool_results_are_dropped_first():
    """3 words before the first answer, and 12 in each of four turns: 51. A dropped result has 3 words instead of 10."""
    whole = conversation(4)
    assert drop_oldest(whole, 51, words) == whole
    shorter = drop_oldest(whole, 40, words)  # 51 - 7 - 7 = 37
    assert [m["content"] for m in shorter if m["role"] == "tool"][:2] == [DROPPED_RESULT] * 2
    assert [m for i, m in enumerate(shorter) if i not in (3, 5)] == [m for i, m in enumerate(whole) if i not in (3, 5)]


def test_oldest_turns_are_dropped_if_results_are_not_enough():
    """Without three results 30 words: 3, three turns of 5 and one of 12. Without two of these turns, and with the mark
    of 4 words, 24; the last turn stays whole."""
    shorter = drop_oldest(conversation(4), 24, words)
    assert [m["role"] for m in shorter] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert shorter[1]["content"] == "go\n[2 earlier turns dropped]" and shorter[2]["content"] == "call 2"
    assert shorter[-2:] == conversation(4)[-2:]
    assert drop_oldest(conversation(4), 1, words)[-2:] == conversation(4)[-2:]
    assert drop_oldest(conversation(0), 1, words) == conversation(0)


async def summarise(messages, limit, count_tokens):
    """Replaces everything but the last turn by a summary, as a model would write it."""
    await asyncio.sleep(0)
    return [*messages[:2], {"role": "user", "content": f"so far {len(messages) - 4} messages"}, *messages[-2:]]


def test_hook_rewrites_prompts_and_training_samples():
    policy = policy_of(tiny_lm(1), max_tokens=200, compress="text.policies.test_context:summarise", max_tool_tokens=64)
    episode = play_once(policy, Clerk(12, 40))
    assert episode.error is None
    prompts = [node.answers["agent"].prompt_ids for node in episode.nodes]
    assert max(map(len, prompts)) <= 200 and len(prompts) == 12
    texts = [policy.encoder.tokenizer.decode(ids) for ids in prompts]
    rewritten = [i for i, text in enumerate(texts) if "so far" in text]
    first = rewritten[0]
    assert f"so far {2 + 2 * first - 4} messages" in texts[first] and "look up 3" in texts[first]
    asked = Chat(tuple(asyncio.run(summarise(episode.nodes[first].observations["agent"].messages, 100, None))))
    assert prompts[first].tolist() == policy.encoder.encode_conversation(asked, None).tolist()
    for (one, ids), node in zip(pairwise(prompts), episode.nodes, strict=False):
        before = np.concatenate([one, node.answers["agent"].token_ids])
        continues = len(ids) > len(before) and ids[: len(before)].tolist() == before.tolist()
        assert continues or "so far" in policy.encoder.tokenizer.decode(ids)
    assert sum("so far" in text and "so far" not in before for before, text in pairwise(texts)) >= 1
    samples, _ = GRPO(baseline="none", scale="none").build_samples([episode], "agent")
    assert [s.prompt_ids.tolist() for s in samples] == [ids.tolist() for ids in prompts]
    assert [len(s.token_ids) for s in samples] == [ANSWER_TOKENS] * 12  # no token of a result is trained


def test_trajectory_is_truncated_if_the_conversation_stays_too_long():
    episode = play_once(policy_of(tiny_lm(1), max_tokens=120), Clerk(6, 100))
    assert episode.error is None and len(episode.nodes) == 1
    assert episode.nodes[0].truncated and episode.nodes[0].info[CONTEXT_FULL_KEY]
    policy = policy_of(tiny_lm(1), max_tokens=20)
    with pytest.raises(ContextLengthExceeded, match=r"context\.max_tokens is 20: raise it"):
        asyncio.run(policy.act(Query("", Chat(({"role": "user", "content": "x" * 30},)))))


def test_text_conversations_are_rewritten_too():
    policy = policy_of(tiny_lm(1), max_tokens=80)
    policy.history = "conversation"
    history: tuple = ()
    for turn in range(8):
        query = Query("r", f"observation {turn}", history=history)
        (answer,) = asyncio.run(policy.act(query))
        assert len(answer.prompt_ids) <= 80
        history = (*history, (query.observation, answer))
    assert "turns dropped]" in policy.encoder.tokenizer.decode(answer.prompt_ids)


# ---- results of tools


def test_long_results_are_cut_with_a_mark():
    """The prompt of a later turn, which continues from tokens, equals that of the whole conversation encoded again."""
    policy = policy_of(tiny_lm(1), max_tool_tokens=10)
    first = Chat(({"role": "user", "content": "look"},))
    answer = Answer("ok", "agent@0", policy.encoder.encode_conversation(first, None), np.array([], np.int32))
    answer.token_ids = np.array(policy.encoder.tokenizer.encode("ok<|end|>"), np.int32)
    result = {"role": "tool", "content": "0123456789" * 3}
    second = Chat((*first.messages, {"role": "assistant", "content": "ok"}, result))
    text = policy.encoder.tokenizer.decode(policy.encode_prompt(Query("", second)))
    assert "0123456789\n[cut off: the first 10 of 30 tokens]" in text and "01234567890" not in text
    continued = policy.encode_prompt(Query("", second, history=((first, answer),)))
    assert policy.encoder.tokenizer.decode(continued).endswith(text.split("ok")[-1])
    short = Chat((*first.messages, {"role": "tool", "content": "0123456789"}))
    assert "cut off" not in policy.encoder.tokenizer.decode(policy.encode_prompt(Query("", short)))


@pytest.mark.parametrize("path", ["nowhere:f", "drop", "text.policies.test_context:ANSWER_TOKENS"])
def test_unknown_hooks_are_refused(path):
    with pytest.raises(ValueError, match=r"context\.compress"):
        ContextConfig(compress=path)


# ---- long conversations


def check_long_conversation(turns: int, tokens: int) -> None:
    """Each turn computes its own tokens only, and the cache holds one conversation."""
    engine = tiny_lm(1, max_position_embeddings=40_000)
    policy = policy_of(engine)
    episode = play_once(policy, Clerk(turns, tokens // turns - ANSWER_TOKENS - 4))
    assert episode.error is None and len(episode.nodes) == turns
    answer = episode.nodes[-1].answers["agent"]
    length = len(answer.prompt_ids) + len(answer.token_ids)
    assert 0.95 * tokens < length < 1.05 * tokens
    batch = policy.sampler.batch
    assert batch.counts["prefill_tokens"] <= length
    assert batch.counts["reused_tokens"] > 0.4 * turns * length
    assert batch.prefix_store.num_tokens <= length
    assert batch.prefix_store.bytes <= length * batch.cache.token_bytes


def check_long_training(turns: int, tokens: int, budget: int) -> None:
    """A conversation of `tokens` in total, rewritten within `budget`, plays and trains: no pass is longer than the
    budget."""
    engine = tiny_lm(1, max_position_embeddings=budget + ANSWER_TOKENS)
    context = ContextConfig(max_tokens=budget, target=0.5, max_tool_tokens=budget // 4)
    sampling = SamplingConfig(max_tokens=ANSWER_TOKENS, stop_at_eos=False)
    config = LoraPolicyConfig(lr=1e-3, rank=4, micro_batch_tokens=8 * budget, context=context, sampling=sampling)
    learner = LanguageLearner("agent", config, build_weights(config, engine, seed=1), Sampler(engine), tool_tokenizer())
    episode = play_once(learner.policy(), Clerk(turns, tokens // turns - ANSWER_TOKENS - 4), k=2)
    assert episode.error is None and len(episode.leaves()) == 2 and not any(n.truncated for n in episode.nodes)
    answers = answers_of([episode])
    assert len(answers) == 2 * turns and max(len(a.prompt_ids) for a in answers) <= budget
    batch = learner.sampler.batch
    # two trajectories; each rewrite computes half a budget again for half a budget of new tokens
    assert batch.counts["prefill_tokens"] < 2 * 2 * tokens
    metrics = asyncio.run(update_learner(GRPO(group_size=2, scale="none"), learner, [episode], 0.0))
    assert metrics["samples"] == 2 * turns and np.isfinite(metrics["grad_norm"])
    moved = [b.abs().sum() for _, b in learner.weights.adapter.weights.values()]
    assert torch.stack(moved).sum() > 0


def test_conversation_of_many_turns_computes_its_tokens_once():
    check_long_conversation(turns=24, tokens=3000)


def test_rewritten_conversation_trains():
    check_long_training(turns=16, tokens=1600, budget=512)


@pytest.mark.slow
def test_200_turns_and_32k_tokens_of_context():
    check_long_conversation(turns=200, tokens=32_000)


@pytest.mark.slow
def test_200_turns_and_32k_tokens_train_within_a_budget():
    check_long_training(turns=200, tokens=32_000, budget=2048)
