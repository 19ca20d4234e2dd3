"""Builds the remote samplers of a run from the config section `sampler:`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import chain

from palestra.engine.bases.model import Engine
from palestra.engine.lora.config import LoraConfig
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.text.policies.lm import SamplerProtocol
from palestra.text.samplers.adapter_store import AdapterStore
from palestra.text.samplers.config import SamplerProcessesConfig, SamplerServersConfig
from palestra.text.samplers.logprob_check import SampledPolicy, check_logprobs
from palestra.text.samplers.processes import SamplerProcesses
from palestra.text.samplers.vllm import RequestTimeouts, SamplerServer, VllmSampler


class RemoteSamplers:
    """The remote samplers described by `config`, one per base, and the policies that each one serves."""

    def __init__(self, config: SamplerServersConfig | SamplerProcessesConfig) -> None:
        self.config = config
        self._bases: list[str] = []
        self._claims: dict[SamplerProtocol, list[SampledPolicy]] = {}

    def open(
        self, base: str, *, dtype: str, device: str, max_num_seqs: int, kv_cache_gib: float | None = None
    ) -> PendingSampler:
        """Starts opening a sampler of `base`.

        Raises ValueError for a second base if `config` names running servers: those serve one base only.
        """
        self._bases.append(base)
        if isinstance(self.config, SamplerServersConfig) and len(self._bases) > 1:
            raise ValueError(
                f"sampler: names servers of one base, but the policies use {' and '.join(self._bases)} (or one in two "
                "dtypes): use one, or sampler: {type: processes}, which starts samplers for each"
            )
        numbers = {"max-num-seqs": max_num_seqs} | ({} if kv_cache_gib is None else {"kv-cache-gib": kv_cache_gib})
        return PendingSampler(self.config, base, dtype=dtype, device=device, numbers=numbers)

    def register_policy(
        self, name: str, lora: LoraConfig | None, sampling: SamplingConfig, engine: Engine, sampler: SamplerProtocol
    ) -> None:
        """Registers policy `name` with `sampler` and compares log-probabilities of all its policies (logprob_check.py).

        Raises ValueError if they differ by more than `config.logprob_tolerance`.
        """
        if isinstance(sampler, VllmSampler):
            claims = self._claims.setdefault(sampler, [])
            claims.append(SampledPolicy(name, lora, sampling))
            check_logprobs(sampler, engine, claims, self.config.logprob_tolerance)


class PendingSampler:
    """A sampler of `base` that is being opened: its processes start in the constructor, `wait_ready` waits for them."""

    def __init__(
        self,
        config: SamplerServersConfig | SamplerProcessesConfig,
        base: str,
        *,
        dtype: str,
        device: str,
        numbers: Mapping[str, float],
    ) -> None:
        """`numbers` are further options of `palestra serve-sampler`, for processes."""
        self.config = config
        self.adapter_store = AdapterStore(config.folder, base)
        self.processes: SamplerProcesses | None = None
        if isinstance(config, SamplerProcessesConfig):
            options = {"base": base, "dtype": dtype, "device": "cuda" if config.gpus else device}
            numbers = {"threads": config.torch_threads, **numbers}
            words = list(chain.from_iterable((f"--{name}", str(value)) for name, value in (options | numbers).items()))
            self.processes = SamplerProcesses(words, config.count, config.gpus, self.adapter_store.folder)

    def wait_ready(self) -> VllmSampler:
        """Waits for the servers and returns the sampler.

        Raises ValueError if a server is unreachable or does not start.
        """
        servers, key = self._servers()
        timeouts = RequestTimeouts(self.config.request_timeout, self.config.retry_timeout)
        sampler = VllmSampler(servers, self.adapter_store, timeouts, key, self.processes)
        sampler.connect()
        return sampler

    def _servers(self) -> tuple[list[SamplerServer], str | None]:
        if self.processes:
            made = [SamplerServer(child.wait_url(), restart=child.wait_url) for child in self.processes.children]
            return made, self.processes.key
        assert isinstance(self.config, SamplerServersConfig)
        return [SamplerServer(url, self.config.model) for url in self.config.urls], _key(self.config.key_env)


def _key(key_env: str | None) -> str | None:
    if key_env is None:
        return None
    key = os.environ.get(key_env, "").strip()
    if not key:
        raise ValueError(f"the samplers' key is missing: set the environment variable {key_env}, or drop key_env")
    return key
