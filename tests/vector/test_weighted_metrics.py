"""Metrics of an update of several minibatches are means over its actions."""

from typing import Any

import pytest
import torch
from helpers.vector_toys import Countdown, learner, train_on_play

import palestra as pl
from palestra.vector.algorithms.dqn import DQN
from palestra.vector.algorithms.experimental.facmac import FACMAC
from palestra.vector.algorithms.experimental.imitation import BC
from palestra.vector.algorithms.sac import SAC
from palestra.vector.learners.nets import WEIGHT_KEY, mean_metrics
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.policies.base import UniformVectorPolicy
from palestra.vector.rollouts.episodes import record_vector_episodes


def test_mean_of_minibatches_by_hand():
    """Minibatches of 3 and 1 actions; each gradient step counts the same."""
    lines = [{"entropy": torch.tensor(1.0), "grad_norm": 1.0, WEIGHT_KEY: torch.tensor(3.0)}]
    lines += [{"entropy": torch.tensor(3.0), "grad_norm": 3.0, WEIGHT_KEY: torch.tensor(1.0)}]
    assert mean_metrics(lines) == {"entropy": 1.5, "grad_norm": 2.0}
    assert mean_metrics([{"entropy": 1.0}, {"entropy": 3.0}]) == {"entropy": 2.0}
    assert mean_metrics([]) == {}


@pytest.mark.parametrize("algorithm", [pl.vector.PPO, pl.PQN])
def test_metrics_do_not_depend_on_the_minibatches(algorithm, tmp_path):
    """Networks that hardly learn, in a game whose number of acting seats is no multiple of the minibatches."""

    def metrics(minibatches):
        run = pl.train(
            env={"type": "kuhn_poker", "num_envs": 3},
            policies={"default": pl.Net(hidden=[8], lr=1e-12)},
            algorithm=algorithm(rollout_length=7, minibatches=minibatches, epochs=1),
            steps=21,
            root=tmp_path,
        )
        line = run.metrics[run.metrics["policy"] == "default"].iloc[-1].dropna().to_dict()
        return {key: line[key] for key in ("entropy", "policy_loss", "value_loss", "q_loss", "q") if key in line}

    whole, parts = metrics(1), metrics(4)
    assert len(whole) >= 2 and parts == pytest.approx(whole, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("algorithm", [DQN, SAC])
def test_metrics_of_replay_are_means_over_the_decisions_of_all_steps(algorithm: Any, monkeypatch: Any) -> None:
    """Seats act in turn, so that a policy has another number of decisions in each replay batch."""
    env, seats = Countdown(games=5, turns=True, seats=3), {"one": [0], "two": [1, 2]}
    config = algorithm(rollout_length=4, gradient_steps=6, batch_size=8, learning_starts=1)
    made, steps = learner(config, env, seats), []
    plain = made.train_step

    def recorded(drawn: Any, *more: Any) -> Any:
        result = plain(drawn, *more)
        lines = result if isinstance(result, list) else result[0]
        acts = (drawn.weight > 0) & (drawn.agent_mask > 0)
        counts = {name: int(acts[..., own].sum()) for name, own in seats.items()}
        by_name = {
            name: {key: float(value[p]) for key, value in line.items()}
            for stack, line in zip(made.stacks, lines, strict=True)
            for p, name in enumerate(stack.seat_mapping.names)
        }
        steps.append((counts, by_name))
        return result

    monkeypatch.setattr(made, "train_step", recorded)
    metrics = train_on_play(made, env, 2)
    last = steps[-6:]
    for name in seats:
        counts = [counts[name] for counts, _ in last]
        assert len(set(counts)) > 1
        for key in metrics[name].keys() & last[0][1][name].keys() - {"grad_norm"}:
            total = sum(count * line[name][key] for count, (_, line) in zip(counts, last, strict=True))
            assert metrics[name][key] == pytest.approx(total / sum(counts), rel=1e-5), key
        norms = [line[name]["grad_norm"] for _, line in last]
        assert metrics[name]["grad_norm"] == pytest.approx(sum(norms) / 6, rel=1e-5)
        assert WEIGHT_KEY not in metrics[name]


def test_metrics_of_facmac_are_those_of_the_team_for_all_policies(monkeypatch: Any) -> None:
    """Its critic, and what its policies ascend, are the team's: means over joint steps, whoever acts in them."""
    env, seats = Countdown(games=5, turns=True, seats=3), {"one": [0], "two": [1, 2]}
    made, steps = learner(FACMAC(rollout_length=4, gradient_steps=6, batch_size=8, learning_starts=1), env, seats), []
    plain = made.train_step

    def recorded(*arguments: Any) -> Any:
        lines = plain(*arguments)
        steps.append({key: float(lines[0][key][0]) for key in ("critic_loss", "q")})
        return lines

    monkeypatch.setattr(made, "train_step", recorded)
    metrics = train_on_play(made, env, 2)
    for key in ("critic_loss", "q"):
        mean = sum(step[key] for step in steps[-6:]) / 6  # eight joint steps each
        assert metrics["one"][key] == pytest.approx(mean, rel=1e-5) == metrics["two"][key]


def test_metrics_of_cloned_sequences_are_means_over_their_actions(tmp_path: Any, monkeypatch: Any) -> None:
    """Sequences that the recording cuts off, and seats that wait, leave another number of actions in each step."""
    env, seats = Countdown(games=5, turns=True, seats=3), {"one": [0], "two": [1, 2]}
    path = tmp_path / "moves.parquet"
    record_vector_episodes(env, [UniformVectorPolicy(env, [0, 1, 2])], 12, path)
    config = BC(demonstrations=str(path), batch_size=12, sequence_length=4, gradient_steps=6)
    made = learner(config, env, seats, NetPolicyConfig(hidden=[6], gru_units=5))
    counts: dict[str, list[float]] = {name: [] for name in seats}
    entropies: dict[str, list[float]] = {name: [] for name in seats}
    for demos in made.demos:
        sample = demos.sample

        def sampled(*arguments: Any, sample: Any = sample, names: Any = demos.stack.seat_mapping.names) -> Any:
            at, mask = sample(*arguments)
            for name, own in zip(names, mask, strict=True):
                counts[name].append(float(own.sum()))
            return at, mask

        monkeypatch.setattr(demos, "sample", sampled)
    learn = made._learn

    def learned(demos: Any, *arguments: Any) -> Any:
        lines = learn(demos, *arguments)
        for name, line in zip(demos.stack.seat_mapping.names, lines, strict=True):
            entropies[name].append(float(line["entropy"]))
        return lines

    monkeypatch.setattr(made, "_learn", learned)
    metrics = made.update(None, 0.0)
    for name in seats:
        assert len(set(counts[name])) > 1
        total = sum(count * entropy for count, entropy in zip(counts[name], entropies[name], strict=True))
        assert metrics[name]["entropy"] == pytest.approx(total / sum(counts[name]), rel=1e-5)
        assert WEIGHT_KEY not in metrics[name]
