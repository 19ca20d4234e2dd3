"""Published mistakes in training language agents with rewards: one test each."""

import asyncio
from itertools import count

import numpy as np
import pytest
import torch

from palestra.core.losses import LOSSES, LossInputs, correct_mismatch
from palestra.core.types import Answer, Episode, Node, Sample, Step
from palestra.engine.conversation.encoder import ChatEncoder
from palestra.engine.sampling.request import Completion
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.engine.training.micro_batch import build_loss_inputs, micro_batches, token_weight, trained_share
from palestra.envs.base import Env
from palestra.text.algorithms.base import add_reference_logprobs
from palestra.text.algorithms.grpo import GRPO
from palestra.text.policies.lm import LanguagePolicy
from palestra.text.rollouts.tree_rollout import EpisodeRunner, EpisodeSpec

names = count()


def answer(policy="p@0", length=2):
    """An answer with tokens that no other answer has."""
    ids = np.array([next(names) for _ in range(length)], np.int32)
    return Answer("x", policy, np.array([1, 2], np.int32), ids, np.full(length, -0.25, np.float32))


def lines(*plays):
    """An episode of parallel trajectories: each is a list of (seat, rewards of that step), all played by one policy."""
    seats = {seat: "p" for play in plays for seat, _ in play}
    episode = Episode("hand", 0, seats)
    for play in plays:
        parent = None
        for depth, (seat, rewards) in enumerate(play):
            last = depth == len(play) - 1
            node = Node(len(episode.nodes), parent, depth, {}, {seat: answer()}, rewards, done=last)
            episode.nodes.append(node)
            parent = node.id
    return episode


def contributions(samples):
    """Each sample's contribution to the update: its advantage times its tokens' share of the batch's mean."""
    (pack,) = micro_batches(samples, 10**6, token_weight(samples))
    return [float(s.advantages.sum() * share) for s, share in zip(pack.samples, pack.token_weights, strict=True)]


# ---- turns


@pytest.mark.parametrize("weigh", ["token", "sequence"])
def test_turns_have_equal_weight_in_long_and_short_trajectories(weigh):
    """Dividing the loss by the number of turns gives long trajectories little weight, and makes agents lazy (Dr. MAMR,
    2025)."""
    episode = lines([("a", {}), ("a", {}), ("a", {"a": 1.0})], [("a", {"a": 0.0})])
    samples, _ = GRPO(branch_at="root", group_size=2, loss_aggregation=weigh).build_samples([episode], "p")
    assert contributions(samples) == pytest.approx([0.25, 0.25, 0.25, -0.25])


def test_groups_do_not_compare_turns_by_index():
    """The policy itself decides which trajectories have a third turn, so a comparison of third turns is biased. Here
    one long trajectory won and one lost; the winner's second turn has the advantage of its trajectory."""
    episode = lines([("a", {}), ("a", {"a": 1.0})], [("a", {"a": 0.0})], [("a", {"a": 0.0})])
    (group,) = GRPO(branch_at="root", group_size=3).groups(episode)
    assert group.values == [1.0, 0.0, 0.0] and [len(nodes) for nodes in group.nodes] == [2, 1, 1]
    GRPO(branch_at="root", group_size=3, scale="none").build_samples([episode], "p")
    assert [node.advantages["a"] for node in episode.nodes] == pytest.approx([2 / 3, 2 / 3, -1 / 3, -1 / 3])


def test_aggregation_weights_trajectories_or_turns_equally():
    """A trajectory of 9 turns won and one of 1 turn lost. With `sequence` a turn is a sequence, so the long trajectory
    has nine tenths of the mean; with `trajectory` each has half."""
    episode = lines([("a", {})] * 8 + [("a", {"a": 1.0})], [("a", {"a": 0.0})])
    parts = {}
    for unit in ("sequence", "trajectory"):
        samples, _ = GRPO(branch_at="root", group_size=2, loss_aggregation=unit).build_samples([episode], "p")
        *long, short = contributions(samples)
        parts[unit] = sum(long), short
    assert parts == {"sequence": pytest.approx((0.9, -0.1)), "trajectory": pytest.approx((0.5, -0.5))}


