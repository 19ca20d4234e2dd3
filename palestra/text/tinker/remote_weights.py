"""Weights trained on a server, with losses that the server need not support.

A loss that the server supports is sent by name. Any other loss of log-probabilities alone is computed locally, as
official clients do (Tinker documentation, 2025, "forward_backward_custom"): a forward pass returns the batch's
log-probabilities, the loss is differentiated with respect to them, and a cross-entropy pass whose weights are minus
that gradient is the backward pass, because -(weights * logp) has the same gradient as the loss. Gradients through other
model outputs, such as an entropy or a value, are not available.

Shapes: `T` answer tokens of a sample, `M` those of a batch.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from palestra.core.files import atomic_write
from palestra.core.losses import LOSSES, LossFunction, actor_critic_loss, correct_mismatch
from palestra.core.optimizers import AdamW
from palestra.core.types import Datum, Metrics, Sample
from palestra.engine.training.adapter_weights import OptimConfig
from palestra.engine.training.micro_batch import (
    MicroBatch,
    build_loss_inputs,
    micro_batches,
    token_weight,
    trained_share,
    with_gradient,
)
from palestra.service.wire import codec
from palestra.service.wire import wire_pb2 as pb
from palestra.service.wire.schemas.weights import MANIFEST
from palestra.service.wire.validation import CLIP_OPTIONS, LOSS_SPECS, WEIGHTED_ONLY
from palestra.text.learners.lm import Weights
from palestra.text.learners.lm_config import LoraPolicyConfig
from palestra.text.tinker.connection import ServiceConnection
from palestra.text.tinker.remote_sampler import RemoteSampler, RemoteSnapshot, create_sampler

MAX_CHUNK_SEQUENCES = 512  # sequences in one request, at most
OFFICIAL_ALPHA = 32.0  # scale of adapters on official servers
NO_CRITIC = "servers train no critic: train without --engine"
REMOTE_FILE = "remote.json"  # file in a checkpoint's folder: the server path of the weights
WIRE_LOSS_NAMES: dict[LossFunction, str] = {
    LOSSES[spec.formula]: name for name, spec in LOSS_SPECS.items() if spec.for_runs
}


class WireLoss(NamedTuple):
    """A loss on the wire: its name and options."""

    name: str
    options: dict[str, float]


CROSS_ENTROPY = WireLoss("cross_entropy", {})


class RemoteWeights(Weights):
    """Implementation of `Weights` on the server: the adapter of one training client."""

    def __init__(self, connection: ServiceConnection, config: LoraPolicyConfig, *, seed: int) -> None:
        self.connection = connection
        self.config = config
        self.model_id = connection.run(self._create(seed if config.seed is None else config.seed))
        self.last_seq = 0
        self.reference_path: str | None = None  # path of the reference's weights; None: the base
        self._reference: RemoteSampler | None = None

    async def _create(self, seed: int) -> str:
        config = self.config
        targets = config.target_modules
        own_base = "load their bases themselves"
        for setting, is_set, servers in (
            (f"quantize: {config.quantize}", config.quantize, own_base),
            ("long_context", config.long_context, own_base),
            (f"optimizer: {config.optimizer.type}", config.optimizer.type != "adamw", "train with AdamW"),
            (", ".join(config.variants), config.variants, "train plain LoRA adapters"),
        ):
            if is_set:
                raise ValueError(
                    f"servers {servers}, but the policy sets {setting}: leave that out, or train in this process "
                    "(engine: null)"
                )
        switches = lora_switches([targets] if isinstance(targets, str) else targets)
        lora: dict[str, Any] = {"rank": config.rank, "seed": seed, **switches}
        if config.alpha != OFFICIAL_ALPHA:
            await self.connection.require_palestra(f"alpha: {config.alpha:g} (others have {OFFICIAL_ALPHA:g})")
            lora["alpha"] = config.alpha
        reply = await self.connection.call(
            "create_model",
            session_id=self.connection.id,
            model_seq_id=self.connection.next_number("model"),
            base_model=config.base,
            lora_config=lora,
        )
        return str(reply.json()["model_id"])

    def forward_backward(self, samples: Sequence[Sample], loss: LossFunction, **options: Any) -> Metrics:
        """Adds the gradient of `loss` over an optimizer batch. Returns the metrics that depend on log-probabilities
        alone, plus the loss and entropy of the server if the loss has an entropy bonus.

        Raises ValueError if the loss reads more than log-probabilities.
        """
        words = supported_wire_loss(self.connection, loss, options)
        scale = trained_share(samples)
        (pack,) = micro_batches(with_gradient(samples), sys.maxsize, token_weight(samples))
        samples = pack.samples
        if words is None:
            slopes, metrics = local_gradients(pack, self.logprobs(samples), loss, options)
            data = [to_datum(sample, weights=-slope) for sample, slope in zip(samples, slopes, strict=True)]
            self._pass(CROSS_ENTROPY, data)
            return _means(metrics, scale)
        outputs = self._pass(words, self._data(words, self._correct_samples(pack, options)))
        _, metrics = local_gradients(pack, answer_logprobs(outputs, samples), loss, options)
        for figure in ("loss", "entropy") if "entropy" in words.options else ():  # only the server can compute these
            metrics[figure] = sum(output.metrics[f"{figure}:sum"] for output in outputs)
        return _means(metrics, scale)

    def _correct_samples(self, pack: MicroBatch, options: Mapping[str, Any]) -> MicroBatch:
        """Returns the batch as losses without a correction read it: `logprobs` are those before the update (from a
        forward pass where they are the current ones), and advantages are multiplied by importance weights."""
        if pack.samples[0].old_logprobs is None:
            return pack
        current = isinstance(pack.samples[0].old_logprobs, str)
        old = self.logprobs(pack.samples) if current else [np.asarray(s.old_logprobs) for s in pack.samples]
        logp_M = torch.tensor(np.concatenate(old))
        tokens = build_loss_inputs(pack, logp_M, torch.zeros_like(logp_M))
        options = {name: value for name, value in options.items() if name.startswith("importance_")}
        weighted, _ = correct_mismatch(tokens, **options)
        advantages = np.split(weighted.advantage_M.numpy(), np.cumsum([len(logps) for logps in old])[:-1])
        fields = zip(pack.samples, old, advantages, strict=True)
        return replace(pack, samples=[replace(s, logprobs=logps, advantages=a) for s, logps, a in fields])

    def _data(self, words: WireLoss, pack: MicroBatch) -> list[Datum]:
        """Returns the batch as the loss reads it.

        The wire's losses are sums. A token's share of the mean is multiplied into its weight on palestra servers, and
        into its advantage on others, which are not sure to read weights.
        """
        weighed = self.connection.run(self.connection.is_palestra())
        data = []
        for sample, share in zip(pack.samples, pack.token_weights, strict=True):
            ones = np.ones(len(sample.token_ids))
            shared = sample.advantages * share
            if words.name == "cross_entropy":
                data.append(to_datum(sample, weights=shared))
                continue
            inputs = {"weights": share * ones, "advantages": sample.advantages} if weighed else {"advantages": shared}
            if words.name == "gspo":
                inputs["sequence_ratio_mask"] = ones
            data.append(to_datum(sample, logprobs=sample.logprobs, **inputs))
        return data

    def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> list[np.ndarray]:
        """Returns the log-probabilities, float32 [T], of each sample's answer tokens under the current weights, or
        under the reference (see `RemoteSampler.likelihoods`)."""
        if reference:
            return self._reference_logprobs(samples)
        data = [to_datum(sample, weights=np.ones(len(sample.token_ids))) for sample in samples]
        return answer_logprobs(self._pass(CROSS_ENTROPY, data, forward_only=True), samples)

    def _reference_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        if self._reference is None:
            source = {"model_path": self.reference_path} if self.reference_path else {"base_model": self.config.base}
            self._reference = RemoteSampler(self.connection, create_sampler(self.connection, **source))
        found = self._reference.likelihoods([np.concatenate([s.prompt_ids, s.token_ids]) for s in samples])
        return _ends(found, samples)

    def values(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Raises ValueError: servers train no critic."""
        raise ValueError(NO_CRITIC)

    def _pass(
        self, words: WireLoss, data: Sequence[Datum], *, forward_only: bool = False
    ) -> list[pb.ForwardBackwardOutput]:
        """Runs a pass over `data` in requests of at most `MAX_CHUNK_SEQUENCES` sequences, one after the other, so that
        their order is kept."""
        options = dict(words.options)
        if self.connection.run(self.connection.is_palestra()):
            options[WEIGHTED_ONLY] = 1.0
        outputs = []
        for first in range(0, len(data), MAX_CHUNK_SEQUENCES):
            call = pb.ForwardBackwardRequest(
                model_id=self.model_id, seq_id=self._next(), loss_fn=words.name, forward_only=forward_only
            )
            for name, value in options.items():
                call.loss_fn_config_v2[name].number = value
            body = codec.encode_data(call, data[first : first + MAX_CHUNK_SEQUENCES])
            reply = self.connection.run(self.connection.call("forward_backward", body))
            outputs.append(pb.ForwardBackwardOutput.FromString(reply.content))
        return outputs

    def optim_step(self, step: OptimConfig) -> Metrics:
        """Runs one AdamW step. Returns the server's metrics."""
        adam = step.optimizer
        assert isinstance(adam, AdamW)
        params = {"learning_rate": step.lr, "beta1": adam.betas[0], "beta2": adam.betas[1], "eps": adam.eps}
        params |= {"weight_decay": adam.weight_decay, "grad_clip_norm": step.max_grad_norm or 0.0}
        reply = self._ask("optim_step", adam_params=params)
        return {key.partition(":")[0]: value for key, value in (reply.get("metrics") or {}).items()}

    def start_stage(self) -> None:
        """Resets the optimizer and makes the current weights the reference."""
        self._ask("load_weights", path=self._save("save_weights"), optimizer=False)
        self.reference_path = self._save("save_weights_for_sampler")
        self._reference = None

    def snapshot(self, name: str) -> RemoteSnapshot:
        """Saves the current weights for sampling and returns a snapshot that refers to them."""
        reply = self._ask("save_weights_for_sampler", sampling_session_seq_id=self.connection.next_number("sampler"))
        return RemoteSnapshot(reply["sampling_session_id"], name)

    def save(self, folder: Path) -> None:
        """Saves the weights on the server and downloads a copy to `folder`, with the server path in `remote.json`."""
        path = self._save("save_weights")
        run, _, checkpoint = path.removeprefix("tinker://").partition("/")
        reply = self.connection.run(
            self.connection.get(f"/api/v1/training_runs/{run}/checkpoints/{checkpoint}/archive")
        )
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(reply.content)) as archive:
            archive.extractall(folder, filter="data")
        (folder / MANIFEST).unlink(missing_ok=True)
        where = {"url": self.connection.url, "path": path, "reference": self.reference_path}
        atomic_write(folder / REMOTE_FILE, json.dumps(where).encode())

    def load(self, folder: Path) -> None:
        """Loads weights and optimizer from the server path recorded in `folder`. Raises ValueError if the checkpoint
        was not trained on a server."""
        where = folder / REMOTE_FILE
        if not where.exists():
            raise ValueError(f"{folder} was not trained on a server: resume it without --engine")
        kept = json.loads(where.read_text())
        self._ask("load_weights", path=kept["path"], optimizer=True)
        self.reference_path = kept.get("reference")
        self._reference = None

    def _save(self, verb: str) -> str:
        """Saves the current weights with call `verb` and returns their path on the server."""
        return str(self._ask(verb, path=f"seq-{self.last_seq + 1:08d}")["path"])

    def _ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        reply = self.connection.run(self.connection.call(verb, model_id=self.model_id, seq_id=self._next(), **fields))
        return dict(reply.json())

    def _next(self) -> int:
        self.last_seq += 1
        return self.last_seq


