"""Asynchronous rollouts: bounded staleness by construction, no unnecessary waiting, and no lost episodes."""

import asyncio
import json
import random
import shutil
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
import yaml
from helpers.processes import finish, start
from helpers.tolerances import LOGPROB_ATOL
from helpers.toys import Spoken, Whisper
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.core.config import dump, override, parse, validate
from palestra.core.losses import clipped_policy_loss
from palestra.core.types import TEAM, Sample
from palestra.engine.sampling.request import Request
from palestra.engine.sampling.sampler import Sampler
from palestra.engine.sampling.token_sampling import SamplingConfig
from palestra.engine.training.micro_batch import micro_batches
from palestra.envs.base import Env
from palestra.runs import Run, list_checkpoints, load_episodes, read_lines
from palestra.runs.loop import Callback, restore_checkpoint, run_training
from palestra.testing import tiny_lm
from palestra.text.algorithms.sft import SFT
from palestra.text.build.build import build
from palestra.text.config import TextConfig
from palestra.text.learners.lm import LanguageLearner, build_weights
from palestra.text.learners.lm_config import LoraPolicyConfig
from palestra.text.rollouts.sources import EnvSource
from palestra.text.rollouts.tree_rollout import EpisodeRunner
from palestra.text.training.async_rollouts import AsyncTextTrainer
from palestra.text.training.trainer import Stage, TextEval


class Slow(Whisper):
    """Whisper whose steps take 50 ms in every other instance, blocking a thread."""

    blocking = True

    def __init__(self, *, turns: int = 1, split: str = "train", seconds: float = 0.05) -> None:
        super().__init__(turns=turns, split=split)
        self.seconds = seconds

    def reset(self, seed):
        self.slow = seed % 2
        return super().reset(seed)

    def step(self, actions):
        time.sleep(self.seconds * self.slow)
        return super().step(actions)


# ---- the staleness bound, with learners that only count


class CountingLearner:
    """A learner with one optimizer step per training step, and the number of steps in its policy's name."""

    def __init__(self, name, during=None):
        self.name, self.version, self.during = name, 0, during

    def batches(self, samples):
        return [list(samples)]

    def passes(self, samples, loss, **options):
        return None

    async def forward_backward(self, samples, loss, **options):
        await (self.during(self.version) if self.during else asyncio.sleep(0))
        return {}

    async def optim_step(self, progress=0.0):
        self.version += 1
        return {}

    def start_stage(self):
        pass

    def policy(self):
        return Spoken(f"{self.name}@{self.version}", lambda query, i: str(query.seed % 2))

    def save(self, folder):
        folder.mkdir()
        (folder / "version").write_text(str(self.version))

    def load(self, folder):
        self.version = int((folder / "version").read_text())


class GatedEnv(Env):
    """Whisper in which an instance waits at its first step for `gates(seed)`; `began` lists the started instances."""

    name = "whisper"
    seats = Whisper.seats
    roles = Whisper.roles

    def __init__(self, gates, began):
        self.gates, self.began, self.game = gates, began, Whisper()

    def reset(self, seed):
        self.seed = seed
        self.began.append(seed)
        return self.game.reset(seed)

    async def step(self, actions):
        if "guide" in actions:
            await self.gates(self.seed)
        return self.game.step(actions)

    def fork(self):
        raise AssertionError("nobody branches here")


def toy(staleness, stages, gates, *, during=None, began=None, **options):
    """A trainer with stages (steps, episodes), in which an instance waits for `gates(number)`."""
    learners = {name: CountingLearner(name, during if name == "guide" else None) for name in Whisper.seats}
    began = [] if began is None else began
    games = EnvSource(
        {"whisper": EpisodeRunner(lambda: GatedEnv(gates, began), "whisper")},
        lambda: {name: learner.policy() for name, learner in learners.items()},
        seed=0,
    )
    parts = [Stage(games, SFT(imitate="all"), steps, episodes) for steps, episodes in stages]
    return AsyncTextTrainer(parts, learners, [], 0, staleness=staleness, **{"checkpoint_every": 1000} | options)


