"""mpe2's simple_spread with no framework around it: one process, one game after the other, actions drawn before."""

from __future__ import annotations

import numpy as np
from mpe2 import simple_spread_v3
from peers.timing import CYCLES, SEATS, measure, tell, told

spec = told()
env = simple_spread_v3.parallel_env(max_cycles=CYCLES, continuous_actions=False)
drawn = np.random.default_rng(0).integers(0, 5, (4000, SEATS)).tolist()
env.reset(seed=0)
moves = [dict(zip(env.agents, row, strict=True)) for row in drawn]


def advance() -> int:
    """500 joint steps."""
    for number in range(500):
        _, _, _, truncated, _ = env.step(moves[number])
        if all(truncated.values()):
            env.reset()
    return 500


tell(measure(advance, spec.seconds), ("mpe2", "pettingzoo", "numpy"), "one process, random actions, nothing learns")