def test_zero_advantage_answers_count_in_the_token_mean():
    """Values 0, 1/2, 1/2, 1/2, 1 in answers of 2 tokens: the answers of 0 and 1 have a gradient, of weight 1/5 each and
    not 1/2."""
    episode = lines(*([("a", {"a": value})] for value in (0.0, 0.5, 0.5, 0.5, 1.0)))
    algorithm = GRPO(branch_at="root", group_size=5, scale="none")
    samples, _ = algorithm.build_samples([episode], "p")
    assert [s.has_gradient for s in samples] == [True, False, False, False, True]
    assert contributions(samples) == pytest.approx([-0.1, 0, 0, 0, 0.1])
    assert token_weight(samples) == 0.1 and trained_share(samples) == pytest.approx(0.4)
    for held in ({"kl_coef": 0.1}, {"entropy_coef": 0.1}):  # the penalty and the bonus are averaged over all five
        samples, _ = algorithm.model_copy(update=held).build_samples([episode], "p")
        assert all(s.has_gradient for s in samples) and contributions(samples) == pytest.approx([-0.1, 0, 0, 0, 0.1])


@pytest.mark.parametrize(("flat_groups", "share"), [("count", 0.5), ("skip", 1.0), ("refill", 1.0)])
def test_flat_groups_are_counted_or_skipped(flat_groups, share):
    """One group with different values and one with equal values: with `count` the first has half of the mean, otherwise
    all of it."""
    flat, differing = (lines([("a", {"a": 1.0})], [("a", {"a": value})]) for value in (1.0, 0.0))
    algorithm = GRPO(branch_at="root", group_size=2, flat_groups=flat_groups)
    samples, metrics = algorithm.build_samples([flat, differing], "p")
    assert sum(map(abs, contributions(samples))) == pytest.approx(share) and metrics["zero_std_fraction"] == 0.5
    assert (algorithm.has_signal(flat), algorithm.has_signal(differing)) == (False, True)


# ---- seats


def duel(wins):
    """One branch of a zero-sum game in which either seat a `wins` or b does."""
    sign = 1.0 if wins else -1.0
    return lines([("a", {}), ("b", {"a": sign, "b": -sign})])


def test_groups_never_mix_seats_of_a_zero_sum_game():
    """The mean over both seats is always 0: with a shared baseline the winning seat would get a positive advantage for
    its role."""
    play = [("a", {}), ("b", {"a": 1.0, "b": -1.0})]
    groups = list(GRPO(branch_at="root", group_size=2).groups(lines(play, play)))
    assert [(group.seat, group.values) for group in groups] == [("a", [1, 1]), ("b", [-1, -1])]
    samples, _ = GRPO(branch_at="root", group_size=2).build_samples([lines(play, play)], "p")
    assert len(samples) == 4 and not any(sample.has_gradient for sample in samples)


def test_opposite_roles_have_separate_baselines():
    """Role-conditioned advantages: a return that is always the same gives neither seat an advantage, an unusual one
    both."""
    algorithm, memory = GRPO(branch_at="root", group_size=1, baseline="role", scale="none"), {}
    for _ in range(20):
        algorithm.build_samples([duel(wins=True) for _ in range(10)], "p", memory)
    assert memory["roles"]["hand"] == {"a": pytest.approx(1, abs=1e-4), "b": pytest.approx(-1, abs=1e-4)}
    usual, surprise = duel(wins=True), duel(wins=False)
    algorithm.build_samples([usual, surprise], "p", memory)
    assert [node.advantages[seat] for node, seat in zip(usual.nodes, "ab", strict=True)] == pytest.approx(
        [0, 0], abs=1e-3
    )
    assert [node.advantages[seat] for node, seat in zip(surprise.nodes, "ab", strict=True)] == pytest.approx(
        [-1.9, 1.9], abs=1e-3
    )


