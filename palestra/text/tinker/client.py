"""Client of a training server: its models as learners and policies, so that a config trains remotely as it does
locally.

    engines = connect("http://127.0.0.1:8000")
    palestra train configs/demo.yaml --engine http://127.0.0.1:8000

The client uses only what official servers support, in the newest dialect of the wire; extensions (an entropy bonus,
uploaded adapters) are requested from palestra servers only. Requests carry sequence numbers, so that a request repeated
after a connection failure is answered and not run twice.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.core.losses import LossFunction
from palestra.engine.bases.names import tokenizer_of
from palestra.engine.conversation.report import conversation_notes
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.parallel.process_group import SINGLE_PROCESS
from palestra.text.learners.lm import CriticKind, LanguageLearner
from palestra.text.learners.lm_config import FullPolicyConfig, LMPolicyConfig, LoraPolicyConfig
from palestra.text.policies.lm import LanguagePolicy
from palestra.text.tinker.connection import ServiceConnection
from palestra.text.tinker.remote_sampler import RemoteSampler, RemoteSnapshot, create_sampler, wire_stop
from palestra.text.tinker.remote_weights import NO_CRITIC, RemoteWeights, supported_wire_loss


class RemoteEngines:
    """Replacement of `builders.engines.Engines` whose learners and frozen policies run on a server."""

    ranks = SINGLE_PROCESS

    def __init__(self, connection: ServiceConnection) -> None:
        self.connection = connection
        self._samplers: dict[str, RemoteSampler] = {}
        self._lines: list[str] = []  # on the conversations of bases

    def rank_split(self) -> None:
        """Returns None: torchrun does not train on a server."""

    def check_supported(
        self,
        loss: LossFunction,
        options: Mapping[str, Any],
        policies: Mapping[str, Any],
        eval_sampling: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises ValueError if the server cannot train the loss, if a policy's sampling temperature is not 1, or it
        keeps sampling masks or has a chat template of its own, or if the stop conditions of training, or of
        evaluations, cannot be sent."""
        supported_wire_loss(self.connection, loss, options)
        for name, policy in policies.items():
            if isinstance(policy, LMPolicyConfig):
                _check_stops(name, policy.sampling, eval_sampling or {})
            if isinstance(policy, LMPolicyConfig) and policy.chat_template is not None:
                raise ValueError(
                    f"policies.{name}.chat_template: with engine: the server ends answers by the base's own template: "
                    "leave one of them out"
                )
            if isinstance(policy, LoraPolicyConfig) and policy.sampling.temperature != 1:
                raise ValueError(f"policies.{name}.sampling.temperature must be 1: servers train at temperature 1")
            if isinstance(policy, LoraPolicyConfig) and policy.sampling.thinking_token_budget is not None:
                raise ValueError(
                    f"policies.{name}.sampling.thinking_token_budget: the protocol of servers has no field for tokens "
                    "that were not sampled: leave it out, or train without engine:"
                )
            if isinstance(policy, LoraPolicyConfig) and policy.sampling.records_mask:
                raise ValueError(
                    f"policies.{name}.sampling keeps only some tokens in training (legal_only, keep_sampling_mask), "
                    "and the protocol of servers has no field for them: set legal_only: false, top_p: 1.0 and "
                    "top_k: 0, or train without engine:"
                )

    def build_learner(
        self,
        name: str,
        config: LoraPolicyConfig | FullPolicyConfig,
        seed: int,
        critic: CriticKind = "none",
    ) -> LanguageLearner:
        """Returns a learner whose adapter is trained on the server. Raises ValueError if a critic or a full model is
        requested."""
        if critic != "none":
            raise ValueError(NO_CRITIC)
        if isinstance(config, FullPolicyConfig):
            raise ValueError(f"policies.{name} is a full model, and servers train adapters: set type: lora")
        if config.path:
            raise ValueError(
                f"policies.{name}.path: with engine: an adapter starts on the server, and a saved one is read in this "
                "process: leave one of them out"
            )
        weights = RemoteWeights(self.connection, config, seed=seed)
        return LanguageLearner(name, config, weights, self._sampler(config.base), self._tokenizer(config))

    def build_frozen_policy(self, name: str, config: LMPolicyConfig) -> LanguagePolicy:
        """Returns a policy of the bare base, or of the adapter saved at `config.path`, which is uploaded. Raises
        ValueError if its stop conditions cannot be sent."""
        wire_stop(config.sampling, f"policies.{name}.sampling")
        adapter = None
        path = getattr(config, "path", None)
        if path:
            adapter = RemoteSnapshot(create_sampler(self.connection, model_path=self._upload_adapter(Path(path))), name)
        encoder = config.encoder(self._tokenizer(config))
        sampler = self._sampler(config.base)
        return LanguagePolicy(name, sampler, encoder, config.sampling, adapter, **config.prompt_options)

    def _tokenizer(self, config: LMPolicyConfig) -> Any:
        """Returns the tokenizer of a base; notes how its conversations differ from its chat template."""
        tokenizer = tokenizer_of(config.base)
        self._lines += conversation_notes(config.base, tokenizer, config.chat_template_kwargs)
        return tokenizer

    def notes(self) -> list[str]:
        """Returns lines on where conversations of the bases differ from their chat templates."""
        return list(dict.fromkeys(self._lines))

    def _upload_adapter(self, folder: Path) -> str:
        """Uploads the adapter in `folder` and returns its path on the server."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                archive.add(folder / file, file)
        return self.connection.run(self.connection.upload(packed.getvalue()))

    def _sampler(self, base: str) -> RemoteSampler:
        if base not in self._samplers:
            self._samplers[base] = RemoteSampler(self.connection, create_sampler(self.connection, base_model=base))
        return self._samplers[base]

    def clear_caches(self) -> None:
        """No-op: servers keep no state between batches that affects what they sample."""


def _check_stops(name: str, sampling: SamplingConfig, changes: Mapping[str, Any]) -> None:
    wire_stop(sampling, f"policies.{name}.sampling")
    changed = SamplingConfig.model_validate({**sampling.model_dump(), **changes})
    wire_stop(changed, f"policies.{name}.sampling with eval_sampling")


def connect(url: str, key: str | None = None) -> RemoteEngines:
    """Returns learners and policies on the server at `url`. `key` defaults to TINKER_API_KEY, then MINT_API_KEY. Raises
    ConnectionError if the server does not answer and ValueError if it refuses the session."""
    return RemoteEngines(ServiceConnection(url, key))
