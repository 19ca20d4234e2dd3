"""Worker for populations of language agents: every member is a LoRA adapter on one shared base.

Opponents are sampled in the same batch as the learner. In a game with rules, a member's policy is computed from the
model's token probabilities, so that payoffs and NashConv can be exact.

Shapes: `I` information states, `A` actions.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from palestra.core.config import StrictModel, validate
from palestra.core.failures import RunFailed
from palestra.core.seeding import derive_seed
from palestra.core.types import Episode, Seat
from palestra.engine.bases.indistinct_words import check_words
from palestra.engine.lora.adapters import Adapter
from palestra.engine.training.adapter_weights import AdapterWeights
from palestra.envs.remote.remote_env import make_env
from palestra.envs.text.board_games import TextGame
from palestra.parallel.tasks import Result, Task
from palestra.populations.population import Mix, Player, Sides
from palestra.populations.tasks import PlayResult, PlayTask, TrainResult, TrainTask
from palestra.populations.workers.action_reader import LMActionReader
from palestra.populations.workers.exact import ExactSolver
from palestra.populations.workers.game_results import (
    check_cells,
    mean_return,
    opponent_results,
    payoff_cell,
    returns_by_side,
)
from palestra.populations.workers.member_loader import UNIFORM_MEMBER
from palestra.text.algorithms.grpo import GRPO
from palestra.text.algorithms.sft import SFT
from palestra.text.build.build import make_episode_runner
from palestra.text.build.engines import Engines
from palestra.text.learners.lm import LanguageLearner
from palestra.text.learners.lm_config import LoraPolicyConfig
from palestra.text.policies.base import Policy
from palestra.text.policies.lm import DemonstrationPolicy, LanguagePolicy
from palestra.text.policies.scripted import RandomPolicy
from palestra.text.policy_configs import FrozenConfig
from palestra.text.rollouts.metrics import member_name
from palestra.text.rollouts.tree_rollout import Branching, EpisodeSpec
from palestra.text.training.update import update_learner

RESULT_START = 0.8  # share of a response's steps after which its games count in the result
SELF_PLAY_NAME = "itself"  # name of the learner's own copy as an opponent


class LanguageOracle(StrictModel):
    """Best responses trained by reinforcement learning, as LoRA adapters in a text env."""

    type: Literal["language"] = "language"
    env: dict[str, Any]
    """The env, as at the top of the config."""
    policy: LoraPolicyConfig = LoraPolicyConfig()
    """The adapter, its base and its sampling."""
    algorithm: GRPO = GRPO(branch_at="root", scale="none")
    """The algorithm that trains responses."""
    steps: int = Field(30, ge=1)
    """Training steps of a response, if the plan gives none."""
    episodes: int = Field(32, ge=1, le=1_000_000)
    """Episodes of each step."""
    imitation_steps: int = Field(40, ge=0)
    """Supervised steps that teach the adapter, before all responses, to answer with legal actions: it imitates
    random players whose action probabilities depend on the observation. Responses with `fresh` weights start from this
    adapter. 0: none."""
    imitation_lr: float | None = Field(None, gt=0, le=1_000_000)
    """Learning rate of `imitation_steps`, which is constant. Null: the rate of `policy`. A base that has to learn the
    form of an answer needs a far larger rate than responses do: in a response all answers push the weights in one
    direction, in which Adam's first steps are full ones."""
    imitation_odds: float = Field(10.0, ge=1)
    """The largest odds between two actions of these random players, which makes their play depend on the observation.
    1: all actions are equally likely. Higher odds teach the adapter to distinguish observations."""
    greedy: bool = False
    """Frozen members sample at temperature 0 instead of `policy.sampling.temperature`."""
    payoffs: Literal["simulated", "exact"] = "simulated"
    """`simulated`: payoffs are measured in games. `exact`: computed from action probabilities, without games; needs an
    env with rules."""
    device: str = "auto"
    """Device of the base: `auto`, `cpu`, `cuda`, ..."""
    max_num_seqs: int = Field(512, ge=1)
    """Largest number of sequences that are sampled at once."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """Memory of the sampler's KV cache in GiB. Sequences beyond it wait, or pause and continue later. Null: half of the
    memory that is free when the model is loaded."""


class LanguageWorker:
    """Worker that trains and plays LoRA agents.

    All randomness follows from `seed` and the task's name. Raises ValueError if payoffs are to be exact and the env has
    no rules.
    """

    def __init__(self, config: LanguageOracle, sides: Sides, seed: int = 0) -> None:
        self.config = config
        self.seed = seed
        self.episode_runner = make_episode_runner(config.env, "population")
        env = make_env(**config.env)
        self.env_seats: tuple[Seat, ...] = env.seats
        self.sides = sides
        self.engines = Engines(config.device, config.max_num_seqs, kv_cache_gib=config.kv_cache_gib)
        self.game = env if isinstance(env, TextGame) else None
        self.action_reader = LMActionReader(self.game) if self.game and self.game.is_tabular else None
        self.exact: ExactSolver | None = None
        if self.action_reader and sides.are_seats:
            self.exact = ExactSolver(self.action_reader.tree, sides)
        if config.payoffs == "exact" and self.exact is None:
            raise ValueError(
                f'env "{config.env.get("type")}" has no rules, which payoffs: exact needs: set payoffs: simulated'
            )
        self._frozen: dict[str, Policy] = {UNIFORM_MEMBER: RandomPolicy(name=UNIFORM_MEMBER)}
        self._taught: LanguageLearner | None = None

    def run_task(self, task: Task, members: Mapping[str, Path], out: Path | None) -> Result:
        """Runs a task. Raises ValueError if it does not fit the env."""
        if isinstance(task, TrainTask) and out is not None:
            return asyncio.run(self._train(task, members, out))
        if isinstance(task, PlayTask) and self.config.payoffs == "simulated":
            return asyncio.run(self._play(task, members))
        if self.exact is None:
            raise ValueError(
                f'task {task.name} ({task.kind}) needs the rules of env "{self.config.env.get("type")}", which has '
                "none here: use simulated payoffs, and no assessment (nash_conv_every: 0)"
            )
        return self.exact.run_task(task, lambda name: self.action_probabilities(name, members), None)

    def action_probabilities(self, name: str, members: Mapping[str, Path]) -> np.ndarray:
        """Returns a member's action probabilities in an env with rules, float64 [I, A]."""
        assert self.action_reader is not None
        return self.action_reader.policy(name, self._member(name, members))

    # ---- learning

    async def _train(self, task: TrainTask, members: Mapping[str, Path], out: Path) -> TrainResult:
        learner = await self._learner(task, members)
        assigner = LMSeatAssigner(self, task, members, learner)
        steps = task.train_steps or self.config.steps
        metrics: Mapping[str, float] = {}
        count = self.config.episodes
        for step in range(steps):
            self.engines.clear_caches()
            specs = [
                assigner.assign(derive_seed(self.seed, task.name, i), i)
                for i in range(step * count, (step + 1) * count)
            ]
            episodes = await self.episode_runner.play_all(specs, self.config.algorithm.branching)
            _sound(episodes)
            metrics = await update_learner(self.config.algorithm, learner, episodes, step / steps)
            assigner.env_steps += sum(len(episode.nodes) for episode in episodes)
            if step >= int(RESULT_START * steps):
                assigner.record(episodes)
        learner.save(out)
        return assigner.result(metrics)

    async def _learner(self, task: TrainTask, members: Mapping[str, Path]) -> LanguageLearner:
        """Returns a learner that starts from the task's member, or from the taught adapter."""
        policy = self.config.policy.model_dump() | task.settings
        learner = self._new(task.output_member, validate(LoraPolicyConfig, policy))
        if task.start:
            learner.load(members[task.start])
        elif self.config.imitation_steps:
            self._taught = self._taught or await self._teach()
            _adapter(learner).copy_from(_adapter(self._taught))
        return learner

    def _new(self, name: str, config: LoraPolicyConfig) -> LanguageLearner:
        if self.game:
            engine, _ = self.engines.shared_engine(config)
            check_words(engine, self.game.told_words, self.game.action_words)
        return self.engines.build_learner(name, config, derive_seed(self.seed, "adapter", name))

    async def _teach(self) -> LanguageLearner:
        """Trains an adapter to answer with legal actions; identical in every worker of a run."""
        # imitation runs at progress 0 of the schedule, where a warm-up has rate 0
        changes = {"lr": self.config.imitation_lr or self.config.policy.lr, "warmup_ratio": 0.0}
        learner = self._new("words", self.config.policy.model_copy(update=changes))
        algorithm = SFT(imitate="all")
        teacher = RandomPolicy(odds=self.config.imitation_odds, seed=self.seed)
        count = self.config.episodes * self.config.algorithm.group_size
        for step in range(self.config.imitation_steps):
            self.engines.clear_caches()
            taught = DemonstrationPolicy(learner.policy(), teacher)
            seeds = [derive_seed(self.seed, "words", i) for i in range(step * count, (step + 1) * count)]
            specs = [EpisodeSpec(seed, dict.fromkeys(self.env_seats, taught), seed) for seed in seeds]
            await update_learner(
                algorithm, learner, await self.episode_runner.play_all(specs, algorithm.branching), 0.0
            )
        return learner

    # ---- members and games

    def _member(self, name: str, members: Mapping[str, Path]) -> Policy:
        """Returns a frozen member, loaded once; a name stands for one policy."""
        if name not in self._frozen:
            policy = self.config.policy
            sampling = policy.sampling.model_copy(update={"temperature": 0.0} if self.config.greedy else {})
            frozen = FrozenConfig.of(policy, members[name], sampling)
            self._frozen[name] = self.engines.build_frozen_policy(name, frozen)
        return self._frozen[name]

    async def _play(self, task: PlayTask, members: Mapping[str, Path]) -> PlayResult:
        """Plays all cells of a payoff table at once; members of a single population rotate over the sides."""
        check_cells(task.cells, len(self.sides.seats))
        count = task.games_per_cell
        turns = len(self.sides.seats) if self.sides.symmetric else 1
        side_of = self.sides.side_of_seat()
        self.engines.clear_caches()
        specs: list[EpisodeSpec] = []
        for number, names in enumerate(task.cells):
            policies = [self._member(name, members) for name in names]
            for i in range(count):
                by_seat = {
                    label: policies[(side_of[seat] + i % turns) % len(policies)]
                    for seat, label in enumerate(self.env_seats)
                }
                seed = derive_seed(self.seed, task.name, number, i)
                specs.append(EpisodeSpec(seed, by_seat, seed))
        episodes = await self.episode_runner.play_all(specs, Branching())
        _sound(episodes)
        results = []
        for number, names in enumerate(task.cells):
            own = episodes[number * count : (number + 1) * count]
            won = returns_by_side(np.array([branch_returns(episode)[0] for episode in own]), self.sides.seats)
            sides = (np.arange(len(names)) - np.arange(count)[:, None] % turns) % len(names)
            results.append(payoff_cell(won[np.arange(count)[:, None], sides]))
        return PlayResult(tuple(results))