def run_toy(setup, folder, name="run"):
    with Run.create(folder, "", name) as run:
        assert run_training(setup, run)
        return run.path


def recorded(path):
    """The episodes of each step."""
    return [load_episodes(file) for file in sorted((path / "episodes").iterdir())]


def version(policy):
    return int(policy.split("@")[1])


async def no_gate(number):
    pass


@settings(max_examples=10)
@given(
    staleness=st.integers(1, 4),
    stages=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=2),
    seed=st.integers(0, 999),
)
def test_staleness_is_bounded_and_steps_train_their_own_episodes(tmp_path_factory, staleness, stages, seed):
    async def random_gate(number):
        for _ in range(random.Random(f"{seed} {number}").choice((0, 1, 5, 40, 200))):
            await asyncio.sleep(0)

    setup = toy(staleness, stages, random_gate, during=random_gate)
    path = run_toy(setup, tmp_path_factory.mktemp("toy"))
    steps = recorded(path)
    assert [e.seed for episodes in steps for e in episodes] == list(range(sum(s * e for s, e in stages)))
    starts = [sum(s for s, _ in stages[:i]) for i, (s, _) in enumerate(stages) for _ in range(s)]
    lines = [line for line in read_lines(path / "metrics.jsonl") if line["policy"] == "walker"]
    for step, (episodes, first, line) in enumerate(zip(steps, starts, lines, strict=True)):
        ages = [step - version(e.seats["walker"]) for e in episodes]
        assert max(ages) <= staleness and min(ages) >= 0
        assert all(
            e.seats == {name: e.nodes[i].answers[name].policy for i, name in enumerate(e.seats)} for e in episodes
        )
        assert step - max(ages) >= first  # no episode of a stage is played with weights of the stage before
        assert (line["staleness"], line["staleness_max"]) == (np.mean(ages), max(ages))


def test_rollouts_run_during_training(tmp_path):
    """Training of each step but the last waits until the whole next step has been played: if rollouts waited for
    training, the run would never end."""
    done = asyncio.Event()

    class Watch(Callback):
        count = 0

        def on_episode(self, episode):
            self.count += 1
            done.set()

    watch = Watch()

    async def wait_for_next_step(trained):
        while watch.count < min(3 * (trained + 2), 12):
            done.clear()
            await done.wait()

    setup = toy(1, [(4, 3)], no_gate, during=wait_for_next_step)
    with Run.create(tmp_path, "") as run:
        assert run_training(setup, run, watch)


def test_slow_episode_blocks_training_only_at_the_staleness_bound(tmp_path):
    """Episode 0 (of two per step) waits until all episodes that may start before it ends have started."""
    began: list[int] = []

    async def gates(number):
        if number == 0:
            while len(began) < 6:
                await asyncio.sleep(0.001)
            for _ in range(50):
                await asyncio.sleep(0)
            assert sorted(began) == list(range(6))  # steps 0, 1 and 2

    path = run_toy(toy(2, [(6, 2)], gates, began=began), tmp_path)
    assert not any(e.error for episodes in recorded(path) for e in episodes)
    assert sorted(began) == list(range(12))


def test_failed_episode_counts_and_is_recorded(tmp_path):
    async def gates(number):
        if number % 4 == 1:
            raise OSError("lost")

    path = run_toy(toy(1, [(3, 4)], gates), tmp_path)
    lines = [line for line in read_lines(path / "metrics.jsonl") if line["policy"] == TEAM]
    assert [(line["episodes"], line["failed"]) for line in lines] == [(4, 1)] * 3
    assert [e.error for e in recorded(path)[2]] == [None, "OSError: lost", None, None]


