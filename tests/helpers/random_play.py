"""Random play of vector envs that `check_vector_env` refuses because they do not repeat exactly."""

import numpy as np

from palestra.envs.vector_base import VectorEnv, VectorStep
from palestra.envs.vector_check import random_actions


def play_at_random(env: VectorEnv, steps: int) -> list[VectorStep]:
    """Plays random legal actions; returns the result of every step. Fails if a number is not finite, a game has no seat
    that acts, or a seat acts that has terminated or that has no legal action."""
    rng, frame, played = np.random.default_rng(0), env.reset(np.arange(env.num_envs)), []
    for _ in range(steps):
        frame = env.step(random_actions(env, frame, rng))
        assert np.isfinite(frame.rewards).all() and np.isfinite(frame.obs).all() and frame.agent_mask.any(1).all()
        if frame.seat_terminated is not None:
            assert not (frame.seat_terminated & frame.agent_mask)[~frame.done].any()
        if frame.action_mask is not None:
            assert (frame.action_mask.any(2) | ~frame.agent_mask).all()
        played.append(frame.copy())
    env.close()
    return played
