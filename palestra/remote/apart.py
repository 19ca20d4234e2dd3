"""Builds the remote samplers of a run from the config section `sampler:`."""

from __future__ import annotations

import os

from palestra.engine.lora import LoraConfig
from palestra.engine.models import Engine
from palestra.engine.sampler import Sampling
from palestra.policies.lm import Samples
from palestra.remote.agreement import Claim, check
from palestra.remote.exchange import Exchange
from palestra.remote.sampler_config import ProcessesConfig, ServersConfig
from palestra.remote.sampler_processes import Child, Processes
from palestra.remote.vllm import Patience, Server, VllmSampler


class Elsewhere:
    """The remote samplers described by `config`, one per base, and the policies that each one serves."""

    def __init__(self, config: ServersConfig | ProcessesConfig) -> None:
        self.config = config
        self._bases: list[str] = []
        self._claims: dict[Samples, list[Claim]] = {}

    def open(self, base: str, *, dtype: str, device: str, max_rows: int) -> Opening:
        """Starts opening a sampler of `base`.

        Raises ValueError for a second base if `config` names running servers: those serve one base only.
        """
        self._bases.append(base)
        if isinstance(self.config, ServersConfig) and len(self._bases) > 1:
            raise ValueError(
                f"sampler: names servers of one base, but the policies use {' and '.join(self._bases)} (or one in two "
                "dtypes): use one, or sampler: {type: processes}, which starts samplers for each"
            )
        return Opening(self.config, base, dtype=dtype, device=device, max_rows=max_rows)

    def agree(self, name: str, lora: LoraConfig | None, sampling: Sampling, engine: Engine, sampler: Samples) -> None:
        """Registers policy `name` with `sampler` and compares log-probabilities of all its policies (agreement.py).

        Raises ValueError if they differ by more than `config.tolerance`.
        """
        if isinstance(sampler, VllmSampler):
            claims = self._claims.setdefault(sampler, [])
            claims.append(Claim(name, lora, sampling))
            check(sampler, engine, claims, self.config.tolerance)


class Opening:
    """A sampler of `base` that is being opened: its processes start in the constructor, `ready` waits for them."""

    def __init__(
        self, config: ServersConfig | ProcessesConfig, base: str, *, dtype: str, device: str, max_rows: int
    ) -> None:
        self.config, self.exchange = config, Exchange(config.folder, base)
        self.processes: Processes | None = None
        if isinstance(config, ProcessesConfig):
            options = {"base": base, "dtype": dtype, "device": "cuda" if config.gpus else device}
            numbers = {"threads": str(config.threads), "max-rows": str(max_rows)}
            words = [word for name, value in (options | numbers).items() for word in (f"--{name}", value)]
            self.processes = Processes(words, config.count, config.gpus, self.exchange.folder)

    def ready(self) -> VllmSampler:
        """Waits for the servers and returns the sampler.

        Raises ValueError if a server is unreachable or does not start.
        """
        servers, key = self._servers()
        patience = Patience(self.config.timeout, self.config.patience)
        sampler = VllmSampler(servers, self.exchange, patience, key, self.processes)
        sampler.meet()
        return sampler

    def _servers(self) -> tuple[list[Server], str | None]:
        if self.processes:
            return [_server(child) for child in self.processes.children], self.processes.key
        assert isinstance(self.config, ServersConfig)
        return [Server(url, self.config.model) for url in self.config.urls], _key(self.config.key_env)


def _server(child: Child) -> Server:
    return Server(child.where(), revive=child.where)


def _key(key_env: str | None) -> str | None:
    if key_env is None:
        return None
    key = os.environ.get(key_env, "").strip()
    if not key:
        raise ValueError(f"the samplers' key is missing: set the environment variable {key_env}, or drop key_env")
    return key