class LMSeatAssigner:
    """Assigns policies to seats for the games of a `train` task, and records their results.

    The learner plays its player's side; that of a single population rotates over all sides. The other members are drawn
    once per game.
    """

    def __init__(
        self, worker: LanguageWorker, task: TrainTask, members: Mapping[str, Path], learner: LanguageLearner
    ) -> None:
        self.worker = worker
        self.task = task
        self.members = members
        self.learner = learner
        self.sides = worker.sides
        self.own_sides = [side for side, owner in enumerate(self.sides.owners) if owner == task.player]
        self.numbers: dict[str, int] = {}
        self.games: list[tuple[float, list[float], list[int]]] = []
        self.env_steps = 0

    def assign(self, seed: int, number: int) -> EpisodeSpec:
        """Returns the spec of episode `number`, which determines the side of the learner among its player's."""
        rng = random.Random(derive_seed(seed, "cast"))
        mine = self.own_sides[number % len(self.own_sides)]
        alone = rng.random() >= self.task.self_play
        names = self._draw_opponents(rng, mine) if alone else {}
        seats: dict[Seat, Policy] = {}
        for seat, label in enumerate(self.worker.env_seats):
            if seat in self.sides.seats[mine]:
                seats[label] = self.learner.policy()
            else:
                seats[label] = self.worker._member(names[seat], self.members) if alone else self._itself()
        return EpisodeSpec(seed, seats, seed)

    def _draw_opponents(self, rng: random.Random, mine: int) -> dict[int, str]:
        """Returns the name of the member at each seat of the sides that are not side `mine`."""
        names: dict[int, str] = {}
        lineup: Mapping[Player, str] = {}
        if joint := self.task.opponents.joint:
            lineup = rng.choices(joint, [one.probability for one in joint])[0].members
        for number, (player, side) in enumerate(zip(self.sides.owners, self.sides.seats, strict=True)):
            if number != mine:
                names |= dict.fromkeys(side, lineup.get(player) or _one(rng, self.task.opponents.mixes[player]))
        return names

    def _itself(self) -> LanguagePolicy:
        """Returns a copy of the current policy under another name, so that its samples are not trained on."""
        policy = copy.copy(self.learner.policy())
        policy.name = SELF_PLAY_NAME
        return policy

    def record(self, episodes: Sequence[Episode]) -> None:
        """Records the returns of the learner and of the members of the other sides."""
        sides = self.sides.seats
        for episode in episodes:
            by_seat = [member_name(episode.seats[label]) for label in self.worker.env_seats]
            names = [by_seat[side[0]] for side in sides]
            mine = names.index(self.learner.name)
            others = [side for side in range(len(names)) if side != mine]
            numbers = [self.numbers.setdefault(names[side], len(self.numbers)) for side in others]
            for won in returns_by_side(np.array(branch_returns(episode)), sides).tolist():
                self.games.append((won[mine], [won[side] for side in others], numbers))

    def result(self, metrics: Mapping[str, float]) -> TrainResult:
        """Returns the result of the training, with the `metrics` of its last step."""
        own, theirs, members = (np.array(column) for column in zip(*self.games, strict=True))
        return TrainResult(
            env_steps=self.env_steps,
            mean_return=mean_return(own),
            opponents=opponent_results(own, theirs, members, list(self.numbers)),
            metrics=dict(metrics),
        )


def branch_returns(episode: Episode) -> list[list[float]]:
    """Returns the return of each seat for every finished branch of an episode: one list per branch."""
    lines = [episode.trajectory(leaf) for leaf in episode.leaves() if leaf.chosen]
    return [[sum(node.reward(seat) for node in line) for seat in episode.seats] for line in lines]


def _adapter(learner: LanguageLearner) -> Adapter:
    """Returns the adapter in training, which is in this process."""
    assert isinstance(learner.weights, AdapterWeights) and learner.weights.adapter is not None
    return learner.weights.adapter


def _one(rng: random.Random, mix: Mix) -> str:
    return rng.choices(list(mix), list(mix.values()))[0]


def _sound(episodes: Sequence[Episode]) -> None:
    """Raises RunFailed if an episode failed: results with missing games must not pass as complete."""
    if broken := next((episode for episode in episodes if episode.error), None):
        raise RunFailed.from_traceback(f"the game of seed {broken.seed} failed: {broken.error}", broken.traceback)
