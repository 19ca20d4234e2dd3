"""Replay of sequences: credit within them, stored recurrent states, burn-in, and overwriting in the ring."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.vector_toys import Countdown

from palestra.core.types import RolloutBatch
from palestra.vector.nets.replay import ReplayBuffer
from palestra.vector.nets.sequence_replay import SequenceBatch, SequenceReplay
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.rollout import VectorRollout


def swept(turns: bool = False, steps: int = 12, games: int = 4) -> RolloutBatch:
    env = Countdown(games=games, turns=turns)
    batch = VectorRollout(env, np.arange(games)).collect([UniformVectorPolicy(env, [0, 1])], steps, 1)
    memory = torch.arange(2 * games * 3, dtype=torch.float32).view(1, 2 * games, 3)
    return replace(batch, recurrent_state={"random": None, "gru": memory})


def everything(segments: SequenceReplay) -> SequenceBatch:
    """All sequences in the order of their indices, each once."""
    places = np.arange(len(segments))
    segments.ring.sample = lambda count, rng, beta: (places, np.ones(len(places)))  # type: ignore[method-assign]
    found = segments.sample(0, np.random.default_rng(0))
    del segments.ring.sample
    return found


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_sequence_credit_equals_transition_credit(turns: bool, n: int, joint: bool) -> None:
    batch = swept(turns)
    segments, replay = (
        SequenceReplay(4, n_step=n, gamma=0.8, count_env_steps=joint),
        ReplayBuffer(48, n_step=n, gamma=0.8, count_env_steps=joint),
    )
    segments.add(batch)
    replay.add(batch)
    found = everything(segments)
    replay.ring.sample = lambda count, rng, beta: (np.arange(48), np.ones(48))  # type: ignore[method-assign]
    moves = replay.sample(0, np.random.default_rng(0))
    names = (
        "actions",
        "rewards",
        "discounts",
        "weight",
        "agent_mask",
        "action_mask",
        "state",
        "next_state",
        "next_action_mask",
    )
    for name in (*names, "next_agent_mask"):
        assert torch.equal(getattr(found, name).flatten(0, 1), getattr(moves, name)), name
    # the index of the next step leads to the next observation
    seen = 0
    for t in range(12):
        for m in range(4):
            for s in range(2):
                if not found.weight[t, m, s]:
                    continue
                at = int(found.step_index[t, m, s])
                if at > 12:
                    here = [
                        f
                        for f in range(len(found.truncations[0]))
                        if (found.truncations[0][f], found.truncations[1][f]) == (at - 13, m)
                    ]
                    if not here:
                        assert found.discounts[t, m, s] == 0
                        continue
                    view = found.final_obs[here[0], s]
                else:
                    view = found.obs[at, m, s]
                assert torch.equal(view, moves.next_obs[t * 4 + m, s])
                seen += 1
    assert seen > 10 and len(found.truncations[0]) > 0


def test_sequences_start_with_the_stored_recurrent_state() -> None:
    segments = SequenceReplay(10, recurrent_players=["gru"])
    segments.add(swept())
    found = everything(segments)
    assert list(found.recurrent_states) == ["gru"]
    # games of two seats, three units: game 1 has rows 2 and 3 of the policy's recurrent state
    assert found.recurrent_states["gru"].shape == (1, 8, 3)
    assert found.recurrent_states["gru"][0, 2:4].tolist() == [[6, 7, 8], [9, 10, 11]]


def test_recurrent_states_are_kept_per_member() -> None:
    segments = SequenceReplay(10, recurrent_players=["a+b"])
    memory = torch.arange(2 * 4.0).view(2, 4, 1)  # two members, one seat each, four games
    segments.add(replace(swept(), recurrent_state={"a+b": memory}))
    assert torch.equal(everything(segments).recurrent_states["a+b"], memory)


def test_burn_in_steps_are_not_trained() -> None:
    """Games of Countdown last 2 to 5 steps. In the second batch a game is in progress, so its first steps are burn-in,
    until it ends and the next game starts with a zero state."""
    env = Countdown(games=4)
    sweeper, segments = VectorRollout(env, np.arange(4)), SequenceReplay(8, burn_in=3)
    for i in range(2):
        segments.add(sweeper.collect([UniformVectorPolicy(env, [0, 1])], 4, i))
    found = everything(segments)
    assert (found.weight[:, :4] == 1).all()
    is_first = found.is_first[:4, 4:]
    assert not is_first[0].all()
    for t in range(4):
        for m in range(4):
            counts = t >= 3 or bool(is_first[: t + 1, m].any())
            assert found.weight[t, 4 + m].tolist() == [float(counts)] * 2
    assert (found.weight == 0).any()


def test_newest_sequences_overwrite_the_oldest() -> None:
    segments = SequenceReplay(6)
    for number in range(3):
        batch = swept()
        segments.add(replace(batch, rewards=np.full_like(batch.rewards, number)))
    assert len(segments) == 6
    # of 12 sequences the last 6, number i at index i % 6: games 2 and 3 of the second batch, then those of the third
    games, found, is_first = [2, 3, 0, 1, 2, 3], everything(segments), SequenceReplay(4)
    assert found.rewards[0, :, 0].tolist() == [1, 1, 2, 2, 2, 2]
    is_first.add(batch)
    alone = everything(is_first)
    assert torch.equal(found.obs, alone.obs[:, games]) and torch.equal(found.step_index, alone.step_index[:, games])
    kept = {
        (int(t), games.index(int(m), 2)): view for t, m, view in zip(*alone.truncations, alone.final_obs, strict=True)
    }
    assert kept
    seen = {(int(t), int(m)): view for t, m, view in zip(*found.truncations, found.final_obs, strict=True)}
    assert all(torch.equal(seen[at], view) for at, view in kept.items())


def test_resume_is_bit_identical() -> None:
    options: dict[str, Any] = {"priority": 0.7, "n_step": 2, "recurrent_players": ["gru"]}
    segments, other = SequenceReplay(6, **options), SequenceReplay(6, **options)
    segments.add(swept())
    segments.update_priorities(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    other.load({name: array.copy() for name, array in segments.arrays().items()})
    for kept in (segments, other):
        kept.add(swept(turns=True))
    a, b = (kept.sample(20, np.random.default_rng(3), 0.4) for kept in (segments, other))
    for part in fields(SequenceBatch):
        x, y = getattr(a, part.name), getattr(b, part.name)
        x, y = (list(z.values()) if isinstance(z, dict) else list(z) if isinstance(z, tuple) else [z] for z in (x, y))
        assert all(torch.equal(u, v) for u, v in zip(x, y, strict=True)), part.name


def test_sequences_are_sampled_by_priority() -> None:
    segments = SequenceReplay(4, priority=1.0)
    segments.add(swept())
    segments.update_priorities(torch.arange(4), torch.tensor([1.0, 3.0, 0.0, 0.0]))
    found = segments.sample(4000, np.random.default_rng(0))
    shares = np.bincount(found.index.numpy(), minlength=4) / 4000
    assert shares == pytest.approx([0.25, 0.75, 0, 0], abs=0.01)
    known = found.weight[0, :, 0]  # weight 1 for the least likely, 1/3 for those three times as likely
    assert known.numpy() == pytest.approx(np.where(found.index.numpy() == 0, 1, 1 / 3), rel=1e-4)