def test_reward_scales_of_seats_are_normalised_separately():
    """Deviations are of a seat's own group (Dr. MAS, 2026): rewards of hundreds have the same effect as rewards of
    one."""
    episode = lines(
        [("a", {"a": 0.0}), ("b", {"b": 300.0})],
        [("a", {"a": 1.0}), ("b", {"b": 100.0})],
    )
    GRPO(branch_at="root", group_size=2).build_samples([episode], "p")
    found = [(*node.answers, *node.advantages.values()) for node in episode.nodes]
    assert found == [("a", -1), ("b", 1), ("a", 1), ("b", -1)]


# ---- tokens


class Merging:
    """Characters, with "ab" as one token: the sampled tokens "a", "b" differ from the encoding of their text."""

    added_tokens_decoder: dict = {}
    special_tokens_map: dict = {}
    chat_template = None
    eos_token, eos_token_id = "\x00", 0

    def encode(self, text, add_special_tokens=False):
        return [1 if piece == "\x01" else ord(piece) for piece in text.replace("ab", "\x01")]

    def decode(self, ids, skip_special_tokens=True):
        return "".join("ab" if i == 1 else chr(i) for i in ids)


class FixedSampler:
    """A sampler that returns "a" and "b" as two tokens, then the number of the sibling."""

    async def sample(self, request):
        ids = [np.array([97, 98, 48 + i], np.int32) for i in range(request.n)]
        return [Completion(row, np.full(3, -0.5, np.float32), "stop") for row in ids]


class TwoTurns(Env):
    """Two turns of one seat, which is paid the number in its answer."""

    name = "talk"
    seats = ("a",)

    def reset(self, seed):
        self.turn = 0
        return Step({"a": "go"})

    def step(self, actions):
        self.turn += 1
        return Step({"a": f"you said {actions['a']}"} if self.turn < 2 else {}, {"a": float(actions["a"][2:])})


@pytest.mark.parametrize("at", ["root", "turn"])
def test_next_turn_reuses_the_sampled_tokens(at):
    """The second turn's prompt begins with the first turn's tokens; encoding its text would give other tokens."""
    tokenizer = Merging()
    assert tokenizer.encode(tokenizer.decode([97, 98])) == [1]
    algorithm = GRPO(branch_at=at, group_size=2, scale="none")
    speaker = LanguagePolicy("p@0", FixedSampler(), ChatEncoder(tokenizer), SamplingConfig(), history="conversation")
    (episode,) = asyncio.run(
        EpisodeRunner(TwoTurns, "talk").play_all([EpisodeSpec(0, {"a": speaker}, 0)], algorithm.branching)
    )
    assert episode.error is None
    samples, _ = algorithm.build_samples([episode], "p")
    first = {tuple(s.token_ids): s.prompt_ids for s in samples if len(s.prompt_ids) == len("go")}
    later = [s for s in samples if len(s.prompt_ids) > len("go")]
    assert len(first) == 2 and later
    for sample in later:
        line = next(ids for ids in first if tuple(sample.prompt_ids[2:5]) == ids)
        assert sample.prompt_ids[:5].tolist() == [*first[line], *line]
        assert 1 in sample.prompt_ids[5:]  # the env's own quotation of "ab" is new text, and is encoded
    for node in episode.nodes:
        said = node.answers["a"]
        taught = [s for s in samples if s.token_ids is said.token_ids]
        assert all(s.logprobs is said.logprobs and s.prompt_ids is said.prompt_ids for s in taught)


# ---- stale samples


class CurrentLearner:
    """A learner whose current log-probabilities are `logprobs`, one list per sample."""

    name, version, is_at_reference = "p", 3, False

    def __init__(self, logprobs, reference=None):
        self.own, self.held = logprobs, reference

    def batches(self, samples):
        return [list(samples)]

    async def logprobs(self, samples, *, reference=False):
        return [np.asarray(row, np.float32) for row in (self.held if reference else self.own)]


def sample(logprobs, advantages):
    length = len(logprobs)
    return Sample(
        np.array([1]), np.arange(length), np.asarray(logprobs, np.float32), np.asarray(advantages, np.float32)
    )


