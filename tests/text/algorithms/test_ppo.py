"""PPO: rewards of tokens by hand, the KL penalty and its controller, the loss, and learning."""

import asyncio
import json
import math

import numpy as np
import pytest
import torch
from helpers.actor_critic_runs import (
    FixedValuesLearner,
    credit_samples,
    lists,
    play,
    play_first_step,
    resumed_checkpoint,
    run_of,
    whisper,
)
from hypothesis import given
from hypothesis import strategies as st

from palestra.core.losses import LOSSES, LossInputs, actor_critic_loss, clipped_policy_loss
from palestra.engine.training.adapter_weights import NO_REFERENCE_MESSAGE
from palestra.engine.training.micro_batch import micro_batches
from palestra.runs import read_lines
from palestra.text.algorithms.ppo import PPO, adapt_kl_coef
from palestra.text.build.build import build
from palestra.text.rollouts.tree_rollout import Branching
from palestra.text.training.update import update_learner
from palestra.vector.nets import advantages as vectorised

TALK = (  # a answers with two tokens, b with one, a with one; alpha = 0.5
    ({"a": 2}, {"a": 1.0, "b": 100.0}, 0.0),  # a: 1. b is paid before its first answer: ignored
    # a: 0.5 + 0.5 * 2, earned by b's move, for a's answer before it. b: 5 + 0.5 * 2
    ({"b": 1}, {"a": 0.5, "b": 5.0}, 2.0),
    ({"a": 1}, {"a": -1.0}, 4.0),  # a: -1 + 0.5 * 4. b: 0.5 * 4
)


# ---- which tokens get the rewards


def test_rewards_are_assigned_to_the_last_token_of_the_decision():
    algorithm = PPO(team_weight=0.5)
    samples, figures = algorithm.build_samples([play(TALK)], "p")
    assert lists(samples, "advantages") == [[0.0, 2.5], [1.0]] and figures == {"sequences": 1.0}
    assert lists(algorithm.build_samples([play(TALK)], "q")[0], "advantages") == [[8.0]]


def test_advantages_over_two_turns_by_hand():
    # errors of a's tokens: 0 + 2 - 1 = 1; 2.5 + 4 - 2 = 4.5 (the next state is that of a's next turn); 1 - 4 = -3
    # lam = 0.5: -3; 4.5 - 1.5 = 3; 1 + 1.5 = 2.5
    episode = play(TALK)
    samples, figures = credit_samples(
        PPO(team_weight=0.5, gae_lambda=0.5, normalize_advantages=False), [episode], FixedValuesLearner([[1, 2], [4]])
    )
    assert lists(samples, "advantages") == [[2.5, 3.0], [-3.0]]
    assert lists(samples, "returns") == [[3.5, 5.0], [1.0]] and lists(samples, "values") == [[1.0, 2.0], [4.0]]
    assert [sample.group for sample in samples] == [-1, -1]
    assert [node.advantages for node in episode.nodes] == [{"a": 2.75}, {}, {"a": -3.0}]  # the mean of an answer's
    # squares about the mean: of 2.5, 3, -3, the residuals, 133/6 are left of the 49/6 of 3.5, 5, 1
    assert figures["explained_variance"] == pytest.approx(1 - 133 / 49)


def test_discount_counts_own_tokens_only():
    """a's tokens are rewarded 0, 0 and 8, the last for b's move; b's token in between does not discount a's."""
    line = (({"a": 2}, {}, 0.0), ({"b": 3}, {}, 0.0), ({"a": 1}, {}, 8.0))
    samples, _ = credit_samples(
        PPO(gamma=0.5, gae_lambda=1, normalize_advantages=False), [play(line)], FixedValuesLearner([[0, 0], [0]])
    )
    assert lists(samples, "advantages") == [[2.0, 4.0], [8.0]]


