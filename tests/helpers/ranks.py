"""Training on several ranks: the work of each rank, and starting ranks as processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from palestra.core.losses import actor_critic_loss
from palestra.core.types import Sample
from palestra.engine.bases.fsdp import full_tensor, local_shard, shard_engine
from palestra.engine.forward import logits
from palestra.engine.lora.adapters import Adapter
from palestra.engine.lora.config import LoraConfig
from palestra.engine.training.adapter_weights import AUTOCAST_DTYPES, AdapterWeights, OptimConfig
from palestra.engine.training.checkpoints import load_training_state, save_training_state
from palestra.engine.training.head import LMHead
from palestra.parallel.process_group import ProcessGroup
from palestra.parallel.torch_group import join_process_group
from palestra.testing import tiny_lm

ADAM = OptimConfig(lr=1e-3, max_grad_norm=0.5)


def run_ranks(count: int, work: str, *arguments: object, timeout: float = 240) -> str:
    """The output of `count` processes that each call the function `work` of this file; all must exit with code 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    everyone = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    environment = os.environ | everyone | {"MASTER_PORT": port, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-W", "error::UserWarning", __file__, work, *map(str, arguments)]
    processes = [
        subprocess.Popen(
            command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(count)
    ]
    try:
        printed = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * count, "\n".join(printed)
    return printed[0]


def batch(seed: int, groups: int = 5) -> list[Sample]:
    """Answers of 1 to 8 tokens to a few prompts: some in groups that stay together, some single."""
    rng, samples = np.random.default_rng(seed), []
    for group in range(groups):
        prompt = rng.integers(5, 250, int(rng.integers(3, 20))).astype(np.int32)
        for _ in range(int(rng.integers(1, 5))):
            n = int(rng.integers(1, 9))
            old, advantages, values, returns = rng.normal(size=(4, n)).astype(np.float32)
            samples.append(
                Sample(
                    prompt,
                    rng.integers(5, 250, n).astype(np.int32),
                    0.1 * old - 5,
                    advantages,
                    group=group if group % 2 else -1,
                    weight=0.5 + group,
                    values=values,
                    returns=returns,
                )
            )
    return samples


def trainer(
    kind: str, mode: str, ranks: ProcessGroup, *, precision="auto", checkpointing=False, tied=True, **shape
) -> AdapterWeights:
    """A trainer with a critic on a small model whose sizes do not divide by the number of ranks."""
    engine = tiny_lm(1, initializer_range=0.2, intermediate_size=101, vocab_size=271, tie_word_embeddings=tied, **shape)
    if mode == "fsdp" and ranks.world_size > 1:
        shard_engine(
            engine,
            ranks,
            "cpu",
            train=kind == "full",
            autocast_dtype=AUTOCAST_DTYPES.get(precision) if kind == "full" else None,
        )
    adapter = None if kind == "full" else Adapter(engine.linear_layers, LoraConfig(rank=4), seed=3)
    return AdapterWeights(
        engine, adapter, pack_tokens=60, precision=precision, checkpointing=checkpointing, critic=True, group=ranks
    )


def train(learner: AdapterWeights, steps: range, groups: int = 5) -> list[dict[str, float]]:
    """The metrics of each of `steps`: a batch in several micro-batches, and an optimizer step."""
    figures = []
    for step in steps:
        samples = batch(step, groups)
        learner.values(samples)
        figures.append(learner.forward_backward(samples, actor_critic_loss, entropy=0.01))
        figures[-1] |= learner.optim_step(ADAM)
    return figures


def state(learner: AdapterWeights, figures: list[dict[str, float]]) -> dict[str, np.ndarray]:
    """The result of training: the weights, their outputs for other samples, and the metrics of all steps."""
    weights = {f"weight {i}": full_tensor(local_shard(p), p).detach().numpy() for i, p in enumerate(learner.parameters)}
    logps, values = learner.logprobs(batch(99)), learner.values(batch(99))
    metrics = {f"{name} {i}": np.array(value) for i, line in enumerate(figures) for name, value in line.items()}
    return weights | metrics | {"logps": np.concatenate(logps), "values": np.concatenate(values)}


def kept_bytes(learner: AdapterWeights) -> int:
    """Bytes of all weights (the base's too) and of the optimizer's state on this rank."""
    weights = {id(p): p for p in [*learner.engine.model.parameters(), *learner.parameters]}.values()
    slots = [t for one in learner.optimizer.state.values() for t in one.values()]
    return sum(t.numel() * t.element_size() for t in [*(local_shard(w) for w in weights), *slots])


# ---- work of a rank


def steps(out: str, count: str, groups: str, *cases: str) -> None:
    """Trains each case (`kind,mode,checkpointing,tied`) and writes the result to OUT/CASE.npz."""
    ranks = join_process_group()
    for case in cases:
        kind, mode, checkpointing, tied = case.split(",")
        learner = trainer(kind, mode, ranks, checkpointing=checkpointing == "again", tied=tied == "tied")
        found = state(learner, train(learner, range(int(count)), int(groups)))
        if ranks.is_rank_zero:
            np.savez(Path(out) / f"{case}.npz", **found)


def chunked(*arguments: str) -> None:
    """Like `steps`, with logits of at most four rows at a time."""
    logits.MAX_LOGITS = 4 * 271
    whole = LMHead.logits

    def few_rows(self: LMHead, hidden_RH: torch.Tensor) -> torch.Tensor:
        assert len(hidden_RH) <= 4
        return whole(self, hidden_RH)

    LMHead.logits = few_rows
    steps(*arguments)


def half(out: str, *cases: str) -> None:
    """Like `steps`, in half precision: each case is `kind,mode,precision`."""
    ranks = join_process_group()
    for case in cases:
        kind, mode, precision = case.split(",")
        learner = trainer(kind, mode, ranks, precision=precision)
        if learner.loss_scale:
            learner.loss_scale.value = 2.0**10  # the first one overflows on this model
        found = state(learner, train(learner, range(3)))
        assert {leaf.dtype for leaf in learner.local_parameters} == {torch.float32}
        if learner.loss_scale:  # one rank's gradients overflow: all ranks skip the step
            before = [local_shard(p).detach().clone() for p in learner.parameters]
            learner.loss_scale.value = 2.0**40 if ranks.rank == ranks.world_size - 1 else 1.0
            learner.forward_backward(batch(5), actor_critic_loss)
            learner.loss_scale.value = 2.0**40
            assert learner.optim_step(ADAM)["skipped"] == 1.0
            assert all(torch.equal(local_shard(p), b) for p, b in zip(learner.parameters, before, strict=True))
        if ranks.is_rank_zero:
            np.savez(Path(out) / f"{case}.npz", **found)


def save(folder: str, *cases: str) -> None:
    """Three steps of each case (`kind,mode`), and a checkpoint in FOLDER/KIND-MODE."""
    for case in cases:
        kind, mode = case.split(",")
        learner = trainer(kind, mode, join_process_group())
        train(learner, range(3))
        save_training_state(Path(folder) / f"{kind}-{mode}", learner)


def go_on(folder: str, out: str, *cases: str) -> None:
    """Two more steps from the checkpoint of each case (`kind,mode,mode that saved it`)."""
    ranks = join_process_group()
    for case in cases:
        kind, mode, saved = case.split(",")
        learner = trainer(kind, mode, ranks)
        load_training_state(Path(folder) / f"{kind}-{saved}", learner)
        found = state(learner, train(learner, range(3, 5)))
        if ranks.is_rank_zero:
            np.savez(Path(out) / f"{case}.npz", **found)


def memory(*kinds: str) -> None:
    """Prints the largest number of bytes that a rank holds for each kind, sharded."""
    ranks = join_process_group()
    for kind in kinds:
        learner = trainer(kind, "fsdp", ranks)
        train(learner, range(1))
        kept = max(ranks.all_gather(kept_bytes(learner)))
        if ranks.is_rank_zero:
            print(kind, kept)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    join_process_group().leave()
