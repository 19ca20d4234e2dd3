"""Trained agents on disk: in a run's checkpoint, in a population, or in a published folder.

An agent is a folder of weights with its text settings: base, role, sampling, chat template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from palestra.api.agents.model_files import check_model_files
from palestra.core.config import StrictModel, Tree, load, validate
from palestra.core.failures import one_line
from palestra.core.files import DamagedFile, path_inside, read_json
from palestra.envs import is_vector_config, make_env
from palestra.evaluation.target import find_checkpoint
from palestra.populations.scheduler import MEMBERS_DIR, member_folders
from palestra.populations.task_json import read_members, read_records
from palestra.runs import Checkpoint, find_run
from palestra.runs.checkpoints import TASKS_FILE
from palestra.runs.settings import CONFIG_FILE, check_run_folder
from palestra.text.build.build import seat_policies
from palestra.text.build.engines import Engines
from palestra.text.config import TextConfig
from palestra.text.policies.lm import LanguagePolicy
from palestra.text.policy_configs import FrozenConfig

AGENT_FILE = "palestra.json"  # in a published folder: name, version, role and text settings
LM_SETTINGS = (
    "base",
    "sampling",
    "system",
    "history",
    "context",
    "chat_template",
    "chat_template_kwargs",
    "history_thoughts",
    "dtype",
    "quantize",
    "long_context",
)
M = TypeVar("M", bound=StrictModel)
WeightsKind = Literal["adapter", "model", "network"]


class AgentFacts(StrictModel):
    """The contents of the `AGENT_FILE` file."""

    name: str
    """Name of the agent."""
    version: int = 0
    """Number of updates."""
    role: str = ""
    """The role text that its env gave it."""
    speech: dict[str, Any] = {}
    """The `LM_SETTINGS` settings that it was trained with."""


class AdapterFacts(StrictModel):
    """What palestra reads in PEFT's adapter_config.json."""

    base_model_name_or_path: str = ""
    """Name of the base."""
    r: int = 8
    """Rank of the adapter."""
    rank_pattern: dict[str, int] | None = None
    """Ranks of layers with another one."""


@dataclass(frozen=True)
class TrainedAgent:
    """A trained agent: its weights and how to prompt it."""

    name: str
    """Name of the policy or member."""
    version: int
    """Number of updates."""
    folder: Path
    """Folder of the weights."""
    kind: WeightsKind
    """LoRA adapter, whole language model, or network for vectorised games."""
    lm_settings: dict[str, Any] = field(default_factory=dict)
    """The `LM_SETTINGS` settings that it was trained with; {} for a network."""
    role: str = ""
    """The role text that its env gave it."""
    run: Path | None = None
    """The run that trained it; None for a published folder."""
    step: int | None = None
    """Training steps before the checkpoint; None if unknown."""

    @property
    def versioned_name(self) -> str:
        """`name@version`."""
        return f"{self.name}@{self.version}"

    def metadata(self) -> dict[str, Any]:
        """Returns the contents of the `AGENT_FILE` file."""
        return {"name": self.name, "version": self.version, "role": self.role, "speech": self.lm_settings}


def find_agents(path: Path, names: Sequence[str] = (), step: int | None = None) -> list[TrainedAgent]:
    """Returns the agents called `names` (empty: all) of a run, from the checkpoint after `step` steps (None: the
    newest), or the agent in a published folder. Raises ValueError if there are none, and DamagedFile as `find_run` and
    `open_published` do."""
    if not path.exists():
        raise ValueError(f"there is no run and no published agent at {path}")
    if path.is_dir() and not (path / CONFIG_FILE).exists():
        agent = open_published(path)
        if step is not None or any(name != agent.name for name in names):
            raise ValueError(
                f"{path} is a published agent, {agent.name}, of one version: leave out --member and --checkpoint, or "
                "name the run"
            )
        return [agent]
    tree = load(find_run(path) / CONFIG_FILE)
    agents = _members(path, tree, names) if "population" in tree else _policies(path, tree, step)
    if unknown := [name for name in names if name not in agents]:
        raise ValueError(f'{path} has no trained agent "{unknown[0]}"; it has: {", ".join(agents) or "none"}')
    if not agents:
        raise ValueError(f"{path} has no trained agent yet: it needs a checkpoint; `palestra runs` lists them")
    return [agents[name] for name in names or agents]


def load_policy(agent: TrainedAgent, engines: Engines) -> LanguagePolicy:
    """Returns the agent as a policy that samples. Raises ValueError for a network, which does not generate text."""
    if agent.kind == "network":
        raise ValueError(f"{agent.name} is a network that plays a vectorised game: it cannot answer messages")
    speech = agent.lm_settings
    path: str | None = str(agent.folder)
    if agent.kind == "model" and agent.run is None:  # a published model is its own base
        speech = speech | {"base": str(agent.folder.resolve())}
        path = None
    config = validate(FrozenConfig, speech | {"path": path})
    try:
        return engines.build_frozen_policy(agent.versioned_name, config)
    except (ValueError, MemoryError, ConnectionError):
        raise
    except Exception as error:  # transformers raises exceptions of any kind for files that are not a model's
        why = one_line(error)
        raise DamagedFile(f"the weights of {agent.versioned_name} in {agent.folder} cannot be loaded: {why}") from error


