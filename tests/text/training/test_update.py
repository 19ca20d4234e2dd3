"""The update of a step: roles with adapters on one base are trained together."""

from collections.abc import Sequence
from typing import Any

import pytest

import palestra as pl
from palestra.engine.training import train_pass
from palestra.engine.training.train_pass import TrainPass


def test_a_run_trains_its_roles_together(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A team of two roles with adapters of ranks 2 and 5: two optimizer steps of each take two passes instead of four,
    and give what separate passes give."""
    rows = [{"topic": topic, "length": n} for topic in ("up", "left") for n in range(3, 9)]
    sizes: list[int] = []
    made = train_pass.run_together

    def count(passes: Sequence[TrainPass]) -> None:
        sizes.append(len(passes))
        made(passes)

    monkeypatch.setattr("palestra.text.learners.lm.run_together", count)

    def metrics(device: str) -> list[dict[str, float]]:
        monkeypatch.setattr(train_pass, "JOINING_DEVICES", (device,))
        run = pl.train(
            env=pl.Chain(
                rows=rows,
                prompts={"writer": "size 4 you {topic}", "editor": "goal {writer} r{length}"},
                reward=lambda row, answers: -abs(len(answers["editor"]) - row["length"]) / 10,
            ),
            policies={
                name: pl.Lora("tiny", rank=rank, lr=1e-3, sampling={"max_tokens": 6})
                for name, rank in (("writer", 2), ("editor", 5))
            },
            algorithm=pl.GRPO(branch_at="root", group_size=4, scale="none", old_logprobs="trainer"),
            steps=2,
            episodes=4,
            root=tmp_path,
            name=device,
        )
        last = run.metrics.groupby("policy").last()
        return [last.loc[name].dropna().to_dict() for name in ("writer", "editor")]

    separate = metrics("cuda")
    assert sizes == [1, 1] * 2
    sizes.clear()
    joined = metrics("cpu")
    assert sizes == [2, 2]
    for one, other in zip(separate, joined, strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-5) and one["grad_norm"] > 0