def mismatched(old, sampler, advantages, sequences=None):
    """Loss inputs with these probabilities under the policy before the update and under the sampler."""
    old, sampler = (torch.tensor(row, dtype=torch.float64).log() for row in (old, sampler))
    share = torch.full_like(old, 1 / len(old))
    numbers = torch.tensor(sequences or [0] * len(old))
    advantages = torch.tensor(advantages, dtype=torch.float64)
    return LossInputs(old, -old, old, None, advantages, share, numbers, sampler_logp_M=sampler)


def test_truncated_importance_sampling_by_hand():
    """Ratios 2, 1/2 and 4 with a cap of 3: advantages 1, 1 and -2 become 2, 1/2 and -6."""
    tokens = mismatched([0.5, 0.25, 0.5], [0.25, 0.5, 0.125], [1, 1, -2])
    moved, figures = correct_mismatch(tokens, importance_cap=3.0)
    assert moved.advantage_M.tolist() == pytest.approx([2, 0.5, -6]) and tokens.advantage_M.tolist() == [1, 1, -2]
    assert {k: float(v) for k, v in figures.items()} == pytest.approx(
        {"sampler_kl": -np.log(4) / 3, "importance_cap_fraction": 1 / 3}
    )


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [2, 0.8, 3]),
        ("token_mask", [2, 0, 0]),
        ("sequence_truncate", [1, 1, 3]),
        ("sequence_mask", [1, 1, 0]),
    ],
)
def test_token_and_sequence_importance_caps_by_hand(mode, expected):
    """Ratios 2 and 1/2 in one answer, whose product is 1, and 4 in another; bounds 0.8 and 3."""
    tokens = mismatched([0.5, 0.25, 0.5], [0.25, 0.5, 0.125], [1, 1, 1], [0, 0, 1])
    moved, _ = correct_mismatch(tokens, importance_cap=3.0, importance_floor=0.8, importance_mode=mode)
    assert moved.advantage_M.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("bounds", [{"importance_floor": 3.0}, {"importance_cap": 0.5}])
def test_bounds_that_exclude_fresh_samples_are_refused(bounds):
    with pytest.raises(ValueError, match="exclude the ratio 1"):
        GRPO(importance_mode="token_mask", **bounds)
    assert GRPO(importance_floor=1.0).importance_floor == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"old_logprobs": "sampler", "importance_cap": 3}, "importance_cap: 3.0 has no effect with old_logprobs"),
        ({"old_logprobs": "sampler", "importance_mode": "token_mask"}, "importance_mode: token_mask has no effect"),
        ({"importance_cap": None, "importance_floor": 0.5}, "0.5 has no effect with importance_cap: null"),
        ({"epsilon": 0.3}, "epsilon: 0.3 has no effect: .* set these, or remove it"),
        ({"branch_at": "root", "continue_from": "epsilon", "epsilon": 0.3}, "epsilon: 0.3 has no effect"),
    ],
)
def test_settings_without_effect_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GRPO(**settings)


def test_resolved_settings_are_accepted_again():
    """The config of a run lists the defaults of settings that have no effect in it."""
    explores = {"continue_from": "epsilon", "epsilon": 0.3}
    for settings in ({"old_logprobs": "sampler"}, {"importance_cap": None}, explores):
        assert GRPO(**GRPO(**settings).model_dump()) == GRPO(**settings)


def test_mismatch_is_only_measured_without_a_cap():
    tokens = mismatched([0.5], [0.25], [1])
    same, figures = correct_mismatch(tokens)
    assert same is tokens and float(figures["sampler_kl"]) == pytest.approx(-np.log(2))
    assert correct_mismatch(tokens._replace(sampler_logp_M=None), importance_cap=1.0)[1] == {}


