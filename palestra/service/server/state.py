"""Shared state of the routes (store, weight store, base models, limits)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from pydantic import BaseModel

from palestra.service.server.api_keys import ApiKeys
from palestra.service.storage.store import Store
from palestra.service.storage.tables import TableRow
from palestra.service.storage.wakeup import WakeupSocket
from palestra.service.storage.weight_store import WeightStore
from palestra.service.wire.schemas.wire_model import BadRequest


class ClientLimits(BaseModel):
    """Limits on what one client may request. A full queue is answered with 429 and Retry-After."""

    body: int = 64 * 2**20
    """Bytes of a request body after decompression; JSON has a lower limit of its own (wire_model.py)."""
    upload: int = 2**31
    """Bytes of an uploaded archive, compressed and decompressed."""
    batch_tokens: int = 2**22
    """Tokens in one forward_backward call."""
    answer_tokens: int = 2**21
    """Tokens in the answer to a sampling call; each counts once more for every additional log-probability."""
    models: int = 64
    """Live models of one API key."""
    queue: int = 20_000
    """Unanswered requests of one API key."""
    queue_bytes: int = 2**29
    """Bytes of the unanswered requests' bodies of one API key; they are held in the worker's memory."""
    poll: float = 30.0
    """Seconds that a poll is held open without an answer."""


@dataclass(frozen=True)
class BaseInfo:
    """Metadata of a base model, without its weights. `public_names` are the names that clients may use,
    `max_length` is the number of tokens, prompt and answer together, that the engine allows, `max_chars_per_token` an
    upper bound on the characters that one token stands for."""

    name: str
    path: str
    public_names: tuple[str, ...]
    architecture: str
    vocab_size: int
    max_length: int
    max_chars_per_token: int
    tokenizer: Any

    @property
    def public_name(self) -> str:
        """A name with which a client finds the base's tokenizer."""
        return self.public_names[0] if self.public_names else self.path


@dataclass
class ServiceContext:
    """Shared state of one front end."""

    store: Store
    weight_store: WeightStore
    keys: ApiKeys
    bases: dict[str, BaseInfo]
    wakeup: WakeupSocket
    limits: ClientLimits = field(default_factory=ClientLimits)

    def base(self, name: str | None) -> BaseInfo:
        """Returns the base model that a client calls `name`. Raises BadRequest if it is unknown."""
        for base in self.bases.values():
            if name == base.name or name in base.public_names:
                return base
        known = ", ".join(sorted(set(chain.from_iterable((b.name, *b.public_names) for b in self.bases.values()))))
        raise BadRequest(
            f'this server has no base "{str(name)[:200]}": it has {known}. `palestra serve --alias` adds names.'
        )

    def base_of(self, row: TableRow) -> BaseInfo:
        """Returns the base of a model, sampler or checkpoint row. Raises BadRequest (410) if the server was started
        without it."""
        if row.base not in self.bases:
            raise BadRequest(f"this server no longer has base {row.base}: start it with --base {row.base}=PATH", 410)
        return self.bases[row.base]

    def call_sizes(self, base: BaseInfo) -> dict[str, int]:
        """Returns the limits of a training call on a base, by the names of `validation.py`."""
        limits = {"vocab_size": base.vocab_size, "max_length": base.max_length}
        return limits | {"max_tokens": self.limits.batch_tokens}

    def client_base_name(self, row: TableRow) -> str:
        """Returns the name of the base of a model or checkpoint that its client used."""
        if name := row.info.get("base_model"):
            return str(name)
        return self.bases[row.base].public_name if row.base in self.bases else str(row.base)
