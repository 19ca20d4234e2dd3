"""Loads each base model once, and builds learners, frozen policies and samplers on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.core.accel.devices import resolve_device
from palestra.core.losses import LossFunction
from palestra.engine.bases.fsdp import shard_engine
from palestra.engine.bases.model import Engine
from palestra.engine.cache.kv_cache import budget_bytes
from palestra.engine.conversation.rendering import with_chat_template
from palestra.engine.conversation.report import conversation_notes
from palestra.engine.lora.adapters import Adapter, target_names
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.training.checkpoints import load_full_model
from palestra.engine.training.peft_format import load_adapter, note_other_base, remapped_targets
from palestra.parallel.process_group import SINGLE_PROCESS, ProcessGroup
from palestra.parallel.torch_group import join_process_group
from palestra.text.config import TextConfig
from palestra.text.learners.lm import CriticKind, LanguageLearner, build_weights
from palestra.text.learners.lm_config import FullPolicyConfig, LMPolicyConfig, LoraPolicyConfig, autocast_dtype
from palestra.text.learners.separate_critic import SeparateCriticWeights
from palestra.text.policies.lm import LanguagePolicy, SamplerProtocol
from palestra.text.policy_configs import FrozenConfig
from palestra.text.rollouts.rank_split import RankSplit
from palestra.text.samplers.config import SamplerProcessesConfig, SamplerServersConfig
from palestra.text.samplers.remote_samplers import RemoteSamplers

if TYPE_CHECKING:
    from palestra.text.tinker.client import RemoteEngines


class Engines:
    """Loaded base models by name and dtype, each loaded once and shared by the policies that use it.

    With `sampler`, adapters and bare bases are sampled by other processes or servers. `max_num_seqs` is the maximum
    number of rows of a sampler per client, `kv_cache_gib` the memory of its KV cache in GiB (None: half of the free
    memory); `sharded` shards the models over the ranks of `group` (FSDP2).
    """

    def __init__(
        self,
        device: str,
        max_num_seqs: int,
        sampler: SamplerServersConfig | SamplerProcessesConfig | None = None,
        ranks: ProcessGroup = SINGLE_PROCESS,
        *,
        sharded: bool = False,
        kv_cache_gib: float | None = None,
    ) -> None:
        self.device = device
        self.max_num_seqs = max_num_seqs
        self.ranks = ranks
        self.sharded = sharded
        self.kv_cache_gib = kv_cache_gib
        self.remote_samplers = RemoteSamplers(sampler) if sampler else None
        self._shared: dict[tuple[str, str, str | None, bool], tuple[Engine, SamplerProtocol]] = {}
        self.loaded_engines: list[Engine] = []
        self._samplers: list[SamplerProtocol] = []
        self._lines: list[str] = []  # on the conversations of bases

    def shared_engine(self, config: LMPolicyConfig) -> tuple[Engine, SamplerProtocol]:
        """Returns the shared engine and sampler of the base, dtype and sampling that `config` asks for; loads them on
        first use."""
        key = (config.base, config.dtype, config.quantize, config.long_context)
        if key not in self._shared:
            self._shared[key] = self._apart(config) if self.remote_samplers else self.load_own_engine(config)
        self._note(config, self._shared[key][0])
        return self._shared[key]

    def _note(self, config: LMPolicyConfig, engine: Engine) -> None:
        """Notes how the base's conversations differ from its chat template. Raises ValueError if policies that share
        the base have different templates: their answers would end with different tokens."""
        template = with_chat_template(engine.tokenizer, config.chat_template).chat_template
        if template != engine.tokenizer.chat_template:
            raise ValueError(
                f"policies with the base {config.base} share it, and have different chat_template: give all the same"
            )
        self._lines += conversation_notes(config.base, engine.tokenizer, config.chat_template_kwargs)
        if isinstance(config, LoraPolicyConfig) and config.use_dora:
            names = target_names(engine.linear_layers, config.target_modules)
            if remapped := remapped_targets({"target_modules": names}, engine.model):
                self._lines.append(
                    f"{config.base}: peft would give DoRA of {remapped[0]} (of {len(remapped)} such layers) to the "
                    "experts, so it will not be published; without use_dora it is"
                )

    def load_own_engine(self, config: LMPolicyConfig) -> tuple[Engine, SamplerProtocol]:
        """Loads a separate copy of the base, sampled in this process."""
        engine = self._load_engine(config)
        engine.tokenizer = with_chat_template(engine.tokenizer, config.chat_template)
        self._note(config, engine)
        cache_bytes = budget_bytes(self.kv_cache_gib)
        self._samplers.append(Sampler(engine, max_num_seqs=self.max_num_seqs, cache_bytes=cache_bytes))
        return engine, self._samplers[-1]

    def _apart(self, config: LMPolicyConfig) -> tuple[Engine, SamplerProtocol]:
        """Loads a base to train in this process, sampled by remote samplers."""
        assert self.remote_samplers is not None
        for key, set_to, why in (
            ("quantize", config.quantize, "with unquantized weights"),
            ("chat_template", config.chat_template is not None, "and end their answers by the base's own template"),
            ("long_context", config.long_context, "and choose LongRoPE's factors themselves"),
        ):
            if set_to:
                raise ValueError(
                    f"{key} is for bases in this process, and with sampler: other processes answer, {why}: leave one "
                    "of them out"
                )
        wait_for_sampler = self.remote_samplers.open(
            config.base,
            dtype=config.dtype,
            device=self.device,
            max_num_seqs=self.max_num_seqs,
            kv_cache_gib=self.kv_cache_gib,
        )
        engine = self._load_engine(config)  # sampler processes start at the same time
        self._samplers.append(wait_for_sampler())
        return engine, self._samplers[-1]

    def _load_engine(self, config: LMPolicyConfig) -> Engine:
        """Loads a base. With `dtype: auto`, a full policy is loaded in float32, since all its weights are trained."""
        device = resolve_device(self.device)
        train = isinstance(config, FullPolicyConfig)
        dtype = config.dtype
        if dtype == "auto":
            dtype = "float32" if train or device == "cpu" else "bfloat16"
        # loaded on the CPU and sharded on the way to the device, which need not have room for the whole model
        place = "cpu" if self.sharded else device
        engine = Engine.load(
            config.base, device=place, dtype=dtype, quantize=config.quantize, long_context=config.long_context
        )
        mixed = autocast_dtype(config, device) if isinstance(config, FullPolicyConfig) else None
        if self.sharded:
            shard_engine(engine, self.ranks, device, train=train, autocast_dtype=mixed)
        elif mixed:
            engine.autocast_dtype = mixed
            engine.dtype = mixed
        self.loaded_engines.append(engine)
        return engine

    def notes(self) -> list[str]:
        """Returns lines that tell the user how the bases run, for example on the plain path."""
        lines = list(chain.from_iterable(engine.notes() for engine in self.loaded_engines))
        return list(dict.fromkeys([*lines, *self._lines]))

    def rank_split(self) -> RankSplit | None:
        """Returns the split of episodes over ranks; None if there is one rank and no weights need a cast for
        rollouts."""
        if self.ranks.world_size == 1 and not any(engine.autocast_dtype for engine in self.loaded_engines):
            return None
        return RankSplit(self.ranks, self.rollout_context)

    @contextlib.contextmanager
    def rollout_context(self) -> Iterator[None]:
        """Context of a rollout: gathers and casts the weights of all loaded engines once (see
        `Engine.rollout_context`)."""
        with contextlib.ExitStack() as stack:
            for engine in self.loaded_engines:
                stack.enter_context(engine.rollout_context())
            yield

    def check_supported(
        self,
        loss: LossFunction,
        options: Mapping[str, Any],
        policies: Mapping[str, Any],
        eval_sampling: Mapping[str, Any] | None = None,
    ) -> None:
        """Accepts every loss and policy. The same method of `RemoteEngines` raises, since a server trains only some."""

    def build_learner(
        self,
        name: str,
        config: LoraPolicyConfig | FullPolicyConfig,
        seed: int,
        critic: CriticKind = "none",
    ) -> LanguageLearner:
        """Returns a new learner for policy `name`, with its critic. Raises ValueError for a full model
        with remote samplers: only adapters are sent to them."""
        full = isinstance(config, FullPolicyConfig)
        if full and self.remote_samplers:
            raise ValueError(
                f"policies.{name} is a full model, and only adapters can be sent to other samplers: set type: lora, or "
                "leave sampler: out"
            )
        engine, sampler = self.load_own_engine(config) if full else self.shared_engine(config)
        self._note_base(name, config, engine)
        weights = (
            SeparateCriticWeights(config, engine, seed=seed, group=self.ranks)
            if critic == "separate"
            else build_weights(config, engine, seed=seed, critic=critic == "shared", group=self.ranks)
        )
        self._agree(name, config, weights.adapter, engine, sampler)
        return LanguageLearner(name, config, weights, sampler, engine.tokenizer)

    def build_frozen_policy(self, name: str, config: FrozenConfig) -> LanguagePolicy:
        """Returns a policy that does not learn: the bare base, or the adapter or model saved at `config.path`."""
        folder = Path(config.path) if config.path else None
        adapter = None
        if folder and not (folder / "adapter_config.json").exists():
            if config.quantize:
                raise ValueError(
                    f"policies.{name}: quantize is for a base, and {folder} holds a full model that would replace its "
                    "weights: set base to that folder and leave path out"
                )
            engine, sampler = self.load_own_engine(config)
            load_full_model(folder, engine)
        else:
            engine, sampler = self.shared_engine(config)
            self._note_base(name, config, engine)
            adapter = load_adapter(folder, engine) if folder else None
            self._agree(name, config, adapter, engine, sampler)
        encoder = config.encoder(engine.tokenizer)
        snapshot = adapter.snapshot(name, engine.dtype) if adapter else None
        return LanguagePolicy(name, sampler, encoder, config.sampling, snapshot, **config.prompt_options)

    def _note_base(self, name: str, config: LMPolicyConfig, engine: Engine) -> None:
        """Notes for the user that the adapter with which a policy starts names another base."""
        path = getattr(config, "path", None)
        if path and (note := note_other_base(Path(path), engine.name)):
            self._lines.append(f"policies.{name}: {note}")

    def _agree(
        self, name: str, config: LMPolicyConfig, adapter: Adapter | None, engine: Engine, sampler: SamplerProtocol
    ) -> None:
        """Checks that a remote sampler and the local trainer compute the same log-probabilities."""
        if self.remote_samplers:
            self.remote_samplers.register_policy(
                name, adapter.config if adapter else None, config.sampling, engine, sampler
            )

    def clear_caches(self) -> None:
        """Clears the samplers' caches; called before each rollout, since its result must not depend on earlier steps:
        with cached keys and values, sums may differ in their last bits from those that a resumed run computes."""
        for sampler in self._samplers:
            sampler.clear_cache()


def build_engines(config: TextConfig) -> Engines | RemoteEngines:
    """Returns a client of the server at `config.engine`, or local engines for this process and its torchrun ranks.

    Raises ValueError if torchrun is combined with `engine`, `staleness` or `sampler`, or if the packages for a server
    are missing.
    """
    ranks = join_process_group()
    if ranks.world_size > 1 and (config.engine or config.staleness or config.sampler):
        raise ValueError(
            "torchrun divides each step among its processes, which staleness: above 0, engine: and sampler: do not "
            "allow. Start palestra train without torchrun, or leave these out"
        )
    if config.engine is None:
        sharded = config.parallel == "fsdp" and ranks.world_size > 1
        return Engines(
            config.device, config.max_num_seqs, config.sampler, ranks, sharded=sharded, kv_cache_gib=config.kv_cache_gib
        )
    try:
        from palestra.text.tinker.client import connect
    except ImportError as error:
        raise ValueError(
            f"training on a server needs more packages ({error}): pip install 'palestra[service]'"
        ) from error
    return connect(config.engine)