def test_kl_penalty_requests_reference_logprobs_only():
    samples = [sample([-0.5], [1.0]), sample([-0.5, -0.5], [1.0, 1.0])]
    learner = CurrentLearner([[-7.0], [-7.0, -7.0]], reference=[[-1.0], [-2.0, -3.0]])
    held = asyncio.run(add_reference_logprobs(samples, learner))
    assert [s.reference_logprobs.tolist() for s in held] == [[-1], [-2, -3]]
    assert [s.logprobs.tolist() for s in held] == [[-0.5], [-0.5, -0.5]] and samples[0].reference_logprobs is None
    refined, figures = asyncio.run(GRPO(kl_coef=0.1).finalize_samples(samples, learner, {}))
    assert [s.reference_logprobs.tolist() for s in refined] == [[-1], [-2, -3]] and figures == {}
    assert {s.old_logprobs for s in refined} == {"current"}
    held = asyncio.run(GRPO(old_logprobs="sampler").finalize_samples(samples, learner, {}))[0]
    assert held is samples and held[0].old_logprobs is None


LOGITS = [0.4, -0.3, 1.1, 0.0]  # log-probabilities under the policy in training, of four answers of a token each
SAMPLER = [0.4, 0.4, 0.05, 0.15]  # log-probabilities under the sampler
WORTH = [1.0, -0.5, 2.0, -1.0]


def expected_gradient(algorithm):
    """The gradient of an update, in expectation over the sampler: each answer is weighted by its probability there."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    logp = torch.log_softmax(logits, 0)
    now = [[value] for value in logp.detach().tolist()]
    drawn = [
        Sample(np.array([1]), np.array([i]), np.log(np.array([SAMPLER[i]])), np.array([WORTH[i]]), weight=SAMPLER[i])
        for i in range(4)
    ]
    drawn, _ = asyncio.run(algorithm.finalize_samples(drawn, CurrentLearner(now), {}))
    (pack,) = micro_batches(drawn, 10**6)
    tokens = build_loss_inputs(pack, logp, -logp)
    loss, _ = algorithm.loss(tokens, **algorithm.loss_options)
    loss.backward()
    return -logits.grad.numpy()


def on_policy_gradient():
    """The gradient of the expected return itself."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    (torch.softmax(logits, 0) * torch.tensor(WORTH, dtype=torch.float64)).sum().backward()
    return logits.grad.numpy()


@pytest.mark.parametrize("surrogate", ["clipped", "cispo"])
def test_corrected_stale_samples_give_the_on_policy_gradient(surrogate):
    """Exact if nothing is truncated: a sum over all answers, not an estimate."""
    found = expected_gradient(GRPO(importance_cap=1e9, surrogate=surrogate))
    np.testing.assert_allclose(found, on_policy_gradient(), atol=1e-6)


def test_uncorrected_stale_samples_bias_the_gradient():
    """Treating stale samples as on-policy leaves out the ratio. A clip relative to the sampler stops the gradient of
    answers that have become likelier. Both turn the gradient away from the best answer."""
    right = on_policy_gradient()
    uncorrected, clipped = GRPO(importance_cap=None), GRPO(old_logprobs="sampler")
    for wrong in (expected_gradient(uncorrected), expected_gradient(clipped)):
        assert np.abs(wrong - right).max() > 0.3 and wrong[2] < 0.3 * right[2]


def test_truncated_correction_bias_shrinks_with_the_cap():
    """A cap of 3 biases the answer whose ratio is 10, and bounds the effect of a single token."""
    distance = [
        np.abs(expected_gradient(GRPO(importance_cap=most)) - on_policy_gradient()).max()
        for most in (1.0, 3.0, 6.0, 20.0)
    ]
    assert distance == sorted(distance, reverse=True) and distance[-1] < 1e-6 < distance[-2]


def test_importance_sampling_loss_needs_no_correction():
    """Importance sampling without a clip is unbiased without a correction, and unbounded."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    share, worth = (torch.tensor(row, dtype=torch.float64) for row in (SAMPLER, WORTH))
    logp = torch.log_softmax(logits, 0)
    loss, _ = LOSSES["importance_sampling"](LossInputs(logp, -logp, share.log(), None, worth, share))
    loss.backward()
    np.testing.assert_allclose(-logits.grad.numpy(), on_policy_gradient(), atol=1e-12)
