"""Rollouts of text and tool envs: one coroutine per episode, which grows a tree if the algorithm compares siblings.

A node is one joint step: the answers of all seats that act, and the env's result. With `branch_at: turn` every joint
step is tried K times on copies of the env, and the episode continues from the best (or a random one, or all). With
`branch_at: root` K whole trajectories start at the first step. In each sibling, a seat that acts after another observes
what that one did, since the env is stepped in between. Where several seats act at once, each gives K answers, and the
siblings are their pairs, or with `joints: crossed` all combinations: siblings then share answers.

A trajectory whose next prompt does not fit into a model's context ends there, truncated, with the rewards so far. Any
other error of an env or a policy costs the branch in which it happens: this branch is lost, and its siblings play on.
If an error ends all branches, the episode fails, with message and traceback; other episodes continue. With a
`failed_reward`, a branch whose env raises ends with that reward instead. A branch whose env says that it has no
reward (`NO_REWARD_KEY`) is left out like a lost one, and did not fail.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from palestra.core.failures import ContextLengthExceeded, describe_error, exit_as_error
from palestra.core.held_calls import held_calls
from palestra.core.plain_values import plain_value
from palestra.core.seeding import derive_seed
from palestra.core.tracing import span
from palestra.core.types import NO_REWARD, Answer, Episode, Node, Seat, Step
from palestra.envs.base import ENV_THREADS, NO_REWARD_KEY, Env, require_step
from palestra.envs.step_values import SUCCESS_KEY, checked_step
from palestra.text.policies.base import Policy, Query, samples_on_cpu
from palestra.text.rollouts.metrics import CONTEXT_FULL_KEY
from palestra.text.rollouts.reward_weights import reweigh

T = TypeVar("T")
Path = tuple[int, ...]  # of a branch: the index of the sibling at each step from the root
Keep = Literal["best", "random", "epsilon", "all"]
Joints = Literal["paired", "crossed"]
MAX_JOINT_ANSWERS = 4096  # per joint step: each costs a fork and a step of the env


@dataclass(frozen=True)
class Branching:
    """Branching of a tree: how many siblings per decision, and the choice of the one that the episode continues from.

    The fields are options of algorithms. `continue_from: epsilon` takes the best, but with probability `epsilon` a
    random one. The best has the highest mixed reward of its own step, team_weight * team + local (averaged over the
    seats that acted). `joints` combines the answers of N seats that act at once: first with first, second with second
    ("paired"), or every one with every other ("crossed"), which makes K^N siblings from the same N * K answers, K being
    `group_size`.
    """

    branch_at: Literal["root", "turn"] = "root"
    group_size: int = 1
    continue_from: Keep = "all"
    epsilon: float = 0.0
    team_weight: float = 1.0
    joints: Joints = "paired"

    def width(self, depth: int) -> int:
        """Returns the number of siblings at `depth`."""
        return self.group_size if self.branch_at == "turn" or depth == 0 else 1

    def joint_indices(self, k: int, seats: Sequence[Seat]) -> list[tuple[int, ...]]:
        """Returns, for each sibling, the index of each seat's answer among its `k`. Raises ValueError for more than
        4096 siblings."""
        if self.joints == "paired":
            return [(i,) * len(seats) for i in range(k)]
        if k ** len(seats) > MAX_JOINT_ANSWERS:
            raise ValueError(
                f"group_size: {k} answers of each of {len(seats)} seats ({', '.join(seats)}) make {k ** len(seats)} "
                f"crossed joint answers, more than the limit of {MAX_JOINT_ANSWERS}: lower group_size, or pair the "
                "answers (joints: paired)"
            )
        return list(itertools.product(range(k), repeat=len(seats)))

    def score(self, node: Node) -> float:
        """Returns the mixed reward of a node, averaged over the seats that acted."""
        return sum(node.reward(seat, self.team_weight) for seat in node.answers) / len(node.answers)

    def pick(self, siblings: Sequence[Node], rng: random.Random) -> list[Node]:
        """Returns the siblings that the episode continues from, in order."""
        if self.branch_at == "root" or self.continue_from == "all" or len(siblings) == 1:
            return list(siblings)
        is_epsilon = self.continue_from == "epsilon"
        at_random = self.continue_from == "random" or (is_epsilon and rng.random() < self.epsilon)
        return [rng.choice(siblings) if at_random else max(siblings, key=self.score)]


@dataclass(frozen=True)
class EpisodeSpec:
    """One episode to play: the env's instance, the policy of each seat, the seed of everything the policies sample,
    weights of named terms of its rewards, and the team's reward of a step in which the env fails (None: none)."""

    instance: int
    policies: Mapping[Seat, Policy]
    seed: int
    term_weights: Mapping[str, float] = field(default_factory=dict)
    failed_reward: float | None = None