def test_seats_and_trajectories_are_separate_sequences():
    """Each last token has its own reward minus its value of 1: nothing is added from another sequence."""
    both = {"a": "p", "b": "p"}
    line, other = (({"a": 1, "b": 1}, {"a": 2.0, "b": 3.0}, 0.0),), (({"a": 1, "b": 1}, {"a": 5.0, "b": 7.0}, 0.0),)
    algorithm = PPO(group_size=2, normalize_advantages=False)
    assert algorithm.branching == Branching("root", 2)
    samples, figures = algorithm.build_samples([play(line, other, seats=both)] * 2, "p")
    assert figures == {"sequences": 8.0} and [sample.group for sample in samples] == list(range(8))
    samples, _ = asyncio.run(algorithm.finalize_samples(samples, FixedValuesLearner([[1.0]] * 8), {}))
    assert lists(samples, "advantages") == [[1.0], [2.0], [4.0], [6.0]] * 2


def test_turns_of_long_trajectories_have_full_weight():
    """No 1 / T: a token in a trajectory of six turns has the same weight as one in a trajectory of one turn."""
    long, short = [({"a": 2}, {}, 1.0)] * 6, [({"a": 2}, {}, 0.0)]
    samples, _ = credit_samples(PPO(), [play(long), play(short)], FixedValuesLearner([[0, 0]] * 7))
    (pack,) = micro_batches(samples, 10**6)
    assert pack.token_weights == pytest.approx([1 / 14] * 7)


def test_advantages_are_normalised_over_the_step():
    """3 and 1 over two episodes: 1 from their mean either way. Returns keep the units of reward."""
    first, second = (play((({"a": 1}, {}, team),)) for team in (3.0, 1.0))
    samples, _ = credit_samples(PPO(), [first, second], FixedValuesLearner([[0.0], [0.0]]))
    assert lists(samples, "advantages") == [[1.0], [-1.0]] and lists(samples, "returns") == [[3.0], [1.0]]
    assert (first.nodes[0].advantages, second.nodes[0].advantages) == ({"a": 1.0}, {"a": -1.0})


def test_single_token_batch_trains_the_critic_only():
    samples, figures = credit_samples(PPO(), [play((({"a": 1}, {}, 3.0),))], FixedValuesLearner([[0.0]]))
    assert lists(samples, "advantages") == [[0.0]] and lists(samples, "returns") == [[3.0]]
    assert figures == {"sequences": 1.0}


def test_empty_answers_are_not_decisions():
    """Rewards after an empty answer go to the decision before it; before the first decision they are ignored."""
    line = (({"a": 0}, {}, 9.0), ({"a": 2}, {}, 1.0), ({"a": 0}, {}, 2.0), ({"a": 1}, {}, 4.0))
    samples, figures = PPO().build_samples([play(line)], "p")
    assert lists(samples, "advantages") == [[0.0, 3.0], [4.0]] and figures == {"sequences": 1.0}


def test_samples_are_built_for_own_unfailed_answers_only():
    episode = play(TALK)
    assert len(PPO().build_samples([episode], "p")[0]) == 2 and len(PPO().build_samples([episode], "q")[0]) == 1
    assert PPO().build_samples([play(TALK, seats={"a": "pp", "b": "q"})], "p")[0] == []
    assert PPO().build_samples([play(TALK, error="RuntimeError: boom")], "p") == ([], {"sequences": 0.0})
    assert asyncio.run(PPO(kl_coef=1.0).finalize_samples([], FixedValuesLearner([]), {})) == ([], {})


steps = st.lists(st.tuples(st.booleans(), st.booleans(), *[st.floats(-9, 9)] * 5), min_size=1, max_size=8)


