"""OpenSpiel's PSRO with a DQN oracle and the settings of its `psro_v2_example.py`, except for the meta-solver: Nash.

Ends after the iteration in which `seconds` have passed. NashConv is measured whenever a tenth more time has passed;
that takes longer than an iteration and is not counted.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyspiel
from open_spiel.python import rl_environment
from open_spiel.python.algorithms import exploitability, policy_aggregator
from open_spiel.python.algorithms.psro_v2 import psro_v2, rl_oracle, rl_policy
from peers.timing import print_result, read_spec

spec = read_spec()
np.random.seed(1)
game = pyspiel.load_game_as_turn_based(spec.env)
env = rl_environment.Environment(game)
settings: dict[str, Any] = {
    "state_representation_size": env.observation_spec()["info_state"][0],
    "num_actions": env.action_spec()["num_actions"],
    "hidden_layers_sizes": [256] * 4,
    "batch_size": 32,
    "learning_rate": 1e-2,
    "update_target_network_every": 1000,
    "learn_every": 10,
    "optimizer_str": "adam",
}
agents = [rl_policy.DQNPolicy(env, player, **settings) for player in range(2)]
for agent in agents:
    agent.freeze()
oracle = rl_oracle.RLOracle(env, rl_policy.DQNPolicy, settings, number_training_episodes=10_000)
solver = psro_v2.PSROSolver(
    game,
    oracle,
    initial_policies=agents,
    training_strategy_selector="probabilistic",
    rectifier="",
    sims_per_entry=1000,
    number_policies_selected=1,
    meta_strategy_method="nash",
    sample_from_marginals=True,
)


def nash_conv() -> float:
    """NashConv of the current mixture, as a policy over information states."""
    aggregator = policy_aggregator.PolicyAggregator(game)
    mixed = aggregator.aggregate(range(2), solver.get_policies(), solver.get_meta_strategies())
    return float(exploitability.nash_conv(game, mixed))


figures: dict[str, Any] = {"seconds": [], "nash_conv": [], "iterations": []}
spent, measured, iterations = 0.0, 0.0, 0
while spent < spec.seconds:
    start = time.perf_counter()
    solver.iteration()
    spent, iterations = spent + time.perf_counter() - start, iterations + 1
    if spent > 1.1 * measured or spent >= spec.seconds:
        measured = spent
        figures["seconds"].append(spent)
        figures["iterations"].append(iterations)
        figures["nash_conv"].append(nash_conv())
print_result(
    figures, ("open_spiel", "jax"), "psro_v2_example.py's settings, 10,000 episodes a response, 1,000 games a cell"
)