def test_training_error_propagates_and_cancels_rollouts(tmp_path):
    async def fails(trained):
        if trained == 1:
            raise ValueError("the gradient's norm is nan")

    async def endless(number):
        if number > 4:
            await asyncio.Event().wait()

    trainer = toy(2, [(6, 2)], endless, during=fails)
    with Run.create(tmp_path, "") as run, pytest.raises(ValueError, match="norm is nan"):
        run_training(trainer, run)
    assert trainer.rollouts.tasks and all(task.done() for task in trainer.rollouts.tasks.values())


def test_evaluations_run_at_their_interval(tmp_path):
    setup = toy(2, [(5, 2)], no_gate)
    seats = setup.stages[0].source.seats
    setup.evals = [TextEval(name="dev", episodes=3, every=2, runner=EpisodeRunner(Whisper, "dev"), seat_policies=seats)]
    path = run_toy(setup, tmp_path)
    assert [line["step"] for line in read_lines(path / "evals.jsonl")] == [-1, 1, 3, 4]


def test_buffer_keeps_episodes_needed_by_checkpoints_and_is_removed_at_the_end(tmp_path):
    """Checkpoints after steps 1, 3, 5, ...: a run may resume from the newest two."""
    kept = {}

    class Look(Callback):
        def on_step(self, step, metrics):
            names = (file.name for file in (run.path / "buffer").glob("episode-*"))
            kept[step] = min(int(name[8:14]) for name in names)

    with Run.create(tmp_path, "") as run:
        assert run_training(toy(1, [(8, 2)], no_gate, checkpoint_every=2), run, Look())
        assert not (run.path / "buffer").exists()
    assert kept == {0: 0, 1: 0, 2: 0, 3: 0, 4: 4, 5: 4, 6: 8, 7: 8}


def test_stopped_run_keeps_started_episodes_and_does_not_replay_them(tmp_path):
    finished: list[int] = []

    class Count(Callback):
        def on_episode(self, episode):
            finished.append(episode.seed)

    with Run.create(tmp_path, "x: 1") as run:
        assert not run_training(toy(2, [(6, 3)], no_gate), run, Count(), should_stop=lambda: len(finished) >= 9)
        path, step = run.path, list_checkpoints(run.path)[-1].step
        assert sorted(finished) == list(range(3 * (step + 3))) and run.next_step == step + 1
    with Run.open(path) as run:
        again = toy(2, [(6, 3)], no_gate)
        assert restore_checkpoint(again, run) == step + 1 and again.learners["guide"].version == step + 1
        assert run_training(again, run, Count())
    assert sorted(finished) == [e.seed for episodes in recorded(path) for e in episodes] == list(range(18))


# ---- language models


def config(base, *changes, **tree):
    speech = {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 2}}
    whole = {
        "name": "ahead",
        "steps": 9,
        "episodes": 6,
        "staleness": 2,
        "env": {"type": "helpers.toys:Whisper", "turns": 2},
        "policies": {"guide": speech | {"history": "conversation"}, "walker": speech | {"batch_size": 10}},
        "algorithm": {"type": "grpo", "group_size": 4},
        "checkpoint_every": 3,
    }
    return validate(TextConfig, override(whole | tree, changes))


def played(config, folder, watcher=None):
    with Run.create(folder, dump(config), config.name) as run:
        assert run_training(build(config), run, watcher)
        return run.path


def resume(path):
    setup = build(validate(TextConfig, parse((path / "config.yaml").read_text())))
    with Run.open(path) as run:
        first = restore_checkpoint(setup, run)
        assert run_training(setup, run)
    return first


@pytest.mark.slow
def test_two_agents_learn_from_episodes_of_staleness_one(base, tmp_path):
    speech = {"type": "lora", "base": str(base), "lr": 1e-2, "sampling": {"max_tokens": 1}}
    whole = {
        "staleness": 1,
        "steps": 30,
        "episodes": 32,
        "env": {"type": "helpers.toys:Whisper"},
        "checkpoint_every": 100,
    }
    evals = {"test": {"episodes": 200, "env": {"split": "test"}}}
    policies = {"guide": speech, "walker": speech}
    path = played(config(base, "algorithm.group_size=8", policies=policies, evals=evals, **whole), tmp_path)
    before, after = (line["success"] for line in read_lines(path / "evals.jsonl"))
    assert before < 0.5 and after > 0.85
    ages = [line["staleness"] for line in read_lines(path / "metrics.jsonl") if line["policy"] == "walker"]
    assert ages == [0.0] + [1.0] * 29