@given(steps, st.floats(0.1, 1), st.floats(0, 1))
def test_one_token_turns_equal_vector_gae(rows, gamma, lam):
    """Two seats that act in turn, together or not at all; columns: acting, rewards and values of each, the team's."""
    T = len(rows)
    acting = torch.tensor([row[:2] for row in rows] + [(True, True)])
    rewards, values, team = (torch.tensor([row[i : i + n] for row in rows]) for i, n in ((2, 2), (4, 2), (6, 1)))
    course = vectorised.AdvantageInputs(
        (rewards + 0.5 * team).double().view(T, 1, 2),
        torch.cat([values, torch.ones(1, 2)]).double().view(T + 1, 1, 2),
        torch.zeros(T, 1, 2, dtype=torch.float64),
        (torch.arange(T) == T - 1).view(T, 1, 1).expand(T, 1, 2),
        acting.view(T + 1, 1, 2),
    )
    theirs, known = vectorised.gae(course, gamma=gamma, gae_lambda=lam)
    line = [
        ({s: 1 for s, acts in zip("ab", acting[t].tolist(), strict=True) if acts}, local, team[t].item())
        for t, local in enumerate(dict(zip("ab", r.tolist(), strict=True)) for r in rewards)
    ]
    for n, policy in enumerate("pq"):
        own = acting[:-1, n]
        algorithm = PPO(team_weight=0.5, gamma=gamma, gae_lambda=lam, normalize_advantages=False)
        samples, _ = credit_samples(algorithm, [play(line)], FixedValuesLearner(values[own, n, None].tolist()), policy)
        ours = [sample.advantages.item() for sample in samples]
        assert known[own, 0, n].all()
        np.testing.assert_allclose(ours, theirs[own, 0, n], atol=1e-4)


# ---- the KL penalty


def drifted_play(*gaps):
    """A trajectory of one answer by a, sampled with -1 per token, whose reference log-probabilities are lower by these
    gaps."""
    return [play((({"a": len(gaps)}, {}, 3.0),))], FixedValuesLearner(
        [[0.0] * len(gaps)], reference=[[-1.0 - g for g in gaps]]
    )


def test_kl_penalty_is_part_of_each_token_reward():
    """A token 0.5 nats likelier than under the reference costs 0.05, one 1 nat less likely earns 0.1. The last token
    has the reward of 3."""
    algorithm = PPO(kl_coef=0.1, gae_lambda=0, normalize_advantages=False)
    samples, figures = credit_samples(algorithm, *drifted_play(0.5, -1.0, 2.0))
    assert lists(samples, "returns") == [pytest.approx([-0.05, 0.1, 3 - 0.2])]
    assert lists(samples, "advantages") == lists(samples, "returns")
    assert figures["kl_sequence"] == pytest.approx(1.5) and figures["kl_coef"] == 0.1


def test_later_kl_penalties_reach_earlier_tokens():
    samples, _ = credit_samples(
        PPO(kl_coef=0.1, gae_lambda=1, normalize_advantages=False), *drifted_play(0.5, -1.0, 2.0)
    )
    assert lists(samples, "advantages") == [pytest.approx([2.85, 2.9, 2.8])]


def test_kl_is_summed_over_whole_sequences():
    """Trajectories of 1 + 2 and of 5 nats: the mean is 4, whatever the number of turns."""
    long, short = [({"a": 1}, {}, 0.0)] * 2, [({"a": 1}, {}, 0.0)]
    learner = FixedValuesLearner([[0.0]] * 3, reference=[[-2.0], [-3.0], [-6.0]])
    assert credit_samples(PPO(kl_coef=0.1), [play(long), play(short)], learner)[1]["kl_sequence"] == pytest.approx(4)


