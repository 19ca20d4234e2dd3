"""Wrapper of environments of `verifiers` (Prime Intellect, `verifiers.v1`): each of its agents is a seat.

verifiers runs an episode itself and calls models over HTTP. An episode is therefore an agent program
(`palestra.envs.adapters.workflow`): the agents' requests are observations, the policies' answers are the replies,
and the rewards recorded on its traces are the rewards.
"""

from __future__ import annotations

import itertools
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from statistics import fmean
from typing import Any, ClassVar, Literal

try:
    import verifiers.v1 as vf
    from verifiers.v1.clients.base import build_async_httpx
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.task import task_key
    from verifiers.v1.utils.loaders import load_environment, load_taskset, resolve_env_config
except ImportError as error:
    raise ImportError(f"{error}; verifiers is an extra: pip install 'palestra[verifiers]'") from error

from palestra.core.types import Seat
from palestra.envs.adapters.workflow import Workflow, WorkflowContext, WorkflowResult
from palestra.envs.reward_terms import Terms, total_rewards
from palestra.envs.support.options import check_range
from palestra.envs.support.splits import Split, split_of_text

DIRECT = "palestra_direct"
sys.modules[f"verifiers.v1.harnesses.{DIRECT}"] = sys.modules[__name__]  # verifiers imports harnesses from this path
__all__ = ["Direct", "Verifiers"]  # verifiers uses the only harness listed in `__all__`


class DirectConfig(vf.HarnessConfig):
    """Config of the `Direct` harness."""

    id: str = DIRECT


class Direct(vf.Harness[DirectConfig]):
    """Harness without a program or tools: each turn is one chat completion, requested from this process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(message_to_wire, prompt))
        messages = ([{"role": "system", "content": system}] if system else []) + asked
        async with build_async_httpx(vf.EvalClientConfig()) as client:
            key = {"Authorization": f"Bearer {secret}"}
            body = {"model": ctx.model, "messages": messages}
            reply = await client.post(f"{endpoint}/chat/completions", json=body, headers=key)
        return vf.ProgramResult(exit_code=int(reply.is_error), stdout="", stderr=reply.text if reply.is_error else "")


class Verifiers(Workflow):
    """Tasks of the taskset `taskset`, played by its env or by `env` ("best-of-n", ...); ids are those of verifiers.

    `config` is the rest of verifiers' env block, including roles (`{"solver": {"max_turns": 4}}`). A role with a
    `model` there is not a seat: verifiers calls that model. `harness: direct` calls the seats' models from this
    process, without tools or files; `own` runs the programs and runtimes named by the env and `config` (verifiers then
    needs `uv`, or a container).

    Rewards are paid at the end: each seat's is the mean reward of its traces, whose terms are the taskset's reward
    functions. An episode is a success if the mean over seats is at least `success`. Tasks are drawn from the taskset's
    first `tasks`; a task's split depends on its content. An episode that verifiers reports as failed raises, and is
    recorded as failed. `timeout` and `settle` are those of `Workflow`.

    Raises ValueError if verifiers cannot make the taskset, no agent is left as a seat, or no task is in `split`.
    """

    name: ClassVar[str] = "verifiers"

    def __init__(  # noqa: PLR0913 - a parameter for each option
        self,
        *,
        taskset: str,
        env: str = "",
        config: dict[str, Any] | None = None,
        harness: Literal["direct", "own"] = "direct",
        tasks: int = 1000,
        split: Split | Literal["all"] = "train",
        success: float = 1.0,
        timeout: float = 60.0,
        settle: float = 0.0,
    ) -> None:
        check_range("tasks", tasks, 1, 1_000_000)
        block = _block(taskset, env, config or {})
        roles = {role: agent for role, agent in agent_config_fields(block).items() if agent.model is None}
        if not roles:
            raise ValueError(f"taskset: every agent of {taskset} has a model of its own in config; leave one without")
        if harness == "direct":
            box = vf.SubprocessConfig()
            roles = {r: a.model_copy(update={"harness": DirectConfig(), "runtime": box}) for r, a in roles.items()}
        self.tasks = _tasks(block, tasks, split)
        options = {"env": block.model_copy(update=roles), "tasks": self.tasks, "success": success}
        program = f"{__name__}:play_episode"
        env_split: Split = "train" if split == "all" else split
        super().__init__(
            seats=list(roles), function=program, split=env_split, timeout=timeout, settle=settle, options=options
        )

    def instance_of(self, seed: int) -> int:
        return seed % len(self.tasks)


async def play_episode(play: WorkflowContext) -> WorkflowResult:
    """Plays one verifiers episode on the task of the seed. Raises RuntimeError if verifiers reports a failure."""
    tasks = play.options["tasks"]
    block = play.options["env"]
    with _key_in_environment(play.api_key) as variable:
        client = vf.EvalClientConfig(base_url=play.base_url, api_key_var=variable)
        models = {"model": None, "client": client}
        roles = {seat: getattr(block, seat).model_copy(update=models | {"model": seat}) for seat in play.seats}
        env = load_environment(block.model_copy(update=roles))
        async with env.serving():
            context = vf.ModelContext(model=play.seats[0], client=client)
            episode = await env.run_episode(tasks[play.seed % len(tasks)], context)
    return _score(episode, play.seats, play.options["success"])


def _score(episode: Any, seats: tuple[Seat, ...], success: float) -> WorkflowResult:
    errors = [*episode.errors, *chain.from_iterable(trace.errors for trace in episode.traces)]
    if not episode.ok:
        why = "; ".join(f"{error.type}: {error.message}" for error in errors) or "it does not say why"
        raise RuntimeError(f"verifiers reports this episode as failed: {why}")
    earned: dict[Seat, list[Terms]] = {}
    for trace in episode.traces:
        terms = {name: float(reward.value) for name, reward in trace.rewards.items() if reward is not None}
        earned.setdefault(trace.agent.name, []).append(terms)
    rewards = {seat: _mean_terms(earned[seat]) for seat in seats if seat in earned}
    metrics = {name: value for trace in episode.traces for name, value in trace.metrics.items() if value is not None}
    good = bool(rewards) and fmean(total_rewards(rewards).values()) >= success
    return WorkflowResult(rewards, success=good, info={"metrics": metrics} if metrics else {})


def _mean_terms(terms: Sequence[Terms]) -> dict[str, float]:
    """Returns the mean of each term over a seat's traces; one without the term counts as 0."""
    names = dict.fromkeys(chain.from_iterable(terms))
    return {name: fmean(trace_terms.get(name, 0.0) for trace_terms in terms) for name in names}


