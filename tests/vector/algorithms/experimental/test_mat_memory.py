"""The transformer with a memory of earlier steps: what outputs depend on, values of a rollout with ends of episodes,
state that is carried and saved, and a task that needs it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.vector_toys import Countdown, Cues, mean_return, train
from torch import Tensor

from palestra.envs.vector_base import Discrete, VectorEnv
from palestra.vector.algorithms.experimental.mat import MAT, MATLearner
from palestra.vector.learners.policy_stack import NetPolicyConfig, read_frozen_member, read_policy
from palestra.vector.nets.layers import Team, make_generators
from palestra.vector.nets.on_device import RolloutTensors
from palestra.vector.nets.transformer import MultiAgentTransformer
from palestra.vector.policies.mixture import IndependentSampler, Mixture
from palestra.vector.rollouts.rollout import VectorRollout

MEMORY = NetPolicyConfig(
    hidden=[8], activation="relu", lr=3e-3, attention_heads=2, attention_blocks=2, attention_type="retention"
).model_copy(update={"retention_decay": 0.8})


def learner(env: VectorEnv, seats: dict[str, list[int]], policy: NetPolicyConfig = MEMORY, **settings: Any) -> Any:
    """A learner whose last layer is 50 times as large as it begins, so that every input matters."""
    seeds = {name: number + 7 for number, name in enumerate(seats)}
    made = MAT(**settings).build_learner(env, seats, dict.fromkeys(seats, policy), seeds)
    assert isinstance(made, MATLearner)
    for stack in made.stacks:
        stack.net.head.weight.data.mul_(50)
    return made


def transformer(seats: int, **settings: Any) -> MultiAgentTransformer:
    config = MEMORY.model_copy(update=settings)
    return MultiAgentTransformer((3,), Discrete(4), config, make_generators([3]), gain=1.0, team_size=seats)


# ---- what outputs and values depend on


def test_outputs_depend_on_earlier_steps_of_the_episode() -> None:
    """On observations of all seats at earlier steps, on actions of all but the last seat, which no seat follows, and at
    their own step on those of earlier seats; on nothing before the start of the episode at step 3, nor on a seat that
    did not act."""
    torch.manual_seed(0)
    net, T, S = transformer(3), 6, 3
    obs, actions = torch.randn(1, T, S, 3), torch.randint(4, (1, T, S))
    acts, is_first = torch.ones(1, T, S, dtype=torch.bool), torch.zeros(1, T, S, dtype=torch.bool)
    is_first[:, 3], acts[:, 4, 1] = True, False

    def results(obs: Tensor, actions: Tensor) -> Tensor:
        outputs, values = net.unroll_with_values(obs, None, is_first, Team(acts, actions))
        assert values is not None
        return torch.cat([outputs, values[..., None]], -1)[0]  # [T, S, 5]

    before = results(obs, actions)
    for t in range(T):
        for seat in range(S):
            changed, seen = actions.clone(), obs.clone()
            changed[:, t, seat] = (changed[:, t, seat] + 1) % 4
            seen[:, t, seat] += 1
            read = (t, seat) != (4, 1)
            later = [i for i in range(t + 1, 3 if t < 3 else T) if read]
            moved = (results(obs, changed) - before).abs()
            by_action = [(t, s) for s in range(seat + 1, S) if read]
            by_action += [(i, s) for i in later for s in range(S) if seat < S - 1]
            assert _moved(moved[..., :4]) == by_action and not moved[..., 4].any()
            moved = (results(seen, actions) - before).abs()
            by_view = [(t, s) for s in range(S) if read or s == seat] + [(i, s) for i in later for s in range(S)]
            assert _moved(moved[..., :4]) == _moved(moved[..., 4:]) == by_view


def _moved(differences: Tensor) -> list[tuple[int, int]]:
    """The steps and seats at which something differs."""
    return [(t, s) for t, s in (differences.amax(-1) > 1e-6).nonzero().tolist()]


def test_memory_adds_no_weights_and_none_at_the_first_step() -> None:
    """Outputs at the first step of an episode are those without memory."""
    torch.manual_seed(0)
    net, plain = transformer(2), transformer(2, retention_decay=0.0)
    obs, actions = torch.randn(1, 1, 6, 3), torch.randint(4, (1, 1, 6))
    team, state = Team(torch.ones(1, 1, 6, dtype=torch.bool), actions), torch.randn(1, 6, net.recurrent_units)
    found = net.unroll_with_values(obs, state, torch.ones(1, 1, 6, dtype=torch.bool), team)
    for one, other in zip(found, plain.unroll_with_values(obs, None, None, team), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_state_of_a_team_is_as_large_as_its_layers() -> None:
    """Two blocks: six layers of two heads of four units, 192 numbers, for teams of 2, 5 and 7 seats."""
    assert [transformer(seats).recurrent_units for seats in (2, 5, 7)] == [96, 39, 28]
    assert transformer(2, retention_decay=0.0).recurrent_units == 0


@pytest.mark.parametrize("turns", [False, True])
def test_values_of_a_rollout_are_those_of_one_step_after_another(turns: bool) -> None:
    """Of every step, and of the last observations of episodes, which some games end with in the batch."""
    env = Countdown(5, seats=4, turns=turns)
    made = learner(env, {"a": [0, 2], "b": [3, 1]}, value_norm=False)
    sweeper = VectorRollout(env, np.arange(5))
    sweeper.collect(made.rollout_policies(0), 3, 0)
    batch = RolloutTensors.of(sweeper.collect(made.rollout_policies(0), 9, 1))
    values, bootstrap = made._values(batch)
    (critic,), (stack,) = made.critics, made.stacks
    assert len({int(n) for n in np.bincount(batch.end_index[1], minlength=5)}) > 1
    mapping, state = critic.seat_mapping, batch.recurrent_state["a+b"]
    ends = dict(zip(zip(*map(Tensor.tolist, batch.end_index), strict=True), batch.final_obs, strict=True))
    for t in range(10):
        memory, acts = state_after(stack, batch, state, t)
        found = stack.net.unroll_values(*view(stack, batch.obs[t], acts), state, first(mapping, batch.is_first[t]))
        torch.testing.assert_close(values[t], mapping.by_seat(found)[0][:, [0, 3, 1, 2]], atol=1e-5, rtol=0)
        for b in range(5):
            if (t, b) in ends:
                last = stack.net.unroll_values(*view(stack, ends[t, b].expand(5, 4, 4), acts), memory, None)
                expected = mapping.by_seat(last)[0, b][[0, 3, 1, 2]] * ~batch.seats_terminated[t, b]
                torch.testing.assert_close(bootstrap[t, b], expected, atol=1e-5, rtol=0)
        state = memory


def first(mapping: Any, is_first: Tensor) -> Tensor:
    found: Tensor = mapping.repeat_games(is_first[None])
    return found


def view(stack: Any, obs: Tensor, acts: Tensor) -> tuple[Tensor, Team]:
    """The inputs of a step of all games, from observations [B, N, *view] and the rows that act."""
    return stack.observations(obs[None]), Team(acts)


def state_after(stack: Any, batch: RolloutTensors, state: Tensor, t: int) -> tuple[Tensor, Tensor]:
    """The recurrent state after step t, and the rows that act in it."""
    acts = stack.rows(batch.agent_mask[t][None])
    if t == len(batch.actions):
        return state, acts
    actions = stack.actions(batch)[:, t].unflatten(1, (5, 2))

    def choose(out: Tensor, seat: int) -> tuple[Tensor, None]:
        return actions[:, :, seat], None

    obs = stack.observations(batch.obs[t][None])[:, 0].unflatten(1, (5, 2))
    begun = first(stack.seat_mapping, batch.is_first[t])[:, 0]
    after = stack.net.play(obs, acts[:, 0].unflatten(1, (5, 2)), choose, state, begun)[2]
    return after.detach(), acts


# ---- state that is carried


@pytest.mark.parametrize("seats", [2, 3])
def test_probabilities_of_play_are_those_of_training(seats: int) -> None:
    """In every rollout, each of which begins amid episodes: the approximate KL divergence is 0 before an update."""
    env = Countdown(4, seats=seats, turns=seats == 3)
    made = learner(env, {"team": list(range(seats))}, rollout_length=3, epochs=1, minibatches=1)
    sweeper = VectorRollout(env, np.arange(4))
    for i in range(4):
        batch = sweeper.collect(made.rollout_policies(0), 3, i)
        acts = batch.agent_mask[:-1]
        assert bool(batch.recurrent_state["team"].any()) == (i > 0)
        tensors = RolloutTensors.of(batch)
        again = made._logp(tensors)[acts]
        np.testing.assert_allclose(again, batch.logp[acts], atol=5e-5)
        if i:  # the recurrent state matters
            forgotten = replace(tensors, recurrent_state={})
            assert float((made._logp(forgotten)[acts] - again).abs().max()) > 0.01
        assert made.update(batch, 0.0)["team"]["kl"] == pytest.approx(0, abs=1e-8)


def test_games_that_go_on_from_a_saved_state_are_bit_identical() -> None:
    env, other = Cues(4, seats=2, steps=5), Cues(4, seats=2, steps=5)
    made = learner(env, {"team": [0, 1]})
    sweeper, loaded = VectorRollout(env, np.arange(4)), VectorRollout(other, np.zeros(4, np.int64))
    sweeper.collect(made.rollout_policies(0), 3, 0)
    saved = sweeper.save()
    assert saved is not None and saved["remembered/team"].shape == (1, 8, 96)
    loaded.load(saved, made.rollout_policies(0))
    one, two = (r.collect(made.rollout_policies(0), 4, 1) for r in (sweeper, loaded))
    np.testing.assert_array_equal(one.logp, two.logp)
    np.testing.assert_array_equal(one.actions, two.actions)


def test_saved_policies_remember(tmp_path: Path) -> None:
    """A team from its files plays as it did; a seat alone plays the same as a player and as a frozen member."""
    env = Countdown(4, seats=3)
    made = learner(env, {"team": [0, 1, 2]})
    made.member_writers()["team"](tmp_path)
    own = VectorRollout(env, np.arange(4)).collect(made.greedy_policies(), 9, 0).actions.copy()
    again = read_policy(tmp_path, env, [0, 1, 2], best=True)
    np.testing.assert_array_equal(VectorRollout(env, np.arange(4)).collect([again], 9, 0).actions, own)
    alone = Countdown(4, seats=1)
    player, (member, _) = (
        read_policy(tmp_path, alone, [0], best=True),
        read_frozen_member(tmp_path, alone, [0], best=True),
    )
    assert member.net.recurrent_units == 192
    found = [VectorRollout(alone, np.arange(4)).collect([player], 9, 0)]
    for names in (["it"], ["it", "other"]):
        mixture = Mixture(alone, [0], dict.fromkeys(names, member), IndependentSampler([{0: 1.0}]))
        found.append(VectorRollout(alone, np.arange(4)).collect([mixture], 9, 0))
        np.testing.assert_array_equal(found[-1].actions, found[0].actions)


# ---- settings, learning


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"retention_decay: only attention_type: retention has a memory"):
        NetPolicyConfig(retention_decay=0.5)
    with pytest.raises(ValueError, match="less than or equal to 1"):
        NetPolicyConfig(attention_type="retention", retention_decay=1.5)
    with pytest.raises(ValueError, match=r"no GRU.*For memory of earlier steps set attention_type: retention"):
        learner(Countdown(2), {"a": [0, 1]}, MEMORY.model_copy(update={"gru_units": 4}))


@pytest.mark.parametrize("decay", [0.0, 1.0])
@pytest.mark.few(1)
def test_memory_task_needs_memory(decay: float, check_score: Any) -> None:
    """Two seats that saw the cue two steps before they answer: a third of the answers is right without memory."""
    env = Cues(32, seats=2, steps=3, fleeting=True)
    policy = NetPolicyConfig(
        hidden=[16],
        lr=1e-2,
        lr_schedule="linear",
        attention_type="retention",
        retention_decay=decay,
        seat_one_hot=True,
    )
    algorithm = MAT(rollout_length=16, gamma=1.0, epochs=3, minibatches=2, value_norm=False)
    made = algorithm.build_learner(env, {"team": [0, 1]}, {"team": policy}, {"team": 7})
    train(made, VectorRollout(env, np.arange(32)), 16, 16)
    score = mean_return(env, made.greedy_policies(), 80)
    check_score(score.min() if decay else score.max())