class NoReward(Exception):
    """Ends a branch whose env gave it no reward."""

    def __str__(self) -> str:
        return NO_REWARD


@dataclass
class Branch:
    """The end of a growing branch: its env, the last step result, and each seat's earlier turns.

    Random draws depend on `path` alone, not on which branch finishes first.
    """

    env: Env
    step: Step
    parent: int | None = None
    path: Path = ()
    history: Mapping[Seat, tuple[tuple[Any, Answer], ...]] = field(default_factory=dict)


class EpisodeRunner:
    """Plays episodes of one kind of env. `max_concurrent` is the maximum number of concurrent episodes; a trajectory
    that has not ended after `max_steps` joint steps makes a failed episode. With `hold_calls`, env calls that wait are
    held (held_calls.py) if this process samples for a seat on a CPU, so that episodes do not depend on how long an env
    takes. Elsewhere they depend on time anyhow."""

    def __init__(
        self,
        make_env: Callable[[], Env],
        name: str,
        *,
        max_concurrent: int = 1024,
        max_steps: int = 1000,
        hold_calls: bool = True,
    ) -> None:
        self.make_env = make_env
        self.name = name
        self.max_concurrent = max_concurrent
        self.max_steps = max_steps
        self.hold_calls = hold_calls

    async def play_all(
        self, specs: Sequence[EpisodeSpec], branching: Branching, on_episode: Callable[[Episode], None] | None = None
    ) -> list[Episode]:
        """Returns the episodes of `specs`, in order; calls `on_episode` with each one when it ends."""
        gate = asyncio.Semaphore(self.max_concurrent)

        async def one(spec: EpisodeSpec) -> Episode:
            async with gate:
                with span("episode", env=self.name, instance=spec.instance) as own:
                    episode = await self.play(spec, branching)
                    if own and episode.error:
                        own.set_attribute("error", episode.error)
            if on_episode:
                on_episode(episode)
            return episode

        return list(await asyncio.gather(*(one(spec) for spec in specs)))

    async def play(self, spec: EpisodeSpec, branching: Branching) -> Episode:
        """Returns one episode. Exceptions of its env or policies that end all branches are recorded in `error` and
        `traceback`."""
        seats = {seat: policy.name for seat, policy in spec.policies.items()}
        episode = Episode(self.name, spec.instance, seats)
        hold_calls = self.hold_calls and any(map(samples_on_cpu, spec.policies.values()))
        growth = _TreeRollout(episode, spec, branching, self.max_steps, hold_calls)
        try:
            env = growth.register_env(self.make_env())
            episode.picture = env.picture
            try:
                first = require_step(await growth.call(env, env.reset, spec.instance), "reset")
            except Exception:  # re-raised, also if the env cannot say its instance
                with suppress(Exception):
                    episode.instance = await growth.instance_of(env)
                raise
            episode.instance = await growth.instance_of(env)
            first = growth.check_step(env, first)
            if first.pays and not first.done:
                raise ValueError(f'env "{_name(env)}" pays in reset, before anybody acted: pay in the first step')
            await growth.start(env, first)
        except NoReward as error:
            growth.lose((), error)
        except Exception as error:  # the rollout boundary: failures are recorded, not raised
            episode.error, episode.traceback = describe_error(error)
        finally:  # also if the task is cancelled
            await growth.end()
        return episode


