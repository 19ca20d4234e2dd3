"""An env of PettingZoo with no framework around it: one process, one game after the other, actions drawn before."""

from __future__ import annotations

import numpy as np
from peers import zoo
from peers.timing import measure, tell, told

spec = told()
env = zoo.make(spec.env)
env.reset(seed=0)
choices = env.action_space(env.agents[0]).n
drawn = np.random.default_rng(0).integers(0, choices, (4000, zoo.SEATS[spec.env])).tolist()
moves = [dict(zip(env.agents, row, strict=True)) for row in drawn]


def advance() -> int:
    """500 joint steps."""
    for number in range(500):
        env.step(moves[number])
        if not env.agents:
            env.reset()
    return 500


tell(measure(advance, spec.seconds), ("pettingzoo", "numpy"), "one process, random actions, nothing learns")
