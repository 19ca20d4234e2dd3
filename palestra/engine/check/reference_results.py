"""Reference results of self_check.py: log-probabilities by a model's own eager forward of single unpadded sequences, on
random tokens and with adapters.

Shapes: `T` tokens of a sequence, `V` vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from palestra.engine.check.reduced_model import MAX_WINDOW
from palestra.engine.lora.adapters import Adapter, find_linear_layers
from palestra.engine.lora.config import LoraConfig

NUM_DECODED = 2  # tokens that are computed one at a time
MAX_TOKEN_ID = 400
MAX_WIDENED_BYTES = 2**30  # of weights in half precision, which are copied to float32


@dataclass(frozen=True)
class Case:
    """A sequence to compare: a prompt, the tokens after it, and the number of its adapter (None: the bare base)."""

    prompt: np.ndarray
    answer: np.ndarray
    owner: int | None

    @property
    def tokens(self) -> np.ndarray:
        """All tokens [T] int64."""
        return np.concatenate([self.prompt, self.answer])


class Expected(NamedTuple):
    """Results of the model's own forward: cases by owner, their log-probabilities [T, V], the adapters, and in half
    precision the mean difference of the log-probabilities from those of float32 weights (0 if it was not computed)."""

    cases: list[Case]
    logp_TV: list[Tensor]
    adapters: list[Adapter]
    rounding: float = 0.0

    def of(self, owner: int) -> Expected:
        """Returns the cases of one adapter only."""
        mine = [number for number, case in enumerate(self.cases) if case.owner == owner]
        return self._replace(cases=[self.cases[i] for i in mine], logp_TV=[self.logp_TV[i] for i in mine])


def own_results(model: PreTrainedModel, *, long: bool) -> Expected:
    """Returns the model's own log-probabilities, sequence by sequence, by eager attention. With `long`, one prompt
    goes past every window. The model must have its own forwards."""
    cases = _cases(model, long)
    adapters = [_adapter(find_linear_layers(model), seed) for seed in (1, 2)[: 1 + long]]
    logp_TV = _own_logprobs(model, cases, adapters)
    rounding = 0.0
    weights = list(model.parameters())
    if weights[0].dtype in (torch.bfloat16, torch.float16) and sum(w.nbytes for w in weights) <= MAX_WIDENED_BYTES:
        wide_TV = _own_logprobs(copy.deepcopy(model).float(), cases, adapters)
        gaps = [(own - wide).abs().flatten() for own, wide in zip(logp_TV, wide_TV, strict=True)]
        rounding = float(torch.cat(gaps).mean())
    return Expected(cases, logp_TV, adapters, rounding)


def _own_logprobs(model: PreTrainedModel, cases: Sequence[Case], adapters: Sequence[Adapter]) -> list[Tensor]:
    """Returns the log-probabilities [T, V] of each case by the model's own forward."""
    logps = []
    for case in cases:
        ids = torch.as_tensor(case.tokens, device=model.device)[None]
        with torch.no_grad(), with_adapter(model, None if case.owner is None else adapters[case.owner]):
            logps.append(torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), -1))
        if not torch.isfinite(logps[-1]).all():
            raise ValueError("no finite log-probabilities of random tokens")
    return logps


def _cases(model: PreTrainedModel, long: bool) -> list[Case]:
    """Returns the cases by owner: siblings of one prompt, longer prompts that begin with it, and others."""
    rng = np.random.default_rng(0)
    # token ids that the config gives no meaning
    config = model.config.get_text_config()
    entries = [*model.config.to_dict().items(), *config.to_dict().items()]
    special = {value for key, value in entries if key.endswith(("token_id", "token_index")) and isinstance(value, int)}
    ids = np.array([i for i in range(min(config.vocab_size, MAX_TOKEN_ID)) if i not in special], np.int64)

    def draw(n: int) -> np.ndarray:
        return rng.choice(ids, n)

    start = draw(9)
    past = 2 * MAX_WINDOW + 8 if long else 5
    cases = [Case(start, draw(NUM_DECODED), 0), Case(start, draw(NUM_DECODED), 0)]
    cases += [Case(np.concatenate([start, draw(more)]), draw(NUM_DECODED), 0) for more in (3, past)]
    if long:
        cases.append(Case(draw(5), draw(NUM_DECODED), 1))
        cases.append(Case(np.concatenate([start, draw(MAX_WINDOW + 2)]), draw(NUM_DECODED), 1))
    return [*cases, Case(np.concatenate([start[:6], draw(3)]), draw(NUM_DECODED), None)]


def _adapter(linears: Mapping[str, nn.Module], seed: int) -> Adapter:
    """Returns an adapter whose output is about a tenth of the output of the layers it adapts."""
    adapter = Adapter(linears, LoraConfig(rank=2, alpha=2.0), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, b in adapter.weights.values():
            b.copy_(torch.randn(b.shape, generator=generator) * 0.1)
    return adapter


@contextlib.contextmanager
def with_adapter(model: PreTrainedModel, adapter: Adapter | None) -> Iterator[None]:
    """Context in which the linear layers of a model without an engine add the adapter's output to their own."""

    def adding(a: Tensor, b: Tensor, scale: float) -> Callable[..., Tensor]:
        return lambda _, args, out: out + (scale * (args[0].float() @ a.T @ b.T)).to(out.dtype)

    modules = dict(model.named_modules())
    handles = []
    if adapter:
        for name, (a, b) in adapter.weights.items():
            handles.append(modules[name].register_forward_hook(adding(a, b, adapter.scale_of(name))))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