@contextmanager
def _key_in_environment(key: str) -> Iterator[str]:
    """Yields the name of an environment variable that holds the key: verifiers reads keys only from there.

    The name ensures that verifiers does not pass it to the programs that it starts.
    """
    variable = f"PALESTRA_API_KEY_{uuid.uuid4().hex}"
    os.environ[variable] = key
    try:
        yield variable
    finally:
        del os.environ[variable]


def _block(taskset: str, env: str, config: Mapping[str, Any]) -> vf.EnvConfig:
    """Returns verifiers' env block. Raises ValueError if the taskset, env or an option is unknown."""
    taskset_config = config.get("taskset", {})
    try:
        return resolve_env_config({**config, "id": env, "taskset": {**taskset_config, "id": taskset}})
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        named = f"{taskset}, env {env}" if env else taskset
        raise ValueError(f"verifiers cannot make taskset {named}: {error}") from error


def _tasks(block: vf.EnvConfig, most: int, split: str) -> list[Any]:
    tasks = list(itertools.islice(load_taskset(block.taskset), most))
    of_split = [task for task in tasks if split in ("all", split_of_text(_content(task)))]
    if not of_split:
        raise ValueError(
            f'none of the {len(tasks)} tasks of {block.taskset.id} is in split "{split}": set split: all, or more tasks'
        )
    return of_split


def _content(task: Any) -> str:
    """Returns the content of a task as text, independent of its index in the set."""
    return f"verifiers {task_key(task.data.model_dump(mode='json', exclude_none=True, exclude={'idx'}))}"