def supported_wire_loss(
    connection: ServiceConnection, loss: LossFunction, options: Mapping[str, Any]
) -> WireLoss | None:
    """Returns `to_wire_loss(loss, options)`. Raises ValueError also for options that the connected server lacks."""
    words = to_wire_loss(loss, options)
    if words and "entropy" in words.options:
        connection.run(connection.require_palestra("algorithm.entropy_coef"))
    return words


def to_wire_loss(loss: LossFunction, options: Mapping[str, Any]) -> WireLoss | None:
    """Returns a loss in the terms of the wire, or None if it has no equivalent and is computed locally. Raises
    ValueError for a loss that reads more than log-probabilities, or an entropy option that servers do not support."""
    if loss is actor_critic_loss:
        raise ValueError(NO_CRITIC)
    name = WIRE_LOSS_NAMES.get(loss)
    values = _defaults(loss) | dict(options)
    if (values.get("entropy") or 0) < 0:
        raise ValueError(f"entropy_coef: {values['entropy']:g} is a cost, and servers pay a bonus only: set 0 or more")
    if name and not (values.get("kl") or values.get("dual_clip")) and (name == "ppo" or not values.get("entropy")):
        return WireLoss(name, _options(name, values))
    if values.get("entropy"):
        raise ValueError(
            f"entropy_coef: {values['entropy']:g} is paid by servers only with GRPO's surrogate: clipped, without "
            "kl_coef and dual_clip: set algorithm.entropy_coef: 0, or train without --engine"
        )
    return None


