"""Trained agents in a script: `load_agent("runs/demo").act(observation)`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from palestra.api.agents.export import export_network
from palestra.api.agents.serve import ServedAgent
from palestra.api.agents.trained_agent import TrainedAgent, find_agents
from palestra.api.trained_run import TrainedRun
from palestra.core.config import Tree, validate
from palestra.core.event_loop import call_outside_loop
from palestra.core.http.calls import SAMPLING_KEYS, ChatCall, parse_conversation
from palestra.core.types import Seat
from palestra.envs import VectorEnv
from palestra.envs.adapters.gymnasium import without_action_mask
from palestra.envs.batch.subproc_vector import PackageVectorEnv
from palestra.envs.batch.sync_vector import SyncVectorEnv, clip_actions, to_action_mask
from palestra.envs.vector_base import Discrete, empty_step
from palestra.evaluation.target import load_target
from palestra.populations.task_json import read_members
from palestra.text.build.engines import Engines
from palestra.vector.build.build import policy_by_seat
from palestra.vector.build.envs import make_vector_env
from palestra.vector.config import VectorConfig
from palestra.vector.learners.policy_stack import read_frozen_member, read_policy


def load_agent(
    path: str | Path | TrainedRun,
    name: str = "",
    *,
    seat: Seat = "",
    checkpoint: int | None = None,
    greedy: bool = False,
    seed: int = 0,
    device: str = "auto",
) -> LanguageAgent | NetworkAgent:
    """Returns a trained agent that acts in a script: of a run, of a population, or in a published folder.

    `name` is the policy or member ("": the only one), `checkpoint` the training steps before the checkpoint (None: the
    newest). `greedy` takes the most probable token or action instead of sampling with `seed`. Language agents run on
    `device`. A network plays `seat` ("": the first that its policy has), and runs on the CPU.

    Raises ValueError if there is no such agent, or several and no name.
    """
    names = [name] if name else []
    where = path.path if isinstance(path, TrainedRun) else Path(path)
    found = find_agents(where, names, checkpoint)
    if len(found) > 1:
        raise ValueError(f"{where} has several agents: name one of {', '.join(agent.name for agent in found)}")
    (agent,) = found
    if agent.kind == "network":
        return NetworkAgent(agent, seat, greedy, seed)
    if seat:
        raise ValueError(f"{agent.name} is a language agent, whose seat is told by its messages: leave out seat")
    return LanguageAgent(agent, device, greedy, seed)


class LanguageAgent:
    """A trained language agent. It is prompted as in training: with its role, its chat template and its sampling."""

    def __init__(self, agent: TrainedAgent, device: str, greedy: bool, seed: int) -> None:
        self.name = agent.name
        self._served = ServedAgent(agent, Engines(device, max_num_seqs=1))
        self._settings: dict[str, Any] = {}
        if greedy:
            self._settings["temperature"] = 0.0
        self._seeds = np.random.default_rng(seed)

    def act(
        self, messages: str | Sequence[Mapping[str, Any]], legal_actions: Sequence[str] = (), **sampling: Any
    ) -> str:
        """Returns the agent's answer to an observation, or to a conversation of messages, without its thought.

        With `legal_actions` the answer is one of these, which no `stop` cuts; an agent that chose among them in
        training needs them (`sampling.legal_only`). `sampling` has the settings of chat completions, such as
        `temperature`, `max_tokens`, `stop` and `seed`. Raises ValueError for other settings, and for a conversation
        that is too long.
        """
        if unknown := set(sampling) - set(SAMPLING_KEYS):
            raise ValueError(f"act takes no setting {min(unknown)!r}: it takes {', '.join(sorted(SAMPLING_KEYS))}")
        if isinstance(legal_actions, str):
            raise ValueError(f"legal_actions is a list of actions, not a text such as {legal_actions[:40]!r}")
        legal_actions = [str(action) for action in legal_actions]
        if self._served.is_legal_only and not legal_actions:
            raise ValueError(
                f"{self.name} chose among legal actions in training (sampling.legal_only): give act the legal_actions "
                "of this observation"
            )
        if not messages:
            raise ValueError(f"there is nothing that {self.name} could answer: give a text, or messages")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        chat = parse_conversation([dict(turn) if isinstance(turn, Mapping) else turn for turn in messages])
        settings = {"seed": int(self._seeds.integers(2**63)), **self._settings, **sampling}
        call = ChatCall(self.name, chat, settings)
        return call_outside_loop(lambda: asyncio.run(self._served.answer(call, legal_actions))).text


class NetworkAgent:
    """A trained network at one seat of its env. A recurrent network remembers the game: `reset` begins a new one."""

    def __init__(self, agent: TrainedAgent, seat: Seat, greedy: bool, seed: int) -> None:
        self.name = agent.name
        if agent.run is None:
            raise ValueError(f"{agent.folder} does not say which env its network plays: load the run that trained it")
        tree = load_target(agent.run)
        env = make_vector_env({key: value for key, value in tree["env"].items() if key != "num_processes"}, 1)
        try:
            self.seat = seat or _seat_of(agent.name, agent.run, tree, env)
            if self.seat not in env.seats:
                raise ValueError(f'no seat "{seat}": env "{env.label}" has {", ".join(env.seats)}')
            self._column = env.seats.index(self.seat)
            self._player = read_policy(agent.folder, env, [self._column], best=greedy)
            self._member, _ = read_frozen_member(agent.folder, env, [self._column])
            self._num_seats = len(env.seats)
            self._seat_shape = env.observation_shapes[self._column]
            self._space = env.action_spaces[self._column]
            first = env.reset(np.zeros(1, np.int64))
            self._shape = first.obs.shape[2:]
            self._dtype = first.obs.dtype
            self._num_actions: int | None = None
            if first.action_mask is not None and isinstance(self._space, Discrete):
                self._num_actions = first.action_mask.shape[-1]
            self._game = _find_converter(env)
        finally:
            env.close()
        if self._player.net.plays_team:
            raise ValueError(f"{agent.name} plays a whole team at once, not the seat {self.seat}: use palestra eval")
        self._player.reset_rng(seed)
        self.reset()

    def reset(self) -> None:
        """Begins a new game: a recurrent network forgets what it saw."""
        self._state: Any = None
        self._num_games = 0

    def act(self, obs: Any, action_mask: Any = None) -> Any:
        """Returns the action for an observation, as the env's own `step` takes it.

        An observation is what the seat sees in the env: a value of its PettingZoo or Gymnasium space (a dictionary may
        have the `action_mask`), or an array of palestra's own envs. Arrays [B, ...] are B games at once, and the
        actions are a list then. `action_mask` [A] or [B, A] is true for legal actions (None: all are). Continuous
        actions are clipped to their bounds, as in training.

        Raises ValueError for another shape, for an observation that is not finite, for a mask without a legal action,
        and for another number of games than before without `reset`.
        """
        if isinstance(obs, dict) and "action_mask" in obs:
            if action_mask is not None:
                raise ValueError("the observation has an action_mask, and another one is given: leave one out")
            action_mask, obs = obs["action_mask"], without_action_mask(obs)
        if self._game is not None:
            obs = self._game.obs_encoders[self._column].encode(obs)
        rows = np.asarray(obs)
        is_single = rows.ndim == len(self._seat_shape)
        if is_single:
            rows = rows[None]
        if rows.shape[1:] != tuple(self._seat_shape):
            shape = tuple(self._seat_shape)
            raise ValueError(f"{self.name} observes arrays of shape {shape} (or several: [B, ...]), not {rows.shape}")
        if not np.isfinite(rows).all():
            raise ValueError(f"an observation of {self.name} is not finite")
        actions = self._actions(rows, action_mask)
        return actions[0] if is_single else actions

    def export(self, path: str | Path) -> None:
        """Writes the network as an ONNX model, which takes the greedy actions of any number of games B.

        Its inputs are `obs` [B, ...], with a memory `state` [B, units] (zeros at the start of a game), and in an env
        with masks `action_mask` [B, A] bool; its outputs are `action`, counted from 0 or continuous and not clipped,
        the network's `outputs` (logits, or means and log-deviations), and `new_state`. Needs `palestra[onnx]`.

        Raises ValueError if `path` does not end in .onnx, if torch cannot express the network in ONNX, or if
        onnxruntime finds other actions than the network in random games; then nothing is written.
        """
        export_network(self._member, np.zeros(self._seat_shape, self._dtype), self._num_actions, Path(path))

    def _actions(self, rows: np.ndarray, action_mask: Any) -> list[Any]:
        """Returns the actions for observations [B, *shape]."""
        B = len(rows)
        if self._num_games not in (0, B):
            raise ValueError(f"{self.name} played {self._num_games} games and now observes {B}: call reset between")
        is_first = np.full(B, self._num_games == 0)
        if self._num_games == 0:
            self._state = self._player.initial_state(B)
            self._num_games = B
        step = empty_step(B, self._num_seats, self._shape, num_actions=self._num_actions, dtype=self._dtype)
        within: tuple[slice, ...] = (slice(None), *map(slice, self._seat_shape))  # other seats may observe more
        step.obs[:, self._column][within] = rows
        if action_mask is not None:
            step.action_mask = self._masks(action_mask, B)
        actions, _, self._state = self._player.act(step, self._state, is_first)
        mask = step.action_mask[:, [self._column]] if step.action_mask is not None else None
        return [self._decode(action) for action in clip_actions((self._space,), actions[:, :1], mask)[:, 0]]

    def _masks(self, action_mask: Any, num_games: int) -> np.ndarray:
        """Returns the action masks of all seats [B, N, A], of which only this agent's matters. Raises ValueError if the
        mask given is not one."""
        if self._num_actions is None or not isinstance(self._space, Discrete):
            raise ValueError(f"{self.name} was trained without action masks: leave action_mask out")
        given = np.asarray(action_mask)
        if given.shape not in ((self._space.n,), (num_games, self._space.n)):
            raise ValueError(f"{self.name} has {self._space.n} actions, but the action_mask has shape {given.shape}")
        masks = np.stack([to_action_mask(row, self._space, self.seat) for row in np.atleast_2d(given)])
        if not masks.any(-1).all():
            raise ValueError(f"an action_mask of {self.name} allows no action: is the game over?")
        whole = np.ones((num_games, self._num_seats, self._num_actions), bool)
        whole[:, self._column] = False
        whole[:, self._column, : self._space.n] = masks
        return whole

    def _decode(self, action: np.ndarray) -> Any:
        """Returns an action [...] of the network as the env takes it."""
        if self._game is not None:
            return self._game.action_decoders[self._column].decode(action)
        if isinstance(self._space, Discrete):
            return int(action)
        return action


def _find_converter(env: VectorEnv) -> Any:
    """Returns the game of PettingZoo or Gymnasium in an env; None for palestra's own envs."""
    if isinstance(env, PackageVectorEnv):
        env = env.inner
    if not isinstance(env, SyncVectorEnv) or not hasattr(env.single_envs[0], "obs_encoders"):
        return None
    return env.single_envs[0]


def _seat_of(name: str, run: Path, tree: Tree, env: VectorEnv) -> Seat:
    """Returns the first seat that a run's policy plays, or a population's member."""
    if "population" in tree:
        player = next((member.player for member in read_members(run) if member.name == name), "")
        return player if player in env.seats else env.seats[0]
    policies = policy_by_seat(validate(VectorConfig, tree), env)
    return next(seat for seat, policy in policies.items() if policy == name)