def test_adaptive_kl_coefficient_tracks_its_target():
    """Three steps of one sequence each, target 2, horizon 10. 3 nats: the relative error 0.5 is clipped to 0.2, times
    1/10. 2.2 nats: an error of 0.1. -1: an error of -1.5, clipped to -0.2."""
    algorithm, memory, used = PPO(kl_coef=0.1, kl_target=2.0, kl_horizon=10), {}, []
    for gap in (3.0, 2.2, -1.0):
        samples, figures = credit_samples(algorithm, *drifted_play(gap), memory=memory)
        assert samples[0].returns.item() == pytest.approx(3 - figures["kl_coef"] * gap)
        used.append(figures["kl_coef"])
        memory = json.loads(json.dumps(memory))
    # the KL of a step changes the coefficient of the next
    assert used == pytest.approx([0.1, 0.1 * 1.02, 0.1 * 1.02 * 1.01])
    assert memory["kl"]["now"] == pytest.approx(0.1 * 1.02 * 1.01 * 0.98)


def test_adaptive_kl_coefficient_moves_with_the_number_of_sequences():
    """Two sequences with an error of 0.2, horizon 10: 1 + 0.2 * 2 / 10."""
    line, memory = (({"a": 1}, {}, 0.0),), {}
    learner = FixedValuesLearner([[0.0]] * 2, reference=[[-9.0]] * 2)
    credit_samples(PPO(kl_coef=0.5, kl_target=2.0, kl_horizon=10), [play(line), play(line)], learner, memory=memory)
    assert memory["kl"]["now"] == pytest.approx(0.52)


@pytest.mark.parametrize("sequences", [50, 60, 10**6])
def test_adaptive_kl_step_is_clipped_to_a_fifth(sequences):
    assert adapt_kl_coef(0.1, 9.0, target=1.0, sequences=sequences, horizon=50) == pytest.approx(0.12)
    assert adapt_kl_coef(0.1, 0.0, target=1.0, sequences=sequences, horizon=50) == pytest.approx(0.08)


def test_stage_with_another_kl_coef_restarts_from_it():
    memory = {}
    for kl, expected in ((0.1, 0.1), (0.1, 0.102), (0.3, 0.3)):
        algorithm = PPO(kl_coef=kl, kl_target=2.0, kl_horizon=10)
        assert credit_samples(algorithm, *drifted_play(3.0), memory=memory)[1]["kl_coef"] == pytest.approx(expected)
    # no target: the coefficient does not change
    assert credit_samples(PPO(kl_coef=0.3), *drifted_play(3.0), memory=memory)[1]["kl_coef"] == 0.3


def test_adaptive_kl_from_zero_is_refused():
    with pytest.raises(ValueError, match="which leave kl_coef: 0 at 0"):
        PPO(kl_target=1.0)


# ---- importance correction


def test_old_logprobs_come_from_the_trainer_and_credit_from_the_sampler():
    """Under the weights in training the first token is twice as likely as under the sampler, the second half as likely.
    The penalty uses the sampler's log-probabilities; advantages and returns do not depend on the correction."""
    episodes, learner = drifted_play(0.0, 1.0)
    learner.now, learner.updates = [[-1 + math.log(2), -1 - math.log(2)]], 2
    options = {"kl_coef": 0.5, "gae_lambda": 0, "normalize_advantages": False}
    plain, _ = credit_samples(PPO(**options, old_logprobs="sampler"), episodes, learner)
    moved, _ = credit_samples(PPO(**options), episodes, learner)
    assert lists(plain, "advantages") == lists(moved, "advantages") == [[0.0, 2.5]]
    assert lists(moved, "returns") == lists(plain, "returns") == [[0.0, 2.5]]
    assert lists(moved, "logprobs") == lists(plain, "logprobs") == [[-1.0, -1.0]]
    assert lists(moved, "old_logprobs") == [pytest.approx(learner.now[0])] and plain[0].old_logprobs is None


# ---- the loss


def scored(values, old, returns, *, advantage=0.0, logp=0.0, weight=None, entropy=0.0):
    n = len(values)
    return LossInputs(
        torch.full((n,), logp, requires_grad=True),
        torch.full((n,), entropy),
        torch.zeros(n),
        None,
        torch.tensor(advantage).expand(n),
        torch.tensor(weight or [1 / n] * n),
        value_M=torch.tensor(values, requires_grad=True),
        old_value_M=None if old is None else torch.tensor(old),
        return_M=None if returns is None else torch.tensor(returns),
    )


