"""Off-policy learners, and transitions made by hand for them."""

from collections.abc import Sequence
from typing import Any

import torch

from palestra.envs.vector_base import Discrete, VectorEnv
from palestra.vector.algorithms.off_policy import OffPolicyConfig, OffPolicyLearner
from palestra.vector.learners.policy_stack import NetPolicyConfig
from palestra.vector.nets.layers import Net
from palestra.vector.nets.replay import TransitionBatch

SMALL = NetPolicyConfig(hidden=[16], activation="relu")
UP = 100.0  # keeps the inputs of hidden units above zero


def made(
    config: OffPolicyConfig,
    env: VectorEnv,
    policy: NetPolicyConfig = SMALL,
    seats: dict[str, list[int]] | None = None,
) -> Any:
    """A learner with one policy "p" at all seats, unless `seats` assigns others."""
    seats = seats or {"p": list(range(len(env.seats)))}
    learner = config.build_learner(
        env, seats, dict.fromkeys(seats, policy), {name: i + 1 for i, name in enumerate(seats)}
    )
    assert isinstance(learner, OffPolicyLearner)
    return learner


def noise(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def moments(env: VectorEnv, rows: int, **changes: torch.Tensor) -> TransitionBatch:
    """Transitions in which all seats act; all arrays are zero except `changes`."""
    N, space = len(env.seats), env.action_spaces[0]
    zeros, discrete = torch.zeros(rows, N), isinstance(space, Discrete)
    fields: dict[str, Any] = {
        "obs": torch.zeros(rows, N, *env.observation_shapes[0]),
        "actions": zeros.long() if discrete else zeros[..., None],
        "rewards": zeros,
        "discounts": zeros,
        "weight": torch.ones(rows, N),
        "agent_mask": torch.ones(rows, N, dtype=torch.bool),
        "action_mask": torch.ones(rows, N, space.n, dtype=torch.bool) if isinstance(space, Discrete) else None,
        "state": torch.zeros(rows, env.state_size) if env.state_size else None,
        "index": torch.arange(rows),
    }
    following = {f"next_{name}": fields[name] for name in ("obs", "agent_mask", "action_mask", "state")}
    return TransitionBatch(**fields | following | changes)


def constant(net: Net, outputs: Sequence[Sequence[float]]) -> None:
    """Makes every member of a stack return `outputs [P, O]` for any observation."""
    linear(net, [{}] * len(outputs))
    with torch.no_grad():
        net.head.bias.copy_(torch.tensor(outputs)[:, None])


def linear(net: Net, slopes: Sequence[dict[int, float]]) -> None:
    """Makes member p of a stack of SMALL networks return the sum of `slopes[p][column]` times that column of its input,
    which must be above -UP."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        first: Any = net.body.layers[0]
        for p, own in enumerate(slopes):
            for unit, (column, slope) in enumerate(own.items()):
                first.weight[p, column, unit], first.bias[p, 0, unit] = 1.0, UP
                net.head.weight[p, unit, 0] = slope
                net.head.bias[p, 0, 0] -= UP * slope
