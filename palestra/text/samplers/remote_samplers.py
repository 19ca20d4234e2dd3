"""Builds the remote samplers of a run from the config section `sampler:`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

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
    ) -> Callable[[], VllmSampler]:
        """Starts opening a sampler of `base`. Returns the function that waits for its servers and returns it; it raises
        ValueError if a server is unreachable or does not start.

        Raises ValueError for a second base if `config` names running servers: those serve one base only.
        """
        self._bases.append(base)
        if isinstance(self.config, SamplerServersConfig) and len(self._bases) > 1:
            raise ValueError(
                f"sampler: names servers of one base, but the policies use {' and '.join(self._bases)} (or one in two "
                "dtypes): use one, or sampler: {type: processes}, which starts samplers for each"
            )
        store = AdapterStore(self.config.folder, base)
        processes = None
        if isinstance(self.config, SamplerProcessesConfig):
            options: dict[str, Any] = {"base": base, "dtype": dtype, "device": "cuda" if self.config.gpus else device}
            options |= {"threads": self.config.torch_threads, "max-num-seqs": max_num_seqs}
            options |= {} if kv_cache_gib is None else {"kv-cache-gib": kv_cache_gib}
            words = list(chain.from_iterable((f"--{name}", str(value)) for name, value in options.items()))
            processes = SamplerProcesses(words, self.config.count, self.config.gpus, store.folder)
        return partial(self._connect, store, processes)

    def _connect(self, store: AdapterStore, processes: SamplerProcesses | None) -> VllmSampler:
        if processes:
            servers = [SamplerServer(child.wait_url(), restart=child.wait_url) for child in processes.children]
            key: str | None = processes.key
        else:
            assert isinstance(self.config, SamplerServersConfig)
            servers = [SamplerServer(url, self.config.model) for url in self.config.urls]
            key = _key(self.config.key_env)
        timeouts = RequestTimeouts(self.config.request_timeout, self.config.retry_timeout)
        sampler = VllmSampler(servers, store, timeouts, key, processes)
        sampler.connect()
        return sampler

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


def _key(key_env: str | None) -> str | None:
    if key_env is None:
        return None
    key = os.environ.get(key_env, "").strip()
    if not key:
        raise ValueError(f"the samplers' key is missing: set the environment variable {key_env}, or drop key_env")
    return key