MIXES = {
    "one env": {},
    "two envs": {
        "env": {},
        "envs": {"short": {"type": "helpers.toys:Whisper"}, "long": {"type": "helpers.toys:Whisper", "turns": 2}},
        "mix": {"curriculum": "frontier"},
    },
    "stages": {"stages": [{"steps": 4}, {"steps": 5, "episodes": 4, "algorithm": {"type": "sft", "group_size": 2}}]},
    "corrected": {"algorithm": {"type": "grpo", "group_size": 4, "importance_cap": 2.0}},
    "in flight": {"in_flight_updates": "recompute_kv", "eval_sampling": {"max_tokens": 2}},
}


@pytest.mark.parametrize("changes", MIXES.values(), ids=MIXES)
@pytest.mark.few(1)
def test_resume_after_kill_is_bit_identical(base, tmp_path, changes):
    """Killed after step 7, three steps after its checkpoint, with episodes of later steps in the buffer."""
    whole = config(base, keep_every=3, **changes)

    class Freezes(Callback):
        def on_step(self, step, metrics):
            if step == 7:
                (live,) = (tmp_path / "whole").iterdir()
                shutil.copytree(live, tmp_path / "killed", ignore=shutil.ignore_patterns(".tmp-*"))

    path, killed = played(whole, tmp_path / "whole", Freezes()), tmp_path / "killed"
    assert len(read_lines(killed / "metrics.jsonl")) == 8 * 3 and list_checkpoints(killed)[-1].step == 5
    finished = {f.name: f.read_bytes() for f in (killed / "buffer").glob("episode-*")}
    assert resume(killed) == 6
    theirs = read_lines(path / "metrics.jsonl")
    ours = read_lines(killed / "metrics.jsonl")
    assert ours[: 8 * 3] == theirs[: 8 * 3]
    assert [(line["step"], line["policy"]) for line in ours] == [(line["step"], line["policy"]) for line in theirs]
    for step in range(8):
        name = f"episodes/step-{step:06d}.parquet"
        assert (killed / name).read_bytes() == (path / name).read_bytes(), name
    assert_trained(killed, finished)


def assert_trained(path, finished):
    """Asserts that every finished episode was trained on unchanged from the buffer, token for token."""
    setup = build(validate(TextConfig, parse((path / "config.yaml").read_text())))
    trained = dict(enumerate(e for episodes in recorded(path) for e in episodes))
    assert [e.seed for e in trained.values()] == list(range(setup.position_of(setup.steps - 1).episode_numbers.stop))
    scratch = path.parent / "one.parquet"
    for name, data in finished.items():
        scratch.write_bytes(data)
        (kept,) = load_episodes(scratch)
        assert answers_of(kept) == answers_of(trained[int(name[8:14])]), name


def answers_of(episode):
    """The prompts and answers, with their policy versions and log-probabilities."""
    return (
        episode.env,
        episode.seats,
        [
            (seat, answer.policy, answer.prompt_ids.tolist(), answer.token_ids.tolist(), answer.logprobs.tolist())
            for node in episode.nodes
            for seat, answer in node.answers.items()
        ],
    )


def test_no_deadlock_if_half_of_the_episodes_block(base, tmp_path):
    setup = build(config(base, steps=4))
    setup.stages[0].source.runners["train"] = EpisodeRunner(Slow, "train")
    with Run.create(tmp_path, "", "slow") as run:
        assert run_training(setup, run)
        steps = recorded(run.path)
    assert [e.seed for episodes in steps for e in episodes] == list(range(24))
    for episodes in steps:
        assert len({tuple(e.seats.values()) for e in episodes}) == 1  # all episodes of a step started together
        assert not any(e.error for e in episodes)


