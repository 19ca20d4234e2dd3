"""A PettingZoo env without a framework: one process, one game after the other, actions drawn in advance. With `what`
"unchecked", the env is without the wrappers that only check, which palestra's adapter removes too."""

from __future__ import annotations

import numpy as np
from peers import zoo
from peers.timing import measure, print_result, read_spec
from pettingzoo.utils.conversions import aec_to_parallel_wrapper

from palestra.envs.adapters.pettingzoo.games import strip_check_wrappers

spec = read_spec()
env = zoo.make(spec.env)
notes = "one process, random actions, no learning"
if spec.what == "unchecked" and type(env) is aec_to_parallel_wrapper:
    env.aec_env, notes = strip_check_wrappers(env.aec_env), f"{notes}; without PettingZoo's checks"
env.reset(seed=0)
choices = env.action_space(env.agents[0]).n
drawn = np.random.default_rng(0).integers(0, choices, (4000, zoo.SEATS[spec.env])).tolist()
moves = [dict(zip(env.agents, row, strict=True)) for row in drawn]


def advance() -> int:
    """Makes 500 joint steps; returns their number."""
    for number in range(500):
        env.step(moves[number])
        if not env.agents:
            env.reset()
    return 500


print_result(measure(advance, spec.seconds), ("pettingzoo", "numpy"), notes)