@dataclass
class _TreeRollout:
    """The tree of one episode during its rollout."""

    episode: Episode
    spec: EpisodeSpec
    branching: Branching
    max_steps: int
    hold_calls: bool
    paths: list[Path] = field(default_factory=list)  # one per node of the episode
    open_envs: dict[int, Env] = field(default_factory=dict)  # by identity
    tracebacks: dict[Path, str] = field(default_factory=dict)  # of the errors that ended branches

    async def start(self, env: Env, first: Step) -> None:
        """Plays the episode from the result of `reset`; one that is over already becomes a node without answers."""
        if first.done:
            self._add_node(Branch(env, first), (), {}, first, env)
        await self.grow(Branch(env, first))

    async def grow(self, branch: Branch) -> None:
        """Plays from `branch` to the end; if the episode continues from several siblings, from all of them
        concurrently. Raises the error of the first branch if all are lost."""
        while not branch.step.done:
            if len(branch.path) >= self.max_steps:
                raise ValueError(
                    f'env "{_name(branch.env)}" has not ended after {self.max_steps} joint steps: '
                    "give it a limit, or raise max_joint_steps"
                )
            children = await self._branch(branch)
            if not children:
                break
            rng = random.Random(self._seed("pick", branch))
            picked = self.branching.pick([node for node, _ in children], rng)
            for node, child in children:
                node.chosen = any(node is p for p in picked)
                if not node.chosen:
                    await self._close_branch(child)
            kept = [child for node, child in children if node.chosen]
            if len(kept) > 1:
                return _raise_if_all(await _run_together(self._grow_or_lose(child) for child in kept))
            branch = kept[0]
        await self._close(branch.env)

    async def _grow_or_lose(self, branch: Branch) -> Exception | None:
        """Plays from `branch` to the end; returns the error if the branch is lost."""
        try:
            await self.grow(branch)
        except Exception as error:
            self.lose(branch.path, error)
            await self._close_branch(branch)
            return error
        return None

    def lose(self, path: Path, error: Exception) -> None:
        """Marks the nodes from `path` on as lost."""
        message, self.tracebacks[path] = (NO_REWARD, "") if isinstance(error, NoReward) else describe_error(error)
        for node, own in zip(self.episode.nodes, self.paths, strict=True):
            if own[: len(path)] == path:
                node.error = node.error or message
                node.done = False
                node.chosen = False

    async def _close_branch(self, branch: Branch) -> None:
        """Closes the env of a branch, unless it is closed; an error costs the branch."""
        try:
            if id(branch.env) in self.open_envs:
                await self._close(branch.env)
        except Exception as error:
            self.lose(branch.path, error)

    async def end(self) -> None:
        """Closes envs that a failure left open, and numbers the nodes by depth, then from left to right."""
        for env in list(self.open_envs.values()):
            try:
                await self._close(env)
            except Exception as error:
                if self.episode.error is None and not self.tracebacks:  # else it is an env of a lost branch
                    self.episode.error, self.episode.traceback = describe_error(error)
        if self.episode.error is None:
            first = [self.tracebacks[path] for path in sorted(self.tracebacks) if self.tracebacks[path]]
            self.episode.traceback = next(iter(first), None)
        nodes = self.episode.nodes
        order = sorted(range(len(nodes)), key=lambda i: (len(self.paths[i]), self.paths[i]))
        place = {old: new for new, old in enumerate(order)}
        for node in nodes:
            node.id = place[node.id]
            node.parent = None if node.parent is None else place[node.parent]
        nodes.sort(key=lambda node: node.id)

    def register_env(self, env: Env) -> Env:
        self.open_envs[id(env)] = env
        return env

    async def _close(self, env: Env) -> None:
        del self.open_envs[id(env)]
        await self.call(env, env.close)

    async def _ask_all(self, branch: Branch, k: int) -> dict[Seat, list[Answer]]:
        """Returns `k` answers of each seat that acts; none, and ends `branch`, if a seat's prompt is too long."""
        asked = {seat: self._ask(branch, seat, k) for seat in branch.step.observations}
        try:
            return dict(zip(asked, await _run_together(asked.values()), strict=True))
        except ContextLengthExceeded:
            if branch.parent is None:  # not even the first prompt fits
                raise
            last = self.episode.nodes[branch.parent]
            last.done = last.truncated = True
            last.info = last.info | {CONTEXT_FULL_KEY: True}
            return {}

    async def _branch(self, branch: Branch) -> list[tuple[Node, Branch]]:
        """Returns the siblings that answer the observations of `branch` and are not lost, each with the branch that it
        starts; none if `branch` ends because a prompt is too long. Raises the first error if all are lost."""
        k = self.branching.width(len(branch.path))
        joined = self.branching.joint_indices(k, list(branch.step.observations))
        answers = await self._ask_all(branch, k)
        if not answers:
            return []
        joints = []
        for which in joined:
            joints.append({seat: own[i] for (seat, own), i in zip(answers.items(), which, strict=True)})
        envs = [*[await self._copy(branch.env) for _ in joined[1:]], branch.env]  # the last sibling has the original
        siblings = enumerate(zip(joints, envs, strict=True))
        played = await _run_together(self._play_sibling(branch, (*branch.path, i), *own) for i, own in siblings)
        _raise_if_all([own if isinstance(own, Exception) else None for own in played])
        return [own for own in played if not isinstance(own, Exception)]

    async def _copy(self, env: Env) -> Env | Exception:
        try:
            twin = await self.call(env, env.fork)
            if twin is env:
                raise ValueError("fork() returned the env itself: return a copy, such as copy.deepcopy(self)")
            return self.register_env(twin)
        except Exception as error:
            return error

    async def _play_sibling(
        self, branch: Branch, path: Path, joint: dict[Seat, Answer], env: Env | Exception
    ) -> tuple[Node, Branch] | Exception:
        """Returns the node of a joint answer and the branch that it starts, or the error if that branch is lost;
        `env` is its copy of the env, or the error of the copy."""
        if isinstance(env, Exception):
            self._add_node(branch, path, joint, Step({}), branch.env)
            self.lose(path, env)
            return env
        try:
            step = self.check_step(env, await self._advance(env, joint))
            self._check_last_success(branch, step)
        except Exception as error:
            paid = None if isinstance(error, NoReward) else self.spec.failed_reward
            node, child = self._add_node(branch, path, joint, Step({}, team_reward=paid or 0.0), env)
            self.lose(path, error)
            if paid is None:
                await self._close_branch(child)
                return error
            node.done = node.chosen = True
            return node, child
        return self._add_node(branch, path, joint, step, env)

    def check_step(self, env: Env, step: Step) -> Step:
        """Returns a step as it is played on and stored. Raises ValueError for what an env must not give, and
        `NoReward`."""
        seats = {**dict.fromkeys(env.seats), **self.spec.policies}
        step = checked_step(step, _name(env), seats)
        if step.info.get(NO_REWARD_KEY):
            raise NoReward
        return reweigh(step, self.spec.term_weights)

    def _check_last_success(self, branch: Branch, step: Step) -> None:
        """Raises ValueError if an earlier step of the trajectory reports a success and its last one does not."""
        if branch.parent is None or not step.done or step.info.get(SUCCESS_KEY) is not None:
            return
        earlier = self.episode.trajectory(self.episode.nodes[branch.parent])
        if any(node.info.get(SUCCESS_KEY) is not None for node in earlier):
            raise ValueError(
                f'env "{_name(branch.env)}" reports a success in an earlier step and none in its last, which counts: '
                f'put info["{SUCCESS_KEY}"] there'
            )

    async def _ask(self, branch: Branch, seat: Seat, k: int) -> list[Answer]:
        if seat not in self.spec.policies:
            raise ValueError(_missing_policy_error(branch.env, self.episode.env, seat))
        expert = getattr(branch.env, "expert", None)
        query = Query(
            role=branch.env.roles.get(seat, ""),
            observation=branch.step.observations[seat],
            n=k,
            seed=self._seed(seat, branch),
            history=branch.history.get(seat, ()),
            legal_actions=(branch.step.legal_actions or {}).get(seat),
            expert=partial(expert, seat) if expert else None,
        )
        return await self.spec.policies[seat].act(query)

    def _add_node(
        self, branch: Branch, path: Path, joint: dict[Seat, Answer], step: Step, env: Env
    ) -> tuple[Node, Branch]:
        """Adds the node of a joint answer; returns it and the branch that it starts."""
        node = Node(
            id=len(self.episode.nodes),
            parent=branch.parent,
            depth=len(branch.path),
            observations=branch.step.observations,
            answers=joint,
            rewards=dict(step.rewards),
            team_reward=step.team_reward,
            done=step.done,
            truncated=step.truncated,
            info=step.info,
        )
        self.episode.nodes.append(node)
        self.paths.append(path)
        history = dict(branch.history)
        for seat, answer in joint.items():
            history[seat] = (*history.get(seat, ()), (branch.step.observations[seat], answer))
        return node, Branch(env, step, node.id, path, history)

    async def call(self, env: Env, method: Callable[..., Any], *arguments: Any) -> Any:
        """Returns `method(*arguments)`, run on a thread for blocking envs, and awaited if the method is a coroutine."""
        with exit_as_error():
            result = _call_on_thread(method, *arguments) if env.blocking else method(*arguments)
            if not inspect.isawaitable(result):
                return result
            return await held_calls().hold(result) if self.hold_calls else await result

    async def instance_of(self, env: Env) -> Any:
        """Returns what identifies the instance. Raises ValueError if it cannot be compared by its hash, or is an
        object, which is equal to itself alone."""
        seed = self.spec.instance
        instance = await self.call(env, env.instance_of, seed)
        try:
            hash(instance)
            plain_value(instance)
            if instance != instance:
                raise ValueError("NaN equals nothing")
        except (TypeError, ValueError):
            raise ValueError(
                f'instance_of of env "{_name(env)}" returned a {type(instance).__name__} for seed {seed}: return a '
                "number, a text, or a tuple of such"
            ) from None
        return instance

    async def _advance(self, env: Env, joint: dict[Seat, Answer]) -> Step:
        actions = joint if env.takes_answers else {seat: answer.text for seat, answer in joint.items()}
        return require_step(await self.call(env, env.step, dict(actions)), "step")

    def _seed(self, what: str, branch: Branch) -> int:
        return derive_seed(self.spec.seed, what, branch.path)