def _defaults(loss: LossFunction) -> dict[str, Any]:
    return {p.name: p.default for p in signature(loss).parameters.values() if p.kind is p.KEYWORD_ONLY}


def _options(name: str, options: Mapping[str, Any]) -> dict[str, float]:
    if name != "ppo":
        return {option: options[option] for option in CLIP_OPTIONS if option in options}
    high = options["clip"] if options["clip_high"] is None else options["clip_high"]
    bounds = dict(zip(CLIP_OPTIONS, (1 - options["clip"], 1 + high), strict=True))
    return bounds | ({"entropy": options["entropy"]} if options["entropy"] else {})


def local_gradients(
    pack: MicroBatch, logps: Sequence[np.ndarray], loss: LossFunction, options: Mapping[str, Any]
) -> tuple[list[np.ndarray], Metrics]:
    """Computes a loss locally from log-probabilities [T] of each sample.

    Returns its gradients, float32 [T] per sample, with respect to those log-probabilities, and its metrics except the
    entropy, which log-probabilities of single tokens do not determine.
    """
    logp_M = torch.tensor(np.concatenate(logps), requires_grad=True)
    value, metrics = loss(build_loss_inputs(pack, logp_M, torch.zeros_like(logp_M)), **options)
    (slope_M,) = torch.autograd.grad(value, logp_M)
    cuts = np.cumsum([len(logp) for logp in logps])[:-1]
    reported = {
        name: float(figure) for name, figure in {"loss": value.detach(), **metrics}.items() if name != "entropy"
    }
    return np.split(slope_M.numpy(), cuts), reported


