"""Records games of JaxMARL's Overcooked, for test_overcooked.py.

    python -m venv VENV && VENV/bin/pip install -e . -r tests/envs/adapters/peers/vector/requirements.txt
    cd tests && VENV/bin/python -m envs.vector.overcooked_jaxmarl

writes envs/vector/overcooked_jaxmarl_0.2.0.npz: 16 games of 100 steps of every layout, half of them from random states.
Actions are random; two of five are "interact".
"""

import warnings
from typing import Any

import numpy as np

with warnings.catch_warnings(action="ignore"):
    import jax
    import jax.numpy as jnp
    import jaxmarl
    from jaxmarl.environments.overcooked import overcooked_layouts

from environments.overcooked.overcooked_games import LAYOUTS, RECORDED, Recording, write_recordings

ACTION_SHARES = np.array([0.13, 0.13, 0.13, 0.13, 0.08, 0.4])
ITEMS = {3: 1, 5: 2, 9: 3}  # onion, plate, dish: JaxMARL's object numbers -> palestra's
EMPTY_POT, FULL_POT = 23, 20  # JaxMARL's states of a pot; below 20 the number of remaining steps
SEATS = ("agent_0", "agent_1")


def record(layout: str, games: int, steps: int, seed: int) -> Recording:
    """Plays `games` episodes of `steps` steps in JaxMARL's `layout`; every second one starts in a random state."""
    with warnings.catch_warnings(action="ignore"):  # JaxMARL warns about a second version of the env
        envs = [
            jaxmarl.make("overcooked", layout=overcooked_layouts[layout], random_reset=drawn, max_steps=steps)
            for drawn in (False, True)
        ]
    keys, rng = jax.random.split(jax.random.PRNGKey(seed), games), np.random.default_rng(seed)
    begun = [jax.jit(jax.vmap(env.reset))(keys) for env in envs]
    obs, state = jax.tree.map(lambda fixed, drawn: jnp.stack([fixed[::2], drawn[1::2]], 1).reshape(fixed.shape), *begun)
    step = jax.jit(jax.vmap(envs[0].step_env))
    actions = rng.choice(len(ACTION_SHARES), (steps, games, 2), p=ACTION_SHARES).astype(np.int32)
    states, views, rewards, shaped, done = [in_our_arrays(state, envs[0])], [observation_rows(obs)], [], [], []
    for actions_B2 in actions:
        given = {seat: actions_B2[:, n] for n, seat in enumerate(SEATS)}
        obs, state, paid, ended, info = step(keys, state, given)
        states.append(in_our_arrays(state, envs[0]))
        views.append(observation_rows(obs))
        rewards.append(np.stack([paid[seat] for seat in SEATS], 1))
        shaped.append(np.stack([info["shaped_reward"][seat] for seat in SEATS], 1))
        done.append(np.asarray(ended["__all__"]))
    parts = {name: np.stack([one[name] for one in states]) for name in states[0]}
    return Recording(
        **parts,
        obs=np.stack(views),
        actions=actions,
        rewards=np.stack(rewards).astype(np.float32),
        shaped=np.stack(shaped).astype(np.float32),
        done=np.stack(done).astype(bool),
    )


def in_our_arrays(state: Any, env: Any) -> dict[str, np.ndarray]:
    """Returns the states of JaxMARL's env, each [B, ...], in palestra's arrays."""
    margin = (state.maze_map.shape[1] - env.height) // 2
    objects = np.asarray(state.maze_map)[:, margin:-margin, margin:-margin]
    games = len(objects)
    flat, pots = objects[..., 0].reshape(games, -1), np.asarray(state.pot_pos)[0]
    cells = np.sort(pots[:, 1] * env.width + pots[:, 0])
    status = objects[..., 2].reshape(games, -1)[:, cells].astype(np.int8)
    places = np.asarray(state.agent_pos)
    cooks = np.stack(
        [places[..., 1] * env.width + places[..., 0], np.asarray(state.agent_dir_idx), item_numbers(state.agent_inv)],
        -1,
    )
    return {
        "cooks": cooks.astype(np.int8),
        "counters": item_numbers(flat),
        "onions": np.minimum(EMPTY_POT - status, 3),
        "cooking": np.where(status <= FULL_POT, status, 0),
    }


def item_numbers(objects: Any) -> np.ndarray:
    """Returns palestra's item numbers for JaxMARL's object numbers, 0 for objects that are not items."""
    items = np.zeros(16, np.int8)
    items[list(ITEMS)] = list(ITEMS.values())
    return items[np.asarray(objects).astype(int)]


def observation_rows(obs: dict[str, Any]) -> np.ndarray:
    """Returns the observations of both seats as rows, uint8 [B, 2, C * 26]."""
    return np.stack([np.asarray(obs[seat]).reshape(len(obs[seat]), -1) for seat in SEATS], 1)


if __name__ == "__main__":
    write_recordings(RECORDED, {name: record(name, 16, 100, seed) for seed, name in enumerate(LAYOUTS)})
