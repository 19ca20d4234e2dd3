"""`train`: a run of any kind from Python, in a script or a notebook."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from palestra.api.console import console, print_line
from palestra.api.extend import required_length_setting
from palestra.api.interrupt import STOPPING
from palestra.api.run import open_run, resumed_tree, run_request
from palestra.api.trained_run import TrainedRun
from palestra.core.config import Tree, load, override
from palestra.core.event_loop import call_outside_loop
from palestra.core.failures import RunFailed
from palestra.envs import is_vector_config
from palestra.envs.local import env_config
from palestra.evaluation.report.run_report import explain_no_update
from palestra.runs.loop import Callback, check_callbacks


@console.busy(lambda: "starting")
def train(  # noqa: PLR0913 - the parts of a config, by name
    config: str | Path | Mapping[str, Any] | BaseModel | None = None,
    *,
    env: Any = None,
    policies: Mapping[str, Any] | None = None,
    algorithm: Any = None,
    seats: Mapping[str, str] | None = None,
    evals: Mapping[str, Any] | None = None,
    steps: int | None = None,
    callbacks: Sequence[Callback] = (),
    name: str | None = None,
    root: str | Path | None = None,
    resume: str | Path | TrainedRun | None = None,
    **settings: Any,
) -> TrainedRun:
    """Trains a run of any kind with a progress bar, and returns it.

    `config` is a YAML file, a config as a mapping, or a config object; the other arguments replace parts of it, and
    without it they are the whole config. `env` is a name, {"type": ..., options}, a subclass of `Env` or `VectorEnv`,
    or a function that returns an env; a class defined in a notebook trains in this process only, and is resumed only
    while this process lives. `steps` is the length of the run: training steps of language agents, joint env steps of
    networks, iterations of PSRO. Further `settings` are keys of the config, also dotted ones:
    `train("demo.yaml", seed=1, **{"policies.planner.lr": 1e-3})`. The run's folder is made in `root` (None: runs).

    `resume` continues a run from its last checkpoint, possibly for more or fewer `steps`, or with another
    `**{"policies.planner.lr": 1e-4}`. An interrupt (Ctrl-C, or the stop
    button of a notebook) or SIGTERM ends the run after the current step with a checkpoint, as does `Callback.stop`; a
    second one raises KeyboardInterrupt. Inside a running event loop the run trains in a thread of its own. A call from
    another thread than the main one, which no signal reaches, prints that only `Callback.stop` ends the run so.

    Raises ValueError for a mistake in the config, and RunFailed if the run failed.
    """
    check_callbacks(callbacks)
    named = {"env": env, "policies": policies, "algorithm": algorithm, "seats": seats, "evals": evals}
    changes = {key: value for key, value in named.items() if value is not None} | settings
    if resume is not None:
        if config is not None or changes.keys() - settings.keys() or name or root:
            raise ValueError(
                "a resumed run keeps its config: beside resume= there are only steps=, callbacks= and the rates of its "
                'policies, **{"policies.NAME.lr": 1e-4}'
            )
        path = resume.path if isinstance(resume, TrainedRun) else Path(resume)
        tree = resumed_tree(path, [])
        new = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
        if steps is not None:
            new.append(f"{required_length_setting(tree, 'steps=')}={steps}")
        stored = None
        if new:
            tree = stored = resumed_tree(path, new)
        request = run_request(tree, resume=path, stored=stored)
    else:
        request = run_request(config_tree(config, changes, steps), name=name, root=root or "runs")

    interrupt = Callback()
    if threading.current_thread() is not threading.main_thread():
        print_line("not in the main thread: Callback.stop() ends the run with a checkpoint, Ctrl-C and SIGTERM do not")

    def request_stop() -> None:
        interrupt.stop()
        print_line(STOPPING)

    def work() -> Path:
        with open_run(request) as opened:
            done = opened.train([interrupt, *callbacks])
            path = Path(opened.run.path)
            if done and opened.kind.name != "population" and (why := explain_no_update(path)):
                raise RunFailed(why)
        if not done:
            console.print(f"stopped; resume with palestra.train(resume={str(path)!r})", soft_wrap=True)
        return path

    return TrainedRun(call_outside_loop(work, request_stop))


def config_tree(
    config: str | Path | Mapping[str, Any] | BaseModel | None, changes: Mapping[str, Any], steps: int | None
) -> Tree:
    """Returns the config tree of `config` with `changes`. Raises ValueError if there is nothing to train."""
    if config is None and not changes.keys() & {"env", "envs", "data", "stages"}:
        raise ValueError('nothing to train: give a config, train("configs/demo.yaml"), or env= and policies=')
    if isinstance(config, str | Path):
        tree: Tree = load(config)
    else:
        tree = plain_data(config or {})
    if not isinstance(tree, Mapping):
        raise ValueError(f"config is {config!r:.60}: give a YAML file, a mapping or a config object")
    plain = {key: plain_data(value) for key, value in changes.items()}
    tree |= {key: value for key, value in plain.items() if "." not in key}
    tree = override(tree, [f"{key}={json.dumps(value)}" for key, value in plain.items() if "." in key])
    if "env" in tree:
        tree["env"] = env_tree(tree["env"])
    if "envs" in tree:
        tree["envs"] = {key: env_tree(value) for key, value in tree["envs"].items()}
    _check_algorithm(tree, changes.get("algorithm"))
    return tree if steps is None else override(tree, [f"{required_length_setting(tree, 'steps=')}={steps}"])


def env_tree(env: Any) -> Tree:
    """Returns the config of an env that is given as a name, config, class or function."""
    if isinstance(env, Mapping):
        kind = env.get("type")
        return dict(env) if isinstance(kind, str | None) else {**env, **env_config(kind)}
    if isinstance(env, str):
        return {"type": env}
    return env_config(env)


def plain_data(value: Any) -> Any:
    """Returns `value` with config objects as mappings; other objects are kept. Raises ValueError for an algorithm of a
    class that its mapping does not name."""
    if inspect.isclass(value) and issubclass(value, BaseModel):
        raise ValueError(f"{value.__name__} is a class: give an object of it, {value.__name__}(...)")
    if isinstance(value, BaseModel):
        for each in (value, getattr(value, "algorithm", None)):
            _check_named(each)
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {key: plain_data(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(inner) for inner in value]
    return value


def _check_named(value: Any) -> None:
    """Raises ValueError for an object of a user's own class whose `type` is a built-in one's."""
    cls = type(value)
    kind = getattr(value, "type", "")
    if isinstance(value, BaseModel) and kind and ":" not in kind and not cls.__module__.startswith("palestra."):
        raise ValueError(
            f'{cls.__name__} is a class of yours with type "{kind}", so that a run would be of the built-in {kind}: '
            f'give it its own, type: str = "module:{cls.__name__}", by which the run and a resume find it'
        )


def _check_algorithm(tree: Tree, algorithm: Any) -> None:
    """Raises ValueError for an algorithm object of the other kind of run."""
    from palestra.text.algorithms.base import TextAlgorithm

    if not isinstance(algorithm, BaseModel) or "population" in tree:
        return
    name = type(algorithm).__name__
    vector = is_vector_config(tree)
    if vector == isinstance(algorithm, TextAlgorithm):
        ours = "vectorised envs"
        theirs = "language agents"
        if not vector:
            ours, theirs = theirs, ours
        fix = "palestra.vector has the algorithms of vectorised envs (palestra.vector.PPO)"
        raise ValueError(f"algorithm {name} is for {theirs}, and this run is of {ours}: {fix}")