def _means(metrics: Metrics, scale: float) -> Metrics:
    """Returns the metrics as means over the trained tokens, whose weights sum to `scale`, and the loss as it is."""
    return {name: value if name == "loss" else value / scale for name, value in metrics.items()}


def to_datum(sample: Sample, **inputs: np.ndarray) -> Datum:
    """Returns a sample as a datum: `tokens` and `targets` int64 [N-1] for N tokens in total; `inputs` [T] become
    float32 [N-1], 0 at prompt positions."""
    ids = np.concatenate([sample.prompt_ids, sample.token_ids]).astype(np.int64)
    before = np.zeros(len(sample.prompt_ids) - 1)
    values = {name: np.concatenate([before, array]).astype(np.float32) for name, array in inputs.items()}
    return Datum(ids[:-1], ids[1:], values)


def answer_logprobs(outputs: Iterable[pb.ForwardBackwardOutput], samples: Sequence[Sample]) -> list[np.ndarray]:
    """Returns the log-probabilities, float32 [T], of each sample's answer tokens from the results of a pass over all
    samples."""
    found = []
    for record in chain.from_iterable(output.loss_fn_outputs for output in outputs):
        found += codec.split_tensor(record.fields["logprobs"])
    return _ends(found, samples)


def _ends(rows: Sequence[np.ndarray], samples: Sequence[Sample]) -> list[np.ndarray]:
    """Returns the last T entries of each row: the sample's answer follows its prompt."""
    return [row[-len(sample.token_ids) :] for row, sample in zip(rows, samples, strict=True)]


def lora_switches(targets: Sequence[str]) -> dict[str, bool]:
    """Returns Tinker's three layer switches for the layers in `targets`. Raises ValueError if `targets`
    names only some layers of a part."""
    parts = {
        "train_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
        "train_mlp": {"gate_proj", "up_proj", "down_proj"},
        "train_unembed": {"lm_head"},
    }
    if list(targets) == ["all-linear"]:
        return {"train_attn": True, "train_mlp": True, "train_unembed": False}
    whole = {switch: names <= set(targets) for switch, names in parts.items()}
    if set(targets) != set().union(*(names for switch, names in parts.items() if whole[switch])):
        raise ValueError(
            f"servers train all layers of a part or none: target_modules {list(targets)} are not whole parts"
        )
    return whole
