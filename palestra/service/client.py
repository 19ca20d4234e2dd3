"""The other end of the wire: a server's models as learners and policies, so that a config trains there as it does here.

    engines = connect("http://127.0.0.1:8000")
    palestra train configs/demo.yaml --engine http://127.0.0.1:8000

Only what official servers know is used, in the newest of their dialects; what they do not know (an entropy bonus,
uploaded adapters) is asked of a palestra server alone. Requests carry sequence numbers, so that one sent again after a
broken connection is answered, not run twice.
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
    """A server in place of `setup.Engines`: learners and frozen policies that live there."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._samplers: dict[str, RemoteSampler] = {}

    def check(self, loss: Callable, options: Mapping[str, Any], policies: Mapping[str, Any]) -> None:
        """Raises ValueError for a loss that cannot be trained on the server, or one of policies that sample otherwise
        than they train."""
        agreed(self.connection, loss, options)
        for name, policy in policies.items():
            if isinstance(policy, LoraPolicyConfig) and policy.sampling.temperature != 1:
                raise ValueError(f"policies.{name}.sampling.temperature must be 1: servers train at temperature 1")

    def learner(
        self, name: str, config: LoraPolicyConfig | FullPolicyConfig, seed: int, *, critic: bool = False
    ) -> LanguageLearner:
        if critic:
            raise ValueError(NO_CRITIC)
        if isinstance(config, FullPolicyConfig):
            raise ValueError(f"policies.{name} is a full model, and servers train adapters: set type: lora")
        weights = RemoteWeights(self.connection, config, seed=seed)
        return LanguageLearner(name, config, weights, self._sampler(config.base), tokenizer_of(config.base))

    def frozen(self, name: str, config: SpeechConfig) -> LanguagePolicy:
        """The bare base, or the adapter that was saved at `config.path`, which is uploaded."""
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
        """Where the server keeps the adapter in `folder`: uploads it."""
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
        """Servers keep no state between batches that could be seen in what they sample."""


def connect(url: str, key: str | None = None) -> RemoteEngines:
    """Learners and policies on the server at `url`. `key` is by default TINKER_API_KEY or MINT_API_KEY."""
    return RemoteEngines(Connection(url, key))


def tokenizer_of(base: str) -> Any:
    """The tokenizer of a base that this machine has or can fetch."""
    return AutoTokenizer.from_pretrained(resolve_base(base))
