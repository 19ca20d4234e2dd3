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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from palestra.engine.models import resolve_base
from palestra.learners.lm import FullPolicyConfig, LanguageLearner, LoraPolicyConfig, SpeechConfig
from palestra.policies.lm import ChatEncoder, LanguagePolicy
from palestra.service.connection import Connection
from palestra.service.remote_sampler import RemoteSampler, RemoteSnapshot, opened
from palestra.service.remote_weights import NO_CRITIC, RemoteWeights, agreed


class RemoteEngines:
    """Replacement of `setup.Engines` whose learners and frozen policies run on a server."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._samplers: dict[str, RemoteSampler] = {}

    def check(self, loss: Callable, options: Mapping[str, Any], policies: Mapping[str, Any]) -> None:
        """Raises ValueError if the server cannot train the loss, or if a policy's sampling temperature is not 1."""
        agreed(self.connection, loss, options)
        for name, policy in policies.items():
            if isinstance(policy, LoraPolicyConfig) and policy.sampling.temperature != 1:
                raise ValueError(f"policies.{name}.sampling.temperature must be 1: servers train at temperature 1")

    def learner(
        self, name: str, config: LoraPolicyConfig | FullPolicyConfig, seed: int, *, critic: bool = False
    ) -> LanguageLearner:
        """Returns a learner whose adapter is trained on the server. Raises ValueError if a critic or a full model is
        requested."""
        if critic:
            raise ValueError(NO_CRITIC)
        if isinstance(config, FullPolicyConfig):
            raise ValueError(f"policies.{name} is a full model, and servers train adapters: set type: lora")
        weights = RemoteWeights(self.connection, config, seed=seed)
        return LanguageLearner(name, config, weights, self._sampler(config.base), tokenizer_of(config.base))

    def frozen(self, name: str, config: SpeechConfig) -> LanguagePolicy:
        """Returns a policy of the bare base, or of the adapter saved at `config.path`, which is uploaded."""
        adapter, path = None, getattr(config, "path", None)
        if path:
            adapter = RemoteSnapshot(opened(self.connection, model_path=self._kept(Path(path))), name)
        encoder = ChatEncoder(tokenizer_of(config.base), config.template)
        return LanguagePolicy(
            name,
            self._sampler(config.base),
            encoder,
            config.sampling,
            adapter,
            system=config.system,
            memory=config.memory,
        )

    def _kept(self, folder: Path) -> str:
        """Uploads the adapter in `folder` and returns its path on the server."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                archive.add(folder / file, file)
        return self.connection.now(self.connection.upload(packed.getvalue()))

    def _sampler(self, base: str) -> RemoteSampler:
        if base not in self._samplers:
            self._samplers[base] = RemoteSampler(self.connection, opened(self.connection, base_model=base))
        return self._samplers[base]

    def forget(self) -> None:
        """No-op: servers keep no state between batches that affects what they sample."""


def connect(url: str, key: str | None = None) -> RemoteEngines:
    """Returns learners and policies on the server at `url`. `key` defaults to TINKER_API_KEY, then MINT_API_KEY. Raises
    ConnectionError if the server does not answer and ValueError if it refuses the session."""
    return RemoteEngines(Connection(url, key))


def tokenizer_of(base: str) -> Any:
    """Returns the tokenizer of a base model that is on this machine or can be downloaded."""
    return AutoTokenizer.from_pretrained(resolve_base(base))
