"""Metrics of a step of several optimizer batches are means over its tokens, answers or pairs, not means of the batches'
means. With learning rate 0 all batches see the same weights, so that any split gives the same numbers."""

import json

import pytest

import palestra as pl
from palestra.core.sample_weights import WeightedMeans

ANSWERS = ("up", "up up up up up up up up", "r1 c0", "left")
OF_STEPS = ("updates", "grad_norm", "critic_grad_norm")  # of the optimizer
OF_ROUNDING = ("accuracy",)  # at the reference all margins are 0, and their signs those of rounding errors
ROWS = [{"prompt": f"size 4 you r{n} c0 goal r2 c1"} for n in range(12)]


def lora(batch_size, **sampling):
    return pl.Lora("tiny", rank=4, lr=0.0, batch_size=batch_size, sampling={"max_tokens": 8} | sampling)


def last_line(run):
    line = run.metrics[run.metrics["policy"] == "default"].iloc[-1].dropna().to_dict()
    return {key: value for key, value in line.items() if key not in ("policy", *OF_STEPS, *OF_ROUNDING)}


def is_over(row, answer):
    return float(sum(map(ord, answer)) % 7)


ALGORITHMS = [
    pl.GRPO(group_size=3, branch_at="root", entropy_coef=0.01),
    pl.GRPO(group_size=3, branch_at="root", loss_aggregation="sequence", old_logprobs="sampler"),
    pl.GRPO(group_size=3, branch_at="root", loss_aggregation="constant", max_completion_length=8),
    pl.PPO(group_size=3),
    pl.DPO(group_size=3, branch_at="root"),
    pl.KTO(group_size=3, branch_at="root", threshold=3.0),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda own: own.type)
@pytest.mark.few(3)
def test_metrics_do_not_depend_on_the_batches(algorithm, tmp_path):
    def metrics(batch_size):
        return last_line(
            pl.train(
                env=pl.Prompts(ROWS, is_over),
                policies={"default": lora(batch_size)},
                algorithm=algorithm,
                steps=1,
                episodes=5,
                root=tmp_path,
                max_failed=1.0,
            )
        )

    whole, parts = metrics(None), metrics(4)
    assert parts == pytest.approx(whole, rel=1e-4, abs=1e-5)


def test_nll_of_data_is_a_mean_over_tokens(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": ROWS[0]["prompt"], "completion": said}) + "\n" for said in ANSWERS))

    def nll(batch_size):
        run = pl.train(
            policies={"default": lora(batch_size)},
            algorithm=pl.SFT(),
            data=[{"path": str(path), "seat": "agent"}],
            steps=1,
            episodes=4,
            root=tmp_path,
        )
        return last_line(run)["nll"]

    assert nll(3) == pytest.approx(nll(4), rel=1e-5) and nll(1) == pytest.approx(nll(4), rel=1e-5)


def test_weighted_means_by_hand():
    """Metrics over batches of 3 and 1 tokens; a metric that one batch has is its own mean; steps count alike."""
    total = WeightedMeans()
    total.add({"nll": 1.0, "kl": 5.0}, 3.0)
    total.add({"nll": 3.0}, 1.0)
    total.add({"grad_norm": 1.0})
    total.add({"grad_norm": 3.0})
    assert total.means() == {"nll": 1.5, "kl": 5.0, "grad_norm": 2.0}