def open_published(folder: Path) -> TrainedAgent:
    """Returns the agent in a folder that `palestra publish` or PEFT wrote, which somebody else may have made.

    Raises DamagedFile if the folder holds a link that leads out of it, a pipe or a device, if a file is not what its
    name says, or if rendering its chat template takes too long.
    """
    check_run_folder(folder)
    check_model_files(folder)
    kind = weights_kind(folder)
    facts = AgentFacts(name=folder.resolve().name)
    if (folder / AGENT_FILE).exists():
        facts = _read_facts(AgentFacts, folder / AGENT_FILE)
    elif kind == "adapter":  # PEFT's own folder
        speech = {"base": read_adapter_config(folder).base_model_name_or_path}
        facts = AgentFacts(name=facts.name, speech=speech)
    base = str(facts.speech.get("base", ""))
    if base and Path(base).expanduser().is_dir():  # also without "./": transformers looks there before the hub
        check_model_files(Path(base).expanduser())
    return TrainedAgent(facts.name, facts.version, folder, kind, facts.speech, facts.role)


def read_adapter_config(folder: Path) -> AdapterFacts:
    """Returns the settings that palestra reads in adapter_config.json. Raises DamagedFile if one is of another kind."""
    return _read_facts(AdapterFacts, folder / "adapter_config.json")


def _read_facts(model: type[M], path: Path) -> M:
    tree = read_json(path, dict)
    try:
        return validate(model, {key: value for key, value in tree.items() if key in model.model_fields})
    except ValueError as error:
        raise DamagedFile(f"{path} is not as it was written: {error}") from error


def weights_kind(folder: Path) -> WeightsKind:
    """Returns the kind of weights in a folder. Raises ValueError if there are none that can be published."""
    if (folder / "adapter_config.json").exists():
        return "adapter"
    if (folder / "config.json").exists():
        return "model"
    if (folder / "policy.safetensors").exists():
        return "network"
    raise ValueError(
        f"{folder} holds neither an adapter (adapter_config.json), nor a model (config.json), nor a network "
        "(policy.safetensors): name a run, or a folder that `palestra publish` wrote"
    )


def _policies(path: Path, tree: Tree, step: int | None) -> dict[str, TrainedAgent]:
    """Returns the policies that a run trains, by name."""
    checkpoint = find_checkpoint(path, step)
    folders = {name: checkpoint.path / folder for name, folder in checkpoint.names.items()}
    if is_vector_config(tree):
        return {name: _agent(name, folder, path, checkpoint) for name, folder in folders.items()}
    config = validate(TextConfig, tree)
    roles = _roles(config)
    policies = config.policies_at(checkpoint.step)
    return {
        name: _agent(
            name, folder, path, checkpoint, _speech(policies[name].model_dump(mode="json")), roles.get(name, "")
        )
        for name, folder in folders.items()
    }


def _agent(
    name: str, folder: Path, run: Path, checkpoint: Checkpoint | None, speech: Tree | None = None, role: str = ""
) -> TrainedAgent:
    version = read_json(folder / "member.json", dict).get("version", 0)
    if not isinstance(version, int):
        raise DamagedFile(f"{folder / 'member.json'}: version is not a number; bring it back from a copy")
    after = checkpoint.step + 1 if checkpoint else None
    return TrainedAgent(name, version, folder, weights_kind(folder), speech or {}, role, run, after)


def _members(path: Path, tree: Tree, wanted: Sequence[str]) -> dict[str, TrainedAgent]:
    """Returns the frozen members of a population that have weights. Raises DamagedFile if those of `wanted` (empty: of
    any) are not as they were written."""
    members = read_members(path)
    records = read_records(path / TASKS_FILE)
    done = {record.task.output_member for record in records} - {""}
    names = [member.name for member in members] or sorted(done)
    paths = {name: path_inside(path / MEMBERS_DIR, name) for name in names}
    stored = {member.name for member in members if member.weights} or done
    member_folders(path, records, [name for name in names if name in stored and (name in wanted or not wanted)])
    players = {member.name: member.player for member in members}
    speech = _lm_settings(tree)
    roles: dict[str, str] = {}
    if speech:
        roles = dict(make_env(**tree["env"]).roles)
    anybody = next(iter(roles.values()), "")  # for a population that plays every seat
    return {
        name: _agent(name, folder, path, None, speech, roles.get(players.get(name, ""), anybody))
        for name, folder in paths.items()
        if (folder / "member.json").exists()
    }


def _lm_settings(tree: Tree) -> Tree:
    """Returns the text settings of a population's language agents; {} for networks."""
    oracle = tree.get("oracle") or {}
    if oracle.get("type") != "language":
        return {}
    return _speech(oracle.get("policy") or {})


def _speech(policy: Tree) -> Tree:
    return {key: value for key, value in policy.items() if key in LM_SETTINGS}


def _roles(config: TextConfig) -> dict[str, str]:
    """Returns, by policy, the env's role text of the first seat it plays."""
    roles: dict[str, str] = {}
    if not config.named_envs:
        return roles
    env_roles = {seat: role for env in config.named_envs.values() for seat, role in make_env(**env).roles.items()}
    for seat, name in seat_policies(config).items():
        roles.setdefault(name, env_roles.get(seat, ""))
    return roles