# ---- one engine for sampling and training


def samples(count, seed=0):
    rng = np.random.default_rng(seed)
    ids = [rng.integers(5, 250, 12).astype(np.int32) for _ in range(count)]
    return [Sample(i[:6], i[6:], np.full(6, -2, np.float32), np.full(6, 1.0, np.float32)) for i in ids]


def learner_of(engine, sampler=None):
    policy = LoraPolicyConfig(micro_batch_tokens=40)
    return LanguageLearner(
        "a", policy, build_weights(policy, engine, seed=1), sampler or Sampler(engine), engine.tokenizer
    )


def asked(seed, adapter=None, keep=False, n=3):
    prompt = np.random.default_rng(seed).integers(5, 250, 8).astype(np.int32)
    return Request(prompt, n, SamplingConfig(max_tokens=12, stop_at_eos=False), adapter, seed, keep)


def test_gradients_are_unaffected_by_sampling_in_between():
    engine, batch = tiny_lm(3), samples(16)
    assert len(micro_batches(batch, 40)) > 4
    alone = learner_of(engine)
    figures = alone.weights.forward_backward(batch, clipped_policy_loss)
    busy = learner_of(engine)
    quiet = Sampler(engine).sample_all([asked(s) for s in range(3)])

    async def both():
        sampled = asyncio.gather(*(busy.sampler.sample(asked(s)) for s in range(3)))
        figures = await busy.forward_backward(batch, clipped_policy_loss)
        return figures, busy.sampler.batch.counts["sampled_tokens"], await sampled

    for mine, theirs in zip(asyncio.run(busy.logprobs(batch)), alone.weights.logprobs(batch), strict=True):
        assert mine.tobytes() == theirs.tobytes()
    ours, meanwhile, answers = asyncio.run(both())
    assert ours == figures and meanwhile > 0  # tokens were sampled before training ended
    for one, other in zip(alone.weights.parameters, busy.weights.parameters, strict=True):
        assert torch.equal(one.grad, other.grad)
    for mine, theirs in zip(answers, quiet, strict=True):
        assert [a.token_ids.tolist() for a in mine] == [a.token_ids.tolist() for a in theirs]


def test_remote_training_does_not_block_the_event_loop():
    """Remote weights block the caller that waits for them, and no other coroutine."""
    import threading

    class Elsewhere:
        def forward_backward(self, samples, loss, **options):
            assert moved.wait(30)
            return {"loss": 1.0}

    moved = threading.Event()
    engine = tiny_lm(3)
    learner = LanguageLearner("a", LoraPolicyConfig(), Elsewhere(), Sampler(engine), engine.tokenizer)

    async def both():
        training = asyncio.create_task(learner.forward_backward([], clipped_policy_loss))
        await asyncio.sleep(0.01)
        moved.set()
        return await training

    assert asyncio.run(both()) == {"loss": 1.0}


@pytest.mark.parametrize("keep", [False, True])
def test_clearing_the_sampler_cache_does_not_change_running_requests(keep):
    """After each token of answers of several snapshots, and of turns that continue from kept prefixes: prompts are then
    computed again, equal up to rounding."""
    engine = tiny_lm(3)
    snapshots = [learner_of(engine).weights.snapshot(f"a@{i}") for i in range(2)]
    for i, snapshot in enumerate(snapshots):
        for a, b in snapshot.weights.values():
            b += 0.05 * (i + 1) * torch.randn(b.shape, generator=torch.Generator().manual_seed(i)) + 0 * a.sum()

    def turns(forgets):
        sampler, results = Sampler(engine), []
        requests = [asked(i, snapshot, keep) for i, snapshot in enumerate([*snapshots, None])]
        for _ in range(2):
            outcomes = [None] * len(requests)
            for i, request in enumerate(requests):
                sampler.submit(request, lambda outcome, i=i, outcomes=outcomes: outcomes.__setitem__(i, outcome))
            while sampler.step():
                if forgets:
                    sampler.clear_cache()
            results += [answer for outcome in outcomes for answer in outcome]
            requests = [
                Request(
                    np.concatenate([r.prompt_ids, o[0].token_ids, r.prompt_ids[:2]]), 3, r.sampling, r.adapter, 9, keep
                )
                for r, o in zip(requests, outcomes, strict=True)
            ]
        return results, sampler.batch.counts["reused_tokens"]

    (ours, reused), (theirs, reused_before) = turns(True), turns(False)
    assert reused == 0 and bool(reused_before) == keep
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=LOGPROB_ATOL if keep else 0, rtol=0)