def test_actor_critic_loss_by_hand():
    """On policy: -(0.5 * 2 + 0.5 * -1). Values: half of 0.5 * (1 - 2)^2 + 0.5 * (3 - 0)^2, with a coefficient of
    1/2."""
    tokens = scored([1.0, 3.0], None, [2.0, 0.0], advantage=[2.0, -1.0])
    loss, figures = actor_critic_loss(tokens, value_coef=0.5)
    loss.backward()
    assert loss.item() == pytest.approx(-0.5 + 0.5 * 2.5) and figures["value_loss"].item() == 2.5
    # along the negative gradient the first rises to 2, the second falls
    assert tokens.value_M.grad.tolist() == [-0.25, 0.75]
    assert tokens.logp_M.grad.tolist() == [-1.0, 0.5]
    assert "value_clip_fraction" not in figures


def test_loss_weights_tokens_by_their_share():
    tokens = scored([1.0, 3.0], None, [2.0, 0.0], weight=[1.0, 0.0])
    assert actor_critic_loss(tokens)[1]["value_loss"].item() == 0.5


@pytest.mark.parametrize(
    ("value", "returned", "error", "slope", "clipped"),
    [  # from an old value of 0, kept within 0.5 of it
        (0.4, 1.0, 0.36, -0.6, 0),  # within the clip: the plain error
        (0.8, 2.0, 2.25, 0.0, 1),  # already 0.8 towards 2: evaluated at 0.5, no gradient
        (-0.8, 2.0, 7.84, -2.8, 0),  # moved away from the target: the plain error, however far
        (2.0, 0.2, 3.24, 1.8, 0),  # past the target: the plain error
    ],
)
def test_value_clipping_by_hand(value, returned, error, slope, clipped):
    tokens = scored([value], [0.0], [returned])
    loss, figures = actor_critic_loss(tokens, value_coef=1.0, value_clip=0.5)
    loss.backward()
    assert loss.item() == figures["value_loss"].item() == pytest.approx(error / 2)
    assert tokens.value_M.grad.item() == pytest.approx(slope) and figures["value_clip_fraction"].item() == clipped


def test_policy_term_is_the_clipped_surrogate():
    options = {"clip": 0.1, "clip_high": 0.3, "dual_clip": 2.0, "entropy": 0.1}
    for advantage, logp in ((1.0, 0.5), (-1.0, 1.5), (-1.0, -0.5), (1.0, 0.2)):
        tokens = scored([7.0], None, [7.0], advantage=advantage, logp=logp, entropy=3.0)
        ours, theirs = actor_critic_loss(tokens, **options), clipped_policy_loss(tokens, **options)
        assert ours[0].item() == theirs[0].item() and ours[1].items() >= theirs[1].items()


def test_loss_without_values_is_refused():
    tokens = scored([1.0], None, None)
    with pytest.raises(ValueError, match="without a critic"):
        actor_critic_loss(tokens)
    with pytest.raises(ValueError, match="without a critic"):
        actor_critic_loss(tokens._replace(value_M=None, return_M=torch.ones(1)))
    with pytest.raises(ValueError, match="from before the update"):
        actor_critic_loss(tokens._replace(return_M=torch.ones(1)), value_clip=0.1)


def test_loss_options_are_passed_to_the_loss():
    assert PPO().loss is LOSSES["actor_critic"] is actor_critic_loss and PPO().needs_critic
    assert PPO().loss_options == {"clip": 0.2, "value_coef": 0.5, "entropy": 0.0, "importance_cap": 2.0}
    settings = {"clip": 0.1, "clip_high": 0.3, "dual_clip": 3.0, "value_coef": 0.0, "value_clip": 0.2}
    assert PPO(**settings, entropy_coef=0.01, kl_coef=0.1, importance_cap=None).loss_options == settings | {
        "entropy": 0.01
    }