def _name(env: Env) -> str:
    return env.name or type(env).__name__


def _missing_policy_error(env: Env, name: str, seat: Seat) -> str:
    if seat in env.seats:
        return f'env "{name}" asks seat "{seat}", which has no policy: add one'
    return (
        f'env "{_name(env)}" asks seat "{seat}", and its seats are {", ".join(env.seats)}: add it '
        "to `seats` of the env's class, or correct the observations that name it"
    )


def _raise_if_all(errors: Sequence[Exception | None]) -> None:
    """Raises the first error if none of the branches is without one."""
    failed = [error for error in errors if error is not None]
    if len(failed) == len(errors):
        raise next((error for error in failed if not isinstance(error, NoReward)), failed[0])


async def _run_together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results of calls that run concurrently, in order. If one fails, cancels the others and raises its
    error when they have ended, so that none still uses an env that is then closed."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _call_on_thread(method: Callable[..., Any], *arguments: Any) -> Any:
    """Returns `method(*arguments)`. If the task is cancelled, waits until the method has returned, since a thread
    cannot be stopped and its env is closed next; a second cancellation does not wait."""
    call = ENV_THREADS.submit(method, *arguments)
    try:
        return await asyncio.wrap_future(call)
    except asyncio.CancelledError:
        if not call.cancel():
            await asyncio.wait([asyncio.wrap_future(call)])
        raise
