"""Learned best responses to the networks of a run: a lower bound on NashConv in games too large to enumerate
(Lanctot et al., 2017; Timbers et al., 2022)."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from palestra.core.config import Tree, dump, validate
from palestra.core.seeding import derive_seed
from palestra.core.types import Seat
from palestra.envs import VectorEnv
from palestra.evaluation.report.population_data import ExploitResult
from palestra.evaluation.target import Target
from palestra.evaluation.vector import VectorEvalSetup, open_vector_eval
from palestra.runs import Run, list_checkpoints
from palestra.runs.loop import restore_checkpoint, run_training
from palestra.vector.build.build import build_vector_run, group_teams
from palestra.vector.config import TrainedNetConfig, VectorConfig
from palestra.vector.learners.policy_stack import read_policy
from palestra.vector.policies.base import VectorPolicy
from palestra.vector.trainer import play_eval

RESPONSE = "response"
# Algorithms that can train a policy at a single seat, online. Others train a team, learn from recorded play, or save
# the average of their responses.
ONE_LEARNER = ("ppo", "a2c", "trpo", "dqn", "pqn", "sac", "ddpg", "td3")
BATCHES = 10  # batches of evaluation episodes with different games; their means give the standard error
NUM_ENVS = 256


def learn_best_responses(
    target: Target,
    env: Mapping[str, Any] | None = None,
    seats: Mapping[str, str] | None = None,
    *,
    steps: int,
    episodes: int,
    greedy: bool = False,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda what: None,
) -> list[ExploitResult]:
    """Trains a response at each seat for `steps` joint env steps against the frozen policies at the other seats.
    Returns, for each seat, the mean returns over `episodes` episodes of the response and of the policy it replaces.

    The response has the network and the algorithm of the run, or PPO if the run's algorithm trains a team, learns from
    recorded play or is nfsp. `stderr` is the standard error of the gain; responses and the policies that they replace
    play different games. `on_progress` is called with a line of text per finished seat. See `evaluate` for the other
    arguments and errors.
    """
    if not target.is_vector:
        raise ValueError("learned responses are for networks in vectorised games, and this is a text env")
    results = []
    with open_vector_eval(target, env or {}, seats or {}, num_envs=NUM_ENVS, greedy=greedy) as setup:
        means = _mean_returns(setup.env, setup.players(setup.policy_names), episodes, seed)
        for number, seat in enumerate(setup.env.seats):
            response = _train_response(setup, seat, steps, derive_seed(seed, "response", number))
            players = [*setup.players(_others(setup, seat)), response]
            mean, stderr = _mean_returns(setup.env, players, episodes, seed, part=number + 1)[number]
            results.append(ExploitResult(seat, 1, mean, math.hypot(stderr, means[number][1]), means[number][0], {}))
            on_progress(f"response of {seat} trained; {number + 1} of {len(setup.env.seats)}")
    return results


def _mean_returns(
    env: VectorEnv, players: Sequence[VectorPolicy], episodes: int, seed: int, part: int = 0
) -> list[tuple[float, float]]:
    """Returns the mean return and its standard error, by seat. Each batch and each `part` has its own env seeds:
    otherwise players without randomness would have equal means in all batches, and an error of 0."""
    each = -(-episodes // BATCHES)
    means: dict[Seat, list[float]] = {seat: [] for seat in env.seats}
    for batch in range(part * BATCHES, (part + 1) * BATCHES):
        own_seed = derive_seed(seed, "eval", batch)
        metrics = play_eval(env, players, each, own_seed, first_env_seed=batch * env.num_envs)
        for seat, values in means.items():
            values.append(metrics["returns"][seat])
    return [(statistics.fmean(values), statistics.stdev(values) / math.sqrt(BATCHES)) for values in means.values()]


def _train_response(setup: VectorEvalSetup, seat: Seat, steps: int, seed: int) -> VectorPolicy:
    """Returns a policy for one seat, trained against the setup's policies at the other seats."""
    config = validate(VectorConfig, _response_tree(setup, seat, steps, seed))
    with tempfile.TemporaryDirectory(prefix="palestra-response-") as root:
        with Run.create(root, dump(config)) as run:
            trainer = build_vector_run(config)
            restore_checkpoint(trainer, run)
            run_training(trainer, run)
            path = run.path
        newest = list_checkpoints(path)[-1]
        number = setup.env.seats.index(seat)
        folder = newest.path / newest.names[RESPONSE]
        return read_policy(folder, setup.env, [number], device=setup.device)


def _others(setup: VectorEvalSetup, seat: Seat) -> dict[Seat, str]:
    """Returns the policies of the seats other than `seat`."""
    return {other: name for other, name in setup.policy_names.items() if other != seat}


def _response_tree(setup: VectorEvalSetup, seat: Seat, steps: int, seed: int) -> Tree:
    """Returns the config of a run that trains a response at `seat`."""
    base = validate(VectorConfig, setup.target.tree)
    at_seat = base.policies.get(setup.policy_names[seat].rpartition(":")[2])
    candidates = (at_seat, *base.policies.values(), TrainedNetConfig())
    net = next(policy for policy in candidates if isinstance(policy, TrainedNetConfig))
    others: dict[str, Tree] = {}
    places: dict[Seat, str] = {}
    names = _others(setup, seat)
    policies = setup.policies(names)
    for name, seats in group_teams(policies, names):
        label = f"other_{seats[0]}"
        others[label] = policies[name].model_dump()
        places |= dict.fromkeys(seats, label)
    places[seat] = RESPONSE
    own = net.algorithm or base.algorithm
    algorithm = {"type": "ppo"}
    if own.type in ONE_LEARNER:
        algorithm = {"type": own.type} | own.model_dump(exclude_unset=True)
    response = net.model_dump(exclude_unset=True, exclude={"algorithm"}) | {"type": "net"}
    return {
        "name": RESPONSE,
        "seed": seed % 2**31,
        "env": dict(setup.env_config),
        "env_steps": steps,
        "checkpoint_every": steps,
        "policies": {RESPONSE: response, **others},
        "seats": places,
        "algorithm": algorithm,
        "device": str(setup.device),
    }
