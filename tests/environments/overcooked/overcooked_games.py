"""Games of JaxMARL's Overcooked, recorded step by step, and replayed in palestra's Overcooked from the same states.

Shapes: `T` steps, `B` games, 2 seats, `C` cells, `P` pots. The states of a recording have the layout of
`OvercookedArrays`.
"""

from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from palestra.environments.overcooked.env import Overcooked

LAYOUTS = {  # by JaxMARL's names
    "cramped_room": "cramped_room",
    "asymm_advantages": "asymmetric_advantages",
    "coord_ring": "coordination_ring",
    "forced_coord": "forced_coordination",
    "counter_circuit": "counter_circuit",
}
RECORDED = Path(__file__).with_name("overcooked_jaxmarl_0.2.0.npz")
STATE = ("cooks", "counters", "onions", "cooking")


@dataclass(frozen=True)
class Recording:
    """One episode of each game. States and observations are those before the first step and after each."""

    cooks: np.ndarray  # [T + 1, B, 2, 3]
    counters: np.ndarray  # [T + 1, B, C]
    onions: np.ndarray  # [T + 1, B, P]
    cooking: np.ndarray  # [T + 1, B, P]
    obs: np.ndarray  # uint8 [T + 1, B, 2, C * 26]
    actions: np.ndarray  # [T, B, 2]
    rewards: np.ndarray  # [T, B, 2]
    shaped: np.ndarray  # [T, B, 2]
    done: np.ndarray  # bool [T, B]


def write_recordings(path: Path, recordings: dict[str, Recording]) -> None:
    """Writes recordings by layout. Observations are stored as changes from the step before, mostly zeros."""
    arrays = {
        f"{layout}.{part.name}": getattr(one, part.name) for layout, one in recordings.items() for part in fields(one)
    }
    for layout, one in recordings.items():
        arrays[f"{layout}.obs"] = np.diff(one.obs, axis=0, prepend=np.zeros_like(one.obs[:1]))
    np.savez_compressed(path, allow_pickle=False, **arrays)


def read_recordings(path: Path) -> dict[str, Recording]:
    with np.load(path) as file:
        arrays = dict(file)
    names = dict.fromkeys(key.split(".")[0] for key in arrays)
    read = {}
    for layout in names:
        parts = {part.name: arrays[f"{layout}.{part.name}"] for part in fields(Recording)}
        read[layout] = Recording(**parts | {"obs": np.cumsum(parts["obs"], axis=0, dtype=np.uint8)})
    return read


def replay(layout: str, one: Recording) -> Counter[str]:
    """Plays the recorded actions in palestra's env from the recorded first states, and fails at the first difference in
    a state, a reward, an end or an observation. Returns the counts of `events`."""
    steps, games = one.actions.shape[:2]
    env = Overcooked(games, layout=layout, max_steps=steps, shaped_reward=0.5)
    env.reset(np.arange(games))
    start = env.save()
    assert start is not None
    env.load(start | {f"memory.{name}": getattr(one, name)[0] for name in STATE} | {"frame.obs": one.obs[0]})
    for t in range(steps):
        frame, last = env.step(one.actions[t]), t == steps - 1
        where = f"step {t} in {layout}"
        assert np.array_equal(env.internal_state["shaped"], one.shaped[t]), where
        assert np.array_equal(frame.rewards, one.rewards[t] + 0.5 * one.shaped[t]), where
        assert np.array_equal(frame.truncated, one.done[t]) and not frame.terminated.any(), where
        assert np.array_equal(frame.final_obs if last else frame.obs, one.obs[t + 1]), where
        for name in () if last else STATE:
            assert np.array_equal(env.internal_state[name], getattr(one, name)[t + 1]), f"{name} after {where}"
    assert one.done[-1].all() and not one.done[:-1].any()
    return events(one)


def events(one: Recording) -> Counter[str]:
    """Returns how often soups were served, shaped rewards were paid, items were put down, and cooks blocked each
    other."""
    moved = one.actions < 4
    held, cells = one.cooks[..., 2], one.cooks[..., 0]
    put = (np.diff((one.counters > 0).sum(2), axis=0) > 0).sum()
    still = moved.all(2) & (cells[1:] == cells[:-1]).all(2)
    counts = Counter(f"shaped {value:g}" for value in one.shaped.ravel() if value)
    return counts + Counter(
        {
            "served": int((one.rewards[..., 0] > 0).sum()),
            "put down": int(put),
            "taken from a counter": int((np.diff((one.counters > 0).sum(2), axis=0) < 0).sum()),
            "plates without a reward": int(((held[1:] == 2) & (held[:-1] == 0) & (one.shaped == 0)).sum()),
            "both moved, neither went": int(still.sum()),
            "soups got ready": int((np.diff(one.cooking, axis=0) < 0)[one.cooking[1:] == 0].sum()),
        }
    )