# ---- learning


@pytest.mark.slow
def test_two_agents_learn_to_cooperate(base, tmp_path):
    """Two secrets a game; on held-out instances; chance is 1/4."""
    path = run_of(whisper(base, steps=18, episodes=96, policy={"epochs": 2}), tmp_path)
    before, after = (line["success"] for line in read_lines(path / "evals.jsonl"))
    assert before < 0.4 and after > 0.75
    line = next(line for line in read_lines(path / "metrics.jsonl") if line["policy"] == "guide")
    assert line["sequences"] == 96 and line["samples"] == line["answers"] == 192 and line["updates"] == 2
    assert line["value_loss"] > 0 and line["explained_variance"] == 0  # a new critic has the value 0 everywhere


def test_update_changes_value_head_and_adapter(base):
    setup = build(whisper(base, steps=1, episodes=8, algorithm={"kl_coef": 0.1}))
    learner, algorithm = setup.learners["guide"], setup.stages[0].algorithm
    trainer = learner.weights
    head, adapter = ([p.detach().clone() for p in module.parameters()] for module in (trainer.critic, trainer.adapter))
    figures = asyncio.run(update_learner(algorithm, learner, play_first_step(setup), 0.0))
    assert all(not torch.equal(a, b) for a, b in zip(head, trainer.critic.parameters(), strict=True))
    moved = [not torch.equal(a, b) for a, b in zip(adapter, trainer.adapter.parameters(), strict=True)]
    assert all(moved[1::2])  # B; A has no gradient while B is zero
    # the policy starts as its base
    assert figures["kl_sequence"] == pytest.approx(0, abs=1e-4) and figures["kl_coef"] == 0.1


# ---- resume


@pytest.mark.slow
def test_resume_after_stop_is_bit_identical(base, tmp_path):
    config = whisper(
        base,
        steps=6,
        episodes=12,
        algorithm={
            "kl_coef": 0.05,
            "kl_target": 0.5,
            "kl_horizon": 50,
            "group_size": 2,
            "importance_cap": 2.0,
            "value_clip": 0.2,
        },
        policy={"epochs": 2, "batch_size": 20, "history": "conversation"},
        evals={"test": {"episodes": 10, "every": 2}},
    )
    one = resumed_checkpoint(config, tmp_path, 3)
    names = {file.name for file in one.rglob("*")}
    assert {"critic.safetensors", "optimizer.safetensors", "algorithm_state.json"} <= names
    now = json.loads((one / "algorithm_state.json").read_text())["policies"]["guide"]["kl"]["now"]
    used = [line["kl_coef"] for line in read_lines(one.parents[1] / "metrics.jsonl") if line["policy"] == "guide"]
    assert len({*used, now}) == 7  # it changed at every step


# ---- refused settings


def test_remote_training_of_a_critic_is_refused(base):
    """Refused before any request to the server."""
    client = pytest.importorskip("palestra.text.tinker.client")
    policy = whisper(base, steps=1).policies["guide"]
    with pytest.raises(ValueError, match="train without --engine"):
        client.RemoteEngines(None).build_learner("guide", policy, 0, "shared")


def test_full_model_without_reference_is_refused_once_it_has_moved(base):
    full = {"type": "full", "base": str(base), "sampling": {"max_tokens": 1}}
    policies = {"guide": full, "walker": {"type": "scripted", "answers": ["0"]}}
    setup = build(whisper(base, steps=1, episodes=2, policies=policies))
    assert asyncio.run(update_learner(PPO(), setup.learners["guide"], play_first_step(setup), 0.0))["updates"] == 1
    with pytest.raises(ValueError) as error:
        asyncio.run(update_learner(PPO(kl_coef=0.1), setup.learners["guide"], play_first_step(setup), 0.0))
    assert str(error.value) == NO_REFERENCE_MESSAGE
