"""The arithmetic of capacity plans by hand, fitted costs, and a plan compared with a real run."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import statistics
import time
from dataclasses import replace

import pytest
from transformers import LlamaConfig

from palestra.builders.calibration import Calibration, Observation, fit_costs, noise_config
from palestra.builders.capacity import (
    DecoderLoad,
    Machine,
    TrainingLoad,
    Work,
    decode_work,
    optimizer_work,
    prefill_work,
    publish_work,
    scoring_work,
    training_work,
)
from palestra.builders.capacity_phases import Layout, step_phases, step_time
from palestra.builders.capacity_plan import (
    Fleet,
    command_of,
    env_servers,
    expected_staleness,
    layout_of,
    plan_capacity,
    traffic,
)
from palestra.builders.capacity_probe import plays_itself, probe_episodes
from palestra.builders.capacity_workload import (
    EpisodeShape,
    PolicyLoad,
    Round,
    Workload,
    build_workload,
    rounds_of,
)
from palestra.builders.machines import DATA_SHEETS, published_machine
from palestra.builders.text import build
from palestra.config import dump
from palestra.engine.memory import ModelShape, model_shape
from palestra.rollouts.tree_rollout import Branching
from palestra.runs import Run
from palestra.training.loop import Callback, run_training

# Two layers of one product of 10 to 10 each, a head of 10 to 100; 4 numbers of queries, 2 of keys.
SHAPE = ModelShape(
    params=1200,
    linears={"layers.0.o": (10, 10), "layers.1.o": (10, 10), "head": (10, 100)},
    layers=2,
    width=10,
    query=4,
    kv=2,
    inner=0,
    vocab=100,
    positions=64,
    experts={},
    embedding="embed",
)
LOAD = DecoderLoad(SHAPE, size=4, adapter_params=40, merge_flops=400, adapted=2)
FULL = DecoderLoad(SHAPE, size=4)
EPISODE = EpisodeShape(turns=1, seats_per_turn=1, prompt_tokens=3)


def workload(**changes) -> Workload:
    """Two prompts of 3 tokens, 4 answers of 5 tokens to each."""
    policy = PolicyLoad("a", "base", LOAD, 1.0, 5, 5, updates=1)
    whole = Workload((Round(2, 4, 3, env_steps=8),), (policy,), EPISODE)
    return replace(whole, **changes)


def machine(**seconds_per: float) -> Machine:
    return Machine("test", seconds_per)


def test_work_of_a_prefill():
    # rows: the last token of each of 2 prompts goes through 2 layers, the other 2 through one of two: 2 * (1 + 2/2) = 4
    # pairs: 3 tokens see 1, 2 and 3 keys: 2 * 6 = 12
    work = prefill_work(LOAD, 2, 3)
    assert work.flops == 0 and work.small_flops == 2 * 4 * (200 + 40) + 2 * 2 * 1000
    assert work.attention == 4 * 4 * 2 * 12
    assert work.passes == 1 and work.layers == 2 and work.mixed_layers == 0 and work.rows == 0
    assert work.weight_bytes == 4 * 1200
    assert prefill_work(LOAD, 2, 3, mixed=True, passes=3).mixed_layers == 6
    # with 5 earlier tokens each new one sees 5 keys more
    assert prefill_work(LOAD, 2, 3, context=5).attention - work.attention == 4 * 4 * 2 * (2 * 3 * 5)


def test_products_with_large_weights_are_counted_apart():
    linears = {"layers.0.q": (256, 256), "layers.0.up": (256, 257), "layers.1.q": (256, 256), "head": (256, 1000)}
    load = DecoderLoad(replace(SHAPE, linears=linears, width=256, vocab=1000))
    assert load.products(2, rows=3, head_rows=1) == Work(
        flops=2 * (3 * 256 * 257 + 256_000), small_flops=2 * 3 * 2 * 65536
    )


def test_work_of_decoding():
    work = decode_work(LOAD, 8, 5, prompt=3)  # the first of 5 tokens comes from the prompt's logits
    assert work.passes == 4 and work.layers == 4 * 2
    assert work.rows == 40 and work.logits == 40 * 100
    assert work.small_flops == 2 * 32 * (200 + 40 + 1000) and work.attention == 4 * 4 * 2 * 32 * (3 + 2.5)
    assert work.weight_bytes == 4 * 4800
    assert decode_work(replace(LOAD, cache_bytes=4800), 8, 5, prompt=3).weight_bytes == 0  # stays in the cache


def test_work_of_training_shares_prompts_and_freezes_the_base():
    batch = TrainingLoad(prompts=2, answers=8, prompt_tokens=3, answer_tokens=5, micro_batches=2)
    rows = 8 * 4 + 4  # answers without their last token, prompts as in a prefill
    pairs = 2 * 6 + 8 * 4 * (3 + 2.5)
    work = training_work(LOAD, batch)
    assert work.small_flops == 4 * rows * 200 + 4 * 40 * 1000 + 4 * 40 * rows + 2 * 400 * 2
    assert work.trained_attention == 12 * 4 * 2 * pairs and work.trained_passes == 2
    assert work.trained_logits == 40 * 100 and work.trained_layers == 4
    full = training_work(FULL, batch)
    assert full.small_flops == 6 * rows * 200 + 6 * 40 * 1000
    again = training_work(FULL, batch, checkpointing=True)
    assert again.small_flops == full.small_flops + 2 * rows * 200
    assert again.trained_attention == full.trained_attention + 4 * 4 * 2 * pairs
    scored = scoring_work(FULL, batch)
    assert scored.small_flops == 2 * rows * 200 + 2 * 40 * 1000 and scored.attention == 4 * 4 * 2 * pairs


def test_work_of_an_optimizer_step_and_of_publishing():
    assert optimizer_work(LOAD) == Work(activation_bytes=44 * 40, tensors=4)
    assert optimizer_work(FULL) == Work(activation_bytes=44 * 1200, tensors=6)
    assert publish_work(LOAD) == Work(activation_bytes=12 * 40, tensors=4, small_flops=400)
    assert publish_work(FULL) == Work()


def test_seconds_add_up_on_a_cpu_and_overlap_on_a_gpu():
    work = Work(flops=10, layers=3, answers=2)
    cpu = machine(flops=1.0, layers=2.0, answers=5.0)
    assert cpu.seconds(work) == 10 + 6 + 10
    assert replace(cpu, overlaps=True).seconds(work) == max(10, 6) + 10


def test_rounds_of_an_episode():
    shape = EpisodeShape(turns=3, seats_per_turn=2, prompt_tokens=7)
    prompts = [[r.prompts, r.group] for r in rounds_of(Branching("root", 4), 5, shape)]
    assert prompts == [[10, 4], [40, 1], [40, 1]]
    prompts = [[r.prompts, r.group] for r in rounds_of(Branching("turn", 4, "best"), 5, shape)]
    assert prompts == [[10, 4]] * 3
    talk = rounds_of(Branching("root", 4), 5, shape, answer_tokens=3, conversation=True)
    assert [r.context for r in talk] == [0, 10, 20]
    assert [r.env_steps for r in talk] == [20, 20, 20]


def test_trajectories_that_end_leave_fewer_prompts():
    shape = EpisodeShape(turns=3, seats_per_turn=1, prompt_tokens=7, going_on=(1.0, 0.5, 0.25))
    prompts = [[r.prompts, r.answers, r.env_steps] for r in rounds_of(Branching("turn", 4, "best"), 8, shape)]
    assert prompts == [[8, 32, 32], [4, 16, 16], [2, 8, 8]]


def test_each_optimizer_batch_computes_its_prompts():
    """Siblings are distributed over batches: with 4 siblings, each prompt is in all of 3 batches, or in 4 of 8."""
    policy = workload().policies[0]
    rounds = (Round(2, 4, 3),)
    assert policy.training_load(rounds).prompts == 2
    assert replace(policy, updates=3).training_load(rounds).prompts == 6
    assert replace(policy, updates=6, epochs=2).training_load(rounds).prompts == 6
    assert replace(policy, updates=8).training_load(rounds).prompts == 8
    assert replace(policy, updates=3).training_load(rounds).answers == 8


def test_planned_prompts_equal_those_of_a_learners_batches():
    """The plan's number of prompts equals that of the distinct prompts in a learner's batches."""
    config = noise_config({"base": "tiny", "batch_size": 12, "sampling": {"max_tokens": 4}}, 5, 8)
    trainer = build(config)
    stage = trainer.stages[0]
    episodes = asyncio.run(stage.source.play(range(5), stage.algorithm.branching, {}))
    samples, _ = stage.algorithm.build_samples(episodes, "agent0")
    batches = trainer.learners["agent0"].batches(samples)
    distinct = sum(len({sample.prompt_ids.tobytes() for sample in batch}) for batch in batches)
    found = build_workload(config, EpisodeShape(1, 1, 24), device="cpu")
    (planned,) = found.policies
    assert planned.updates == len(batches) == 4
    assert planned.training_load(found.rounds).prompts == distinct


def test_episode_lengths_are_measured_with_untrained_policies():
    sampling = {"max_tokens": 6, "stop_at_eos": False}
    config = noise_config({"base": "tiny", "sampling": sampling}, 4, 2, env={"turns": 3}, device="cpu")
    assert plays_itself(config)
    shape = probe_episodes(config, own_policies=True)
    assert (shape.turns, shape.going_on, shape.answer_tokens) == (3, (1.0, 1.0, 1.0), 6)
    assert shape.prompt_tokens == pytest.approx(probe_episodes(config).prompt_tokens, abs=2)
    elsewhere = noise_config({"base": "someone/large-model", "sampling": sampling}, 4, 2, device="cpu")
    assert not plays_itself(elsewhere)


def test_step_time_of_each_layout():
    costs = machine(answers=0.5, trained_layers=1.0)  # 8 answers: 4 s of rollout; 2 layers of one micro-batch: 2 s
    waiting = workload(episode=replace(EPISODE, env_wait_s=3.0))
    alone = step_time(waiting, costs, Layout())
    assert (alone.rollout_s, alone.training_s, alone.busy_s, alone.wall_s) == (7, 2, 6, 9)
    # one step ahead: 6 s of work are more than (7 + 2) / 2
    assert step_time(waiting, costs, Layout(staleness=1)).wall_s == 6
    # two slices one after the other
    assert step_time(waiting, costs, Layout(samplers=2)).wall_s == pytest.approx(2 * (1 + 3) + 2)
    # the episodes that two samplers play
    assert step_time(waiting, costs, Layout(samplers=2, staleness=1)).wall_s == pytest.approx(8)
    answering = Layout(samplers=2, staleness=1, whole_episodes=False)  # episodes of several steps wait at the same time
    assert step_time(waiting, costs, answering).wall_s == pytest.approx((2 + 3 + 2) / 2)
    assert step_time(workload(), costs, Layout(samplers=2, cores=1)).wall_s == 6  # no faster than one core
    assert step_time(workload(), costs, Layout(ranks=2)).wall_s == pytest.approx(2 + 2, abs=1e-6)  # a pass on each rank
    busy = replace(costs, slowdown=2.0)
    assert step_time(waiting, busy, Layout()).wall_s == 2 * 4 + 3 + 2 * 2  # waits are as long on a busy machine
    few = workload(episode=replace(EPISODE, env_wait_s=3.0, concurrent=4))
    assert step_time(few, costs, Layout()).rollout_s == 4 + 2 * 3  # 8 env steps, 4 at a time


def test_traffic_staleness_and_env_servers():
    sent = traffic(workload())
    assert sent.weights == 160
    assert sent.episodes == 2 * 3 * 8 + 8 * (200 + 12 * 5)
    costs = machine(answers=0.5, trained_layers=1.0)
    step = step_time(workload(), costs, Layout(staleness=2))  # 4 s of rollout, a step of 6
    assert expected_staleness(step, in_flight=False) == 2
    assert expected_staleness(step, in_flight=True) == pytest.approx(2 - 4 / 6 / 2)
    busy = workload(episode=replace(EPISODE, env_cpu_s=1.0))
    assert env_servers(busy, step_s=4.0) == 3  # 8 s of env steps in 4 s, at 70 %
    assert env_servers(busy, step_s=100.0) == 0


def test_least_squares_find_the_costs():
    works = [Work(flops=1e9 * a, layers=b, answers=c) for a, b, c in itertools.product((1, 5), (0, 10), (0, 100))]
    truth = machine(flops=1e-10, layers=1e-3, answers=1e-4)
    costs = fit_costs([Observation(work, truth.seconds(work)) for work in works])
    assert {name: costs[name] for name in truth.seconds_per} == pytest.approx(dict(truth.seconds_per))
    assert all(cost == 0 for name, cost in costs.items() if name not in truth.seconds_per)


def test_h100_decoding_is_bound_by_memory_bandwidth():
    shape = replace(SHAPE, params=10**9, linears={"layers.0.o": (31250, 32000)}, vocab=1, width=0)
    load, gpu = DecoderLoad(shape, size=2), replace(published_machine("h100"), seconds_per={})
    assert gpu.memory == 80 * 2**30
    rates = published_machine("h100").seconds_per
    only = replace(gpu, seconds_per={"weight_bytes": rates["weight_bytes"]})
    # 2 GB of weights for each of 100 tokens, at 60 % of 3.35 TB/s
    assert only.seconds(decode_work(load, 1, 101, prompt=1)) == pytest.approx(100 * 2e9 / (0.6 * 3.35e12))
    with pytest.raises(ValueError, match="no data sheet"):
        published_machine("abacus")
    assert all(sheet.flops > 1e13 > sheet.bandwidth for sheet in DATA_SHEETS.values())


H200_STEPS = {  # docs/scaling/gpu.md: shape; seconds of sampling, training, the whole step, sampling without graphs
    "SmolLM2-135M": ((30, 576, 1536, 9, 3, 64, 49152), (0.57, 0.53, 1.20, 7.4)),
    "Qwen3-0.6B": ((28, 1024, 3072, 16, 8, 128, 151936), (0.76, 0.60, 1.53, 6.7)),
}


@pytest.mark.parametrize(("name", "tolerance"), [("SmolLM2-135M", 0.06), ("Qwen3-0.6B", 0.25)])
def test_planned_h200_steps_match_the_measured_ones(name, tolerance, tmp_path):
    """16 prompts of 96 tokens, 8 answers of 128 each, rank 16. The costs of layers were fitted to the first shape."""
    (layers, width, inner, heads, kv_heads, head, vocab), (sampling, training, whole, plain) = H200_STEPS[name]
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner, "vocab_size": vocab}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head}
    LlamaConfig(**sizes, **heads_of, tie_word_embeddings=True).save_pretrained(tmp_path)
    drawn = {"max_tokens": 128, "stop_at_eos": False}
    policy = {"base": str(tmp_path), "rank": 16, "dtype": "bfloat16", "sampling": drawn}
    gpu = published_machine("h200")
    found = build_workload(noise_config(policy, 16, 8), EpisodeShape(1, 1.0, 96), device="cuda", answer_tokens=128)
    seconds = {phase.name: phase.seconds for phase in step_phases(found, gpu)}
    assert seconds["prefill"] + seconds["decode"] == pytest.approx(sampling, rel=tolerance)
    assert seconds["forward and backward"] + seconds["optimizer"] == pytest.approx(training, rel=tolerance)
    assert step_time(found, gpu, Layout()).wall_s == pytest.approx(whole, rel=tolerance)
    (load,) = (replace(each.load, graphs=False) for each in found.policies)
    eager = decode_work(load, 128, 128, prompt=96)
    assert seconds["prefill"] + gpu.seconds(eager) == pytest.approx(plain, rel=tolerance)
    mixed = decode_work(load, 128, 128, prompt=96, mixed=True)
    assert mixed.mixed_layers == 127 * layers and not mixed.layers and not mixed.graph_layers


def test_config_gives_layout_and_workload():
    policy = {"base": "tiny", "sampling": {"max_tokens": 8}, "batch_size": 8, "epochs": 2}
    config = noise_config(policy, 6, 4, adapters=2, backend={"type": "local", "workers": 3}, staleness=1)
    assert layout_of(config, 2) == Layout(3, 1, staleness=1, cores=2)
    found = build_workload(config, EpisodeShape(1, 2, 20), device="cpu", answer_tokens=5)
    assert found.answers == 48 and found.tokens == 240
    assert [(p.name, p.share, p.updates, p.scoring) for p in found.policies] == [
        ("agent0", 0.5, 6, 1),
        ("agent1", 0.5, 6, 1),
    ]
    assert found.policies[0].engine == found.policies[1].engine
    loaded = found.policies[0].load
    shape = model_shape("tiny")
    assert loaded.decoder_params + loaded.head_params == pytest.approx(shape.params, rel=0.01)  # except norms
    assert len({phase.name for phase in step_phases(found, machine(flops=1e-9))}) == 9


def test_suggested_layouts_use_the_fleet():
    policy = {"base": "tiny", "sampling": {"max_tokens": 8}}
    config = noise_config(policy, 64, 8, adapters=2)
    plan = plan_capacity(config, published_machine("l4"), EpisodeShape(1, 2, 20, env_wait_s=5.0), Fleet(2, 4))
    assert plan.bottleneck.name == "env steps"
    assert plan.layouts[0].wall_s == min(each.wall_s for each in plan.layouts) < plan.step.wall_s
    assert plan.memory.free == 24 * 2**30 and plan.sampler_memory < plan.memory.peak
    assert plan.trainer_memory == plan.memory.peak  # training takes longer than sampling here
    assert command_of(Layout(ranks=8), Fleet(2, 4)) == "torchrun --nnodes 2 --nproc-per-node 4 -m palestra train"
    assert command_of(Layout(3, 1, staleness=1), Fleet(1, 0, 4)) == (
        "palestra train --backend local --workers 3 --set staleness=1"
    )
    placed = command_of(Layout(6, 2), Fleet(2, 4))
    assert "train: {workers: 2, num_gpus: 1}, play: {workers: 6, num_gpus: 1}" in placed
    with pytest.raises(ValueError, match="server"):
        plan_capacity(config.model_copy(update={"engine": "http://localhost:1"}), plan.machine, EPISODE)


def test_planned_traffic_matches_what_a_run_sends(tmp_path):
    """The test's tokens are single characters, which the plan counts as four."""
    policy = {"base": "tiny", "sampling": {"max_tokens": 12, "stop_at_eos": False}}
    config = noise_config(policy, 12, 4, adapters=2, device="cpu")
    trainer = build(config)
    stage = trainer.stages[0]
    episodes = asyncio.run(stage.source.play(range(12), stage.algorithm.branching, {}))
    for name, learner in trainer.learners.items():
        learner.export(tmp_path / name)
    planned = traffic(build_workload(config, probe_episodes(config), device="cpu"))
    sent = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert planned.weights == pytest.approx(sent, rel=0.05)
    assert 0.9 < planned.episodes / len(pickle.dumps(episodes)) < 1.6


class CpuClock(Callback):
    """CPU seconds at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step(self, step, metrics) -> None:
        self.ends.append(time.process_time())


@pytest.mark.slow
def test_a_plan_matches_a_run_within_a_factor(tmp_path):
    """Shared cores make timings vary: a factor of 2.5 detects a phase that is left out, and no smaller error."""
    policy = {"base": "tiny", "sampling": {"max_tokens": 12, "stop_at_eos": False}}
    config = noise_config(policy, 12, 4, adapters=2, env={"letters": 60}, steps=4, device="cpu")
    episode = replace(probe_episodes(config), env_cpu_s=0.0)
    assert (episode.turns, episode.seats_per_turn, episode.concurrent) == (1, 2, 256)
    found = Calibration("cpu").measure(repeats=1)
    plan = plan_capacity(config, found, episode, Fleet())
    clock = CpuClock()
    with Run.create(tmp_path, dump(config)) as run:
        run_training(build(config), run, clock)
    measured = statistics.median(b - a for a, b in itertools.pairwise(clock.ends))
    assert measured / 2.5 < plan.step.busy_s < measured * 2.5