# ---- kills


def seen_in(run):
    """The state left by a killed process: finished episodes, trained ones, and complete lines of metrics."""
    finished = {f.name: f.read_bytes() for f in (run / "buffer").glob("episode-*")}
    trained = {f.name: f.read_bytes() for f in (run / "episodes").glob("step-*")}
    lines = (run / "metrics.jsonl").read_bytes() if (run / "metrics.jsonl").exists() else b""
    return finished, trained, lines[: lines.rfind(b"\n") + 1]


def lines_of(run):
    return len(read_lines(run / "metrics.jsonl"))


def kill_repeatedly(folder, base, kills, steps):
    """Trains a run that is killed each time it has trained up to four more steps, and some milliseconds later; returns
    the state left by each process, and the run."""
    folder.mkdir()
    tree = config(
        base, steps=steps, env={"type": "text.training.test_async_rollouts:Slow", "seconds": 0.01}
    ).model_dump(mode="json")
    (folder / "ahead.yaml").write_text(yaml.safe_dump(tree))
    rng, run, left = random.Random(kills), folder / "runs" / "ahead", []
    process = start(folder, "ahead.yaml")
    while len(left) < kills:
        while not ((lock := run / ".lock").exists() and lock.read_text().startswith(f"process {process.pid} on ")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.002)
        kept = list_checkpoints(run)
        target = 3 * (kept[-1].step + 1 if kept else 0) + rng.uniform(0, 3 * 4)
        while lines_of(run) < target and process.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.06))
        process.kill()
        process.communicate()
        assert process.returncode == -9, f"the run ended after {len(left)} kills: give it more steps"
        left.append(seen_in(run))
        process = start(folder, "--resume", run, forked=kills == 1 or len(left) < kills)  # else with another hash seed
    finish(process)
    return run, left


def assert_nothing_was_lost(run, left, steps):
    metrics = (run / "metrics.jsonl").read_bytes()
    names = [(line["step"], line["policy"]) for line in map(json.loads, metrics.splitlines())]
    assert names == [(step, name) for step in range(steps) for name in ("guide", "walker", TEAM)]
    assert all(line["staleness_max"] <= 2 for line in map(json.loads, metrics.splitlines()) if line["policy"] != TEAM)
    for finished, trained, lines in left:
        assert metrics.startswith(lines)  # episodes that were trained on again are the same
        assert all((run / "episodes" / name).read_bytes() == data for name, data in trained.items())
        assert_trained(run, finished)
    for (before, _, _), (after, _, _) in pairwise(left):
        numbers = {name[8:14]: name for name in before}
        again = {name: data for name, data in after.items() if name[8:14] in numbers}
        assert all(before.get(name) == data for name, data in again.items())  # no episode was played twice
    assert max(len(finished) for finished, _, _ in left) > 6 and not (run / "buffer").exists()


@pytest.mark.slow
def test_a_kill_loses_no_episode(base, tmp_path):
    assert_nothing_was_lost(*kill_repeatedly(tmp_path / "a", base, 1, 8), 8)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_kills_lose_no_episode(base, tmp_path):
    assert_nothing_was_lost(*kill_repeatedly(tmp_path / "a", base, 20, 60), 60)
