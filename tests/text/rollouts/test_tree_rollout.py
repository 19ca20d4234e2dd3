"""Tree rollouts: nodes, observations, failures and reproducibility."""

import asyncio
import math
import os
import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from helpers.toys import Spoken, Whisper

from palestra.core.failures import ContextLengthExceeded
from palestra.core.seeding import derive_seed
from palestra.core.types import Episode, Step
from palestra.engine.sampling.request import check_prompt
from palestra.envs.base import Env
from palestra.testing import tiny_lm
from palestra.text.algorithms.grpo import GRPO
from palestra.text.policies.base import request_error
from palestra.text.policies.scripted import RandomPolicy, ScriptedPolicy
from palestra.text.rollouts.metrics import episode_metrics, policy_metrics
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec


class Count(Env):
    """One seat answers with a number, `turns` times; the number is its reward, and it observes all earlier numbers."""

    name = "count"
    seats = ("a",)
    roles = {"a": "count"}

    def __init__(self, turns=2):
        self.turns = turns

    def reset(self, seed):
        self.said = []
        return Step({"a": "-"})

    def step(self, actions):
        self.said.append(actions["a"])
        over = len(self.said) == self.turns
        return Step({} if over else {"a": " ".join(self.said)}, {"a": float(actions["a"])}, info={"success": over})


class Both(Env):
    """Two seats answer at the same time, `turns` times; the team is paid if they agree."""

    name = "both"
    seats = ("a", "b")

    def __init__(self, turns=2):
        self.turns = turns

    def reset(self, seed):
        self.said = []
        return Step({"a": "", "b": ""})

    def step(self, actions):
        assert set(actions) == {"a", "b"}
        self.said.append((actions["a"], actions["b"]))
        seen = {} if len(self.said) == self.turns else {"a": str(self.said), "b": str(self.said)}
        return Step(seen, team_reward=float(actions["a"] == actions["b"]))


def grow(make_env, branching, *, script=lambda query, i: str(i), seats=("a",), matches=1, seed=0, **options):
    team = {seat: Spoken(f"{seat}@1", script) for seat in seats}
    specs = [EpisodeSpec(i, team, seed + i, **options) for i in range(matches)]
    return asyncio.run(EpisodeRunner(make_env, "toy").play_all(specs, branching)), team


def shape(episode: Episode):
    return [(n.id, n.parent, n.depth, n.chosen, n.done, n.answers["a"].text) for n in episode.nodes]


# ---- context limit


def crowded(query, i):
    """Answers with its number; in trajectories that began with 1, the third prompt exceeds the context."""
    if query.observation.startswith("1 "):
        raise ContextLengthExceeded("context length")
    return str(i)


def test_trajectory_beyond_the_context_is_truncated_without_its_siblings():
    (episode,), _ = grow(lambda: Count(3), Branching("root", 2), script=crowded)
    assert episode.error is None
    lines = [episode.trajectory(leaf) for leaf in episode.leaves()]
    assert sorted([node.answers["a"].text for node in line] for line in lines) == [["0", "0", "0"], ["1", "0"]]
    cut = next(line[-1] for line in lines if len(line) == 2)
    assert cut.done and cut.truncated and not cut.info["success"] and cut.info["context_full"]
    metrics = episode_metrics([episode])
    assert metrics["context_full_fraction"] == 0.5 and metrics["success"] == 0.5 and metrics["failed"] == 0
    (group,) = GRPO(branch_at="root", group_size=2).groups(episode)
    assert sorted(group.values) == [0, 1]  # rewards before the limit count


def test_turn_tree_ends_if_its_best_sibling_exceeds_the_context():
    (episode,), _ = grow(lambda: Count(3), Branching("turn", 2, "best"), script=crowded)
    assert episode.error is None and [(n.done, n.truncated) for n in episode.nodes][-2:] == [
        (False, False),
        (True, True),
    ]
    assert len(episode.nodes) == 4


def test_a_first_prompt_that_does_not_fit_is_an_error():
    def never(query, i):
        raise ContextLengthExceeded("context length")

    (episode,), _ = grow(Count, Branching("root", 2), script=never)
    assert episode.error == "ContextLengthExceeded: context length"


def test_engine_and_servers_report_prompts_beyond_the_context():
    engine = tiny_lm()
    with pytest.raises(ContextLengthExceeded):
        check_prompt(engine, np.arange(5, 10), 508)
    check_prompt(engine, np.arange(5, 10), 507)
    said = "This model's maximum context length is 32 tokens. However, you requested 40 tokens"
    assert isinstance(request_error(said), ContextLengthExceeded)
    assert not isinstance(request_error("no such model"), ContextLengthExceeded)


# ---- shapes of trees


def test_unbranched_episode_is_a_tree_with_one_branch():
    (episode,), _ = grow(lambda: Count(3), Branching())
    assert shape(episode) == [(0, None, 0, True, False, "0"), (1, 0, 1, True, False, "0"), (2, 1, 2, True, True, "0")]
    assert episode.seats == {"a": "a@1"} and episode.error is None and episode.success == 1.0


def test_keep_best_continues_from_the_highest_reward():
    (episode,), _ = grow(Count, Branching("turn", 3, "best"), script=lambda query, i: str((i * 2) % 3))  # 0 2 1
    assert shape(episode) == [
        (0, None, 0, False, False, "0"),
        (1, None, 0, True, False, "2"),
        (2, None, 0, False, False, "1"),
        (3, 1, 1, False, True, "0"),
        (4, 1, 1, True, True, "2"),
        (5, 1, 1, False, True, "1"),
    ]
    assert [n.id for n in episode.trajectory(episode.nodes[5])] == [1, 5]
    assert episode_metrics([episode])["steps_per_episode"] == 2  # siblings that were not continued are not trajectories


def test_keep_best_uses_the_mixed_reward_of_acting_seats():
    class Mixed(Env):
        seats = ("a", "b")

        def reset(self, seed):
            return Step({"a": ""})

        def step(self, actions):
            i = float(actions["a"])
            return Step({}, {"a": i, "b": -100 * i}, team_reward=-3 * i)

    def picked(alpha):
        (episode,), _ = grow(Mixed, Branching("turn", 2, "best", team_weight=alpha))
        return next(n.id for n in episode.nodes if n.chosen)

    assert picked(alpha=0.2) == 1 and picked(alpha=1.0) == 0  # b did not act: its reward is not counted


def test_keep_all_grows_the_full_tree():
    (episode,), _ = grow(lambda: Count(3), Branching("turn", 2, "all"))
    assert len(episode.nodes) == 2 + 4 + 8 and all(n.chosen for n in episode.nodes)
    assert [n.depth for n in episode.nodes] == [0] * 2 + [1] * 4 + [2] * 8
    lines = [[n.answers["a"].text for n in episode.trajectory(leaf)] for leaf in episode.leaves()]
    assert sorted(lines) == [list(f"{i:03b}") for i in range(8)]


def test_root_branching_samples_whole_trajectories():
    (episode,), team = grow(lambda: Count(3), Branching("root", 4), script=lambda query, i: str((query.seed + i) % 97))
    assert [(n.parent, n.depth) for n in episode.nodes] == [(None, 0)] * 4 + [(i, 1) for i in range(4)] + [
        (i, 2) for i in range(4, 8)
    ]
    assert [q.n for q in team["a"].queries] == [4] + [1] * 8
    assert len({q.seed for q in team["a"].queries}) == 9  # trajectories draw independently
    assert len(episode.leaves()) == 4


def test_node_ids_are_indices_and_parents_precede_children():
    for branching in (Branching("root", 3), Branching("turn", 2, "all"), Branching("turn", 3, "random")):
        (episode,), _ = grow(lambda: Count(4), branching)
        for i, node in enumerate(episode.nodes):
            assert node.id == i and (node.parent is None or node.parent < i)
            assert node.depth == (0 if node.parent is None else episode.nodes[node.parent].depth + 1)


@pytest.mark.parametrize(
    ("keep", "epsilon", "share"), [("best", 0.3, 1.0), ("random", 0.3, 0.25), ("epsilon", 0.4, 0.6 + 0.4 / 4)]
)
@pytest.mark.few(1)
def test_epsilon_sets_how_often_the_best_sibling_is_kept(keep, epsilon, share):
    episodes, _ = grow(lambda: Count(4), Branching("turn", 4, keep, epsilon), matches=250)
    picks = [n.answers["a"].text for e in episodes for n in e.nodes if n.chosen]
    assert len(picks) == 1000
    assert picks.count("3") / 1000 == pytest.approx(share, abs=0.045)  # three standard errors
    others = {text: picks.count(text) / 1000 for text in "012"}
    assert all(value == pytest.approx((1 - share) / 3, abs=0.045) for value in others.values())


def test_random_sibling_choices_differ_between_steps():
    episodes, _ = grow(lambda: Count(6), Branching("turn", 4, "random"), matches=5)
    assert all(len({n.answers["a"].text for n in e.nodes if n.chosen}) > 1 for e in episodes)


# ---- joint steps


def test_simultaneous_seats_share_a_node_and_one_env_step():
    (episode,), team = grow(lambda: Both(2), Branching("turn", 3, "best"), seats=("a", "b"))
    assert [len(n.answers) for n in episode.nodes] == [2] * 6
    for i, node in enumerate(episode.nodes[:3]):
        assert {seat: a.text for seat, a in node.answers.items()} == {"a": str(i), "b": str(i)}
        assert node.observations == {"a": "", "b": ""} and node.team_reward == 1.0
    assert {q.seed for q in team["a"].queries}.isdisjoint(q.seed for q in team["b"].queries)
    assert episode.nodes[3].observations["b"] == "[('0', '0')]"


def test_turn_based_nodes_have_one_acting_seat():
    (episode,), _ = grow(Whisper, Branching("turn", 2, "best"), seats=("guide", "walker"))
    assert [list(n.answers) for n in episode.nodes] == [["guide"]] * 2 + [["walker"]] * 2
    assert episode.nodes[2].parent in (0, 1)


def test_episode_done_at_reset_is_a_node_without_answers():
    class Solved(Count):
        def reset(self, seed):
            return Step({}, team_reward=1.0, info={"success": seed == 0})

    episodes, _ = grow(Solved, Branching("turn", 2, "best"), matches=2)
    assert [(n.answers, n.done) for e in episodes for n in e.nodes] == [({}, True)] * 2
    figures = episode_metrics(episodes)
    assert figures["failed"] == figures["steps_per_episode"] == 0
    assert figures["success"] == 0.5 and figures["return"] == 1.0
    assert list(GRPO(group_size=2).groups(episodes[0])) == []


# ---- queries of policies


@pytest.mark.parametrize("branching", [Branching("root", 3), Branching("turn", 3, "best"), Branching("turn", 2, "all")])
def test_history_holds_the_seats_own_turns_of_the_trajectory(branching):
    (episode,), team = grow(lambda: Count(3), branching)
    asked = {q.observation: q for q in team["a"].queries}
    for node in episode.nodes:
        query = asked[node.observations["a"]]
        before = episode.trajectory(node)[:-1]
        expected = [(n.observations["a"], n.answers["a"].text) for n in before]
        assert [(seen, answer.text) for seen, answer in query.history] == expected
        assert [answer for _, answer in query.history] == [n.answers["a"] for n in before]
        assert query.role == "count"


def test_histories_of_seats_are_separate():
    _, team = grow(lambda: Whisper(turns=3), Branching(), seats=("guide", "walker"))
    for seat, length in (("guide", 7), ("walker", 7)):
        queries = team[seat].queries
        assert [len(q.history) for q in queries] == [0, 1, 2]
        seen = [observation for observation, _ in queries[-1].history]
        assert seen == [q.observation for q in queries[:-1]] and {len(s) for s in seen} == {length}
        assert {answer.policy for _, answer in queries[-1].history} == {f"{seat}@1"}


def test_legal_actions_are_passed_to_their_seat():
    class Legal(Count):
        def reset(self, seed):
            super().reset(seed)
            return Step({"a": "-"}, legal_actions={"a": ["7"]})

    _, team = grow(Legal, Branching())
    assert [q.legal_actions for q in team["a"].queries] == [["7"], None]


# ---- determinism


def drawn(seed, branching, make_env=lambda: Count(3), matches=3):
    policy = RandomPolicy([str(i) for i in range(100)], length=1)
    tree = asyncio.run(
        EpisodeRunner(make_env, "toy").play_all(
            [EpisodeSpec(i, {"a": policy}, derive_seed(seed, i)) for i in range(matches)], branching
        )
    )
    return [(e.seed, shape(e)) for e in tree]


TREES = [Branching(), Branching("root", 3), Branching("turn", 3, "epsilon", 0.5), Branching("turn", 2, "all")]


@pytest.mark.parametrize("branching", TREES, ids=str)
def test_trees_are_reproducible_from_the_seed(branching):
    assert drawn(1, branching) == drawn(1, branching)
    assert drawn(1, branching) != drawn(2, branching)


@pytest.mark.parametrize("branching", TREES, ids=str)
def test_episodes_are_independent_of_the_batch(branching):
    assert drawn(1, branching, matches=5)[:2] == drawn(1, branching, matches=2)


class Late(Count):
    """Takes a time that differs between steps and between instances of this class."""

    async def reset(self, seed):
        return super().reset(seed)

    async def step(self, actions):
        await asyncio.sleep(random.SystemRandom().uniform(0, 0.01))
        return super().step(actions)

    async def fork(self):
        return super().fork()

    async def close(self):
        pass


class Blocking(Count):
    blocking = True

    def step(self, actions):
        time.sleep(random.SystemRandom().uniform(0, 0.01))
        return super().step(actions)


@pytest.mark.parametrize("branching", TREES, ids=str)
@pytest.mark.parametrize("make_env", [lambda: Late(3), lambda: Blocking(3)], ids=["coroutines", "threads"])
def test_results_do_not_depend_on_step_timing(branching, make_env):
    """Coroutine and blocking envs give exactly the trees of the plain env: ids, draws and order."""
    assert drawn(1, branching, make_env) == drawn(1, branching)


# ---- concurrency


class Meeting(Count):
    """Its step returns only when `guests` steps run at the same time: sequential steps would never return."""

    blocking = True
    guests = threading.Barrier(60, timeout=30)

    def step(self, actions):
        self.guests.wait()
        time.sleep(0.05)
        return super().step(actions)

    def fork(self):
        return type(self)(self.turns)


def test_blocking_env_steps_of_episodes_run_concurrently():
    episodes, _ = grow(lambda: Meeting(1), Branching(), matches=60)
    assert [e.error for e in episodes] == [None] * 60


def test_blocking_env_steps_of_siblings_run_concurrently():
    class Forked(Meeting):
        def step(self, actions):
            self.said = []
            return super().step(actions)

    (episode,), _ = grow(lambda: Forked(1), Branching("turn", 60, "best"))
    assert episode.error is None and len(episode.nodes) == 60


def test_twenty_blocking_steps_of_50_ms_overlap():
    class SlowStep(Count):
        blocking = True

        def step(self, actions):
            time.sleep(0.05)
            return super().step(actions)

    best = math.inf
    for _ in range(3):  # the best of three, since the machine may be busy
        start = time.perf_counter()
        grow(lambda: SlowStep(1), Branching(), matches=20)
        best = min(best, time.perf_counter() - start)
    assert best < 0.5


def test_open_episodes_are_limited():
    open_now = most = 0

    class Counted(Count):
        async def step(self, actions):
            nonlocal open_now, most
            open_now += 1
            most = max(most, open_now)
            await asyncio.sleep(0.002)
            open_now -= 1
            return super().step(actions)

    team = {"a": Spoken("a", lambda query, i: "1")}
    asyncio.run(
        EpisodeRunner(Counted, "toy", max_concurrent=3).play_all(
            [EpisodeSpec(i, team, i) for i in range(12)], Branching()
        )
    )
    assert most == 3


def test_on_episode_is_called_once_per_episode():
    done = []
    team = {"a": Spoken("a", lambda query, i: "1")}
    episodes = asyncio.run(
        EpisodeRunner(Count, "toy").play_all([EpisodeSpec(i, team, i) for i in range(5)], Branching(), done.append)
    )
    assert sorted(e.seed for e in done) == [e.seed for e in episodes] == [0, 1, 2, 3, 4]


# ---- failures are recorded


class Fragile(Count):
    """Instance 1 fails at `where`; every env records that it was closed."""

    where = ""
    opened: list
    closed: list

    def __init__(self):
        super().__init__(3)
        if self.where == "make":
            raise OSError("no sandbox")
        self.opened.append(self)

    def reset(self, seed):
        self.seed = seed
        self.fail("reset")
        return super().reset(seed)

    def step(self, actions):
        self.fail("step", len(self.said) == 1)
        step = super().step(actions)
        if self.where == "nan" and self.seed == 1:
            return Step(step.observations, {"a": float("nan")})
        return step

    def fork(self):
        self.fail("fork", len(self.said) == 1)
        twin = super().fork()
        twin.opened, twin.closed = self.opened, self.closed
        self.opened.append(twin)
        return twin

    def close(self):
        self.closed.append(self)
        self.fail("close")

    def fail(self, place, when=True):
        if self.where == place and self.seed == 1 and when:
            raise RuntimeError(f"broke in {place}")


def fragile(where, branching):
    kind = type("Fragile", (Fragile,), {"where": where, "opened": [], "closed": []})
    return kind, *grow(kind, branching, matches=4, script=lambda query, i: str(i))


@pytest.mark.parametrize(
    "branching", [Branching(), Branching("root", 3), Branching("turn", 3), Branching("turn", 2, "all")]
)
@pytest.mark.parametrize("where", ["reset", "step", "fork", "close", "nan"])
@pytest.mark.few(6)
def test_failure_is_recorded_without_affecting_other_episodes(where, branching):
    _, episodes, _ = fragile(where, branching)
    if where == "fork":
        return  # the original plays on: see test_a_sibling_that_cannot_be_forked_is_lost_alone
    expected = "rewards must be finite" if where == "nan" else f"RuntimeError: broke in {where}"
    assert expected in episodes[1].error and episodes[1].success is None
    assert [e.error for e in episodes if e.seed != 1] == [None] * 3
    _, healthy, _ = fragile("nowhere", branching)
    assert [shape(e) for e in episodes if e.seed != 1] == [shape(e) for e in healthy if e.seed != 1]
    figures = episode_metrics(episodes)
    assert figures["episodes"] == 4 and figures["failed"] == 1 and figures["success"] == 1.0
    assert policy_metrics(episodes, "a")["answers"] == sum(len(e.nodes) for e in episodes if e.seed != 1)


@pytest.mark.parametrize(
    "branching", [Branching(), Branching("root", 3), Branching("turn", 3), Branching("turn", 2, "all")]
)
@pytest.mark.parametrize("where", ["nowhere", "reset", "step", "fork", "close", "nan"])
@pytest.mark.few(6)
def test_envs_and_forks_are_closed_exactly_once(where, branching):
    kind, _, _ = fragile(where, branching)
    assert sorted(map(id, kind.closed)) == sorted(map(id, kind.opened))


class RecordsClose(Count):
    """A blocking env whose steps with the answer "0" fail at once, and other steps after the first take 0.2 s. Records
    whether an env was closed while a thread was in its step."""

    blocking = True
    stepping = False
    closed_in_step: list
    began: threading.Event

    def step(self, actions):
        if actions["a"] == "0" and len(self.said) == self.turns - 1:
            self.began.wait(10)
            raise RuntimeError("boom")
        self.stepping = True
        if len(self.said) == self.turns - 1:
            self.began.set()
            time.sleep(0.2)
        self.stepping = False
        return super().step(actions)

    def fork(self):
        twin = type(self)(self.turns)
        twin.said = list(self.said)
        return twin

    def close(self):
        self.closed_in_step.append(self.stepping)


def slow_step():
    return type("Slow", (RecordsClose,), {"closed_in_step": [], "began": threading.Event()})


@pytest.mark.parametrize(("turns", "branching"), [(1, Branching("root", 3)), (2, Branching("root", 3))], ids=str)
def test_envs_are_closed_after_the_steps_of_their_siblings(turns, branching):
    """Siblings step together at the root, then each on its own: the first fails, the others are in a step."""
    kind = slow_step()
    script = (lambda query, i: str(i)) if turns == 1 else lambda query, i: query.observation[-1].replace("-", str(i))
    (episode,), _ = grow(lambda: kind(turns), branching, script=script)
    assert episode.error is None and {n.error for n in episode.nodes if n.is_lost} == {"RuntimeError: boom"}
    assert kind.closed_in_step == [False] * 3


def test_cancelled_rollouts_close_their_envs_after_the_step():
    kind = slow_step()

    async def broken_off():
        team = {"a": Spoken("a@1", lambda query, i: "1")}
        playing = asyncio.create_task(EpisodeRunner(lambda: kind(1), "slow").play(EpisodeSpec(0, team, 0), Branching()))
        await asyncio.to_thread(kind.began.wait, 10)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        assert playing.cancelled()

    asyncio.run(broken_off())
    assert kind.closed_in_step == [False]


def test_failure_of_a_seat_ends_the_requests_of_the_others():
    """The other seat may be a person, who would take long."""
    ended = []

    class Slow(Spoken):
        async def act(self, query):
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(query.n)

    def fail(query, i):
        raise KeyError("lost")

    team = {"a": Spoken("a@1", fail), "b": Slow("b@1", lambda query, i: "1")}

    async def play():
        episode = await EpisodeRunner(lambda: Both(1), "toy").play(EpisodeSpec(0, team, 0), Branching())
        return episode.error, list(ended)

    assert asyncio.run(play()) == ("KeyError: 'lost'", [1])


def test_env_constructor_error_gives_a_failed_episode():
    _, episodes, _ = fragile("make", Branching())
    assert [e.error for e in episodes] == ["OSError: no sandbox"] * 4 and all(e.nodes == [] for e in episodes)


def test_policy_error_gives_a_failed_episode():
    def script(query, i):
        if query.observation == "0":
            raise KeyError("lost")
        return str(i)

    episodes, _ = grow(lambda: Count(2), Branching(), script=script, matches=2)
    assert [e.error for e in episodes] == ["KeyError: 'lost'"] * 2 and len(episodes[0].nodes) == 1


def test_seat_without_policy_is_named_in_the_error():
    (episode,), _ = grow(lambda: Both(1), Branching(), seats=("a",))
    assert 'env "toy" asks seat "b"' in episode.error


def test_observation_for_an_unknown_seat_is_reported():
    class Lost(Count):
        def reset(self, seed):
            return Step({"nobody": "-"})

    (episode,), _ = grow(lambda: Lost(1), Branching(), seats=("a",))
    assert 'env "count" asks seat "nobody", and its seats are a: add it to `seats`' in episode.error


def test_wrong_return_type_of_step_gives_an_explained_failure():
    class ReturnsTuple(Count):
        def step(self, actions):
            return {"a": "-"}, 0.0, True, False, {}

    (episode,), _ = grow(lambda: ReturnsTuple(1), Branching(), seats=("a",))
    assert "step must return a palestra.Step, and returned a tuple, as in Gymnasium" in episode.error
    assert episode.traceback == ""  # nothing but palestra's own check


def test_seat_that_never_acts_needs_no_policy():
    (episode,), _ = grow(lambda: Count(1), Branching(), seats=())
    assert 'asks seat "a"' in episode.error
    (episode,), _ = grow(lambda: Count(1), Branching(), seats=("a", "unheard of"))
    assert episode.error is None


# ---- lost branches


class OneBad(Count):
    """The step after the answer "2" fails, at the depth `bad_at`."""

    def __init__(self, turns=2, bad_at=0):
        super().__init__(turns)
        self.bad_at = bad_at

    def step(self, actions):
        if actions["a"] == "2" and len(self.said) == self.bad_at:
            raise ValueError("bad line")
        return super().step(actions)


@pytest.mark.parametrize("bad_at", [0, 1])
def test_error_in_one_trajectory_loses_it_alone(bad_at):
    def script(query, i):
        return str(i) if not query.history else query.history[-1][1].text

    (episode,), _ = grow(lambda: OneBad(2, bad_at), Branching("root", 4), script=script)
    assert episode.error is None and "bad line" in episode.traceback
    lost = [node for node in episode.nodes if node.is_lost]
    assert {n.answers["a"].text for n in lost} == {"2"} and len(lost) == bad_at + 1
    assert [n.answers["a"].text for n in episode.leaves()] == ["0", "1", "3"]
    (group,) = GRPO(branch_at="root", group_size=4).groups(episode)
    assert len(group.values) == 3 and group.lost == 1
    figures = episode_metrics([episode])
    assert figures["failed"] == 0 and figures["failed_branches"] == 1 and episode.failed_share == 0.25
    assert policy_metrics([episode], "a")["answers"] == 6


def test_error_of_one_sibling_of_a_turn_loses_it_alone():
    (episode,), _ = grow(lambda: OneBad(2, 0), Branching("turn", 3, "best"), script=lambda query, i: str(i))
    assert episode.error is None and [n.answers["a"].text for n in episode.nodes if n.chosen] == ["1", "2"]
    first, second = GRPO(group_size=3).groups(episode)
    assert (len(first.values), first.lost, len(second.values), second.lost) == (2, 1, 3, 0)


def test_in_a_full_tree_a_sibling_whose_continuations_are_all_lost_is_lost():
    class Narrow(Count):
        def step(self, actions):
            if self.said and self.said[0] == "1":
                raise ValueError("no way on")
            return super().step(actions)

    (episode,), _ = grow(lambda: Narrow(2), Branching("turn", 2, "all"), script=lambda query, i: str(i))
    assert [n.is_lost for n in episode.nodes] == [False, True, False, False, True, True]
    groups = list(GRPO(group_size=2, continue_from="all").groups(episode))
    assert [(len(group.values), group.lost) for group in groups] == [(1, 1), (2, 0)]


def test_if_all_siblings_are_lost_the_episode_fails():
    (episode,), _ = grow(lambda: OneBad(1), Branching("root", 3), script=lambda query, i: "2")
    assert episode.error == "ValueError: bad line" and episode.failed_share == 1.0
    assert episode_metrics([episode]) == {"episodes": 1.0, "failed": 1.0}


def test_a_sibling_that_cannot_be_forked_is_lost_alone():
    class Single(Count):
        def fork(self):
            raise OSError("no second copy")

    (episode,), _ = grow(lambda: Single(1), Branching("root", 3))
    assert episode.error is None and [n.is_lost for n in episode.nodes] == [True, True, False]


def test_a_fork_that_is_the_env_itself_is_lost():
    """Siblings that share an env would be paid by their order."""

    class Shared(Count):
        def fork(self):
            return self

    (episode,), _ = grow(lambda: Shared(1), Branching("root", 3))
    assert [n.is_lost for n in episode.nodes] == [True, True, False]
    assert "fork() returned the env itself: return a copy" in episode.nodes[0].error


def test_a_success_that_the_last_step_does_not_report_is_refused():
    class Early(Count):
        def step(self, actions):
            step = super().step(actions)
            return replace(step, info={} if step.done else {"success": True})

    (episode,), _ = grow(lambda: Early(3), Branching("root", 1))
    assert "reports a success in an earlier step and none in its last, which counts" in episode.error


def test_an_env_that_cannot_be_copied_is_told_to_define_fork():
    class Locked(Count):
        def reset(self, seed):
            self.lock = threading.Lock()
            return super().reset(seed)

    (episode,), _ = grow(lambda: Locked(3), Branching("root", 2))
    assert "Locked cannot be copied (cannot pickle '_thread.lock' object): define fork(self)" in episode.nodes[0].error


def test_a_reward_before_anybody_acts_is_refused():
    class Generous(Count):
        def reset(self, seed):
            return replace(super().reset(seed), rewards={"a": 5.0})

    (episode,), _ = grow(lambda: Generous(3), Branching("root", 1))
    assert 'env "count" pays in reset, before anybody acted: pay in the first step' in episode.error


class OwnExit(BaseException):
    """What no `except Exception` catches."""


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (SystemExit(0), "RuntimeError: it called sys.exit(0)"),
        (asyncio.CancelledError("no"), "RuntimeError: it raised CancelledError: no"),
        (OwnExit("gone"), "RuntimeError: it raised OwnExit: gone"),
        (BaseExceptionGroup("two", [OwnExit()]), "RuntimeError: it raised BaseExceptionGroup: two"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_an_env_that_raises_what_ends_a_run_loses_its_branch(raised, message, is_async):
    class Quits(Count):
        def step(self, actions):
            if is_async:
                return self._later()
            raise raised

        async def _later(self):
            await asyncio.sleep(0)
            raise raised

    (episode,), _ = grow(lambda: Quits(3), Branching("root", 1))
    assert message in episode.error


def test_a_rollout_that_is_cancelled_ends_though_its_env_waits():
    class Waits(Count):
        async def step(self, actions):
            await asyncio.sleep(60)

    async def cancelled():
        runner = EpisodeRunner(lambda: Waits(3), "count")
        policies = {seat: ScriptedPolicy(lambda query, rng: "1") for seat in Count.seats}
        task = asyncio.create_task(runner.play(EpisodeSpec(0, policies, 0), Branching()))
        await asyncio.sleep(0.05)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


def test_a_child_that_an_env_forks_does_not_go_on_as_the_run():
    class Forks(Count):
        def step(self, actions):
            self.child = os.fork()
            if self.child:
                assert os.waitpid(self.child, 0)[1] == 256  # it ended with status 1
            return super().step(actions)

    (episode,), _ = grow(lambda: Forks(3), Branching("root", 1))
    assert episode.error is None


def test_nodes_keep_what_was_observed_though_the_env_changes_it():
    class InPlace(Count):
        """Returns one dictionary of observations, of which it changes the values."""

        def reset(self, seed):
            self.seen = {"a": {"moves": []}}
            self.said = []
            return Step(self.seen)

        def step(self, actions):
            self.said.append(actions["a"])
            self.seen["a"]["moves"].append(actions["a"])
            if len(self.said) == self.turns:
                self.seen.clear()
            return Step(self.seen, {"a": 1.0})

    (episode,), _ = grow(lambda: InPlace(3), Branching("root", 1), script=lambda query, i: "x")
    assert episode.error is None
    assert [node.observations["a"] for node in episode.nodes] == [{"moves": ["x"] * n} for n in range(3)]


def test_failed_reward_is_the_reward_of_the_step_that_fails():
    (episode,), _ = grow(lambda: OneBad(1), Branching("root", 4), script=lambda query, i: str(i), failed_reward=-1.0)
    assert episode.error is None and episode.failed_share == 0.0
    assert [n.team_reward for n in episode.leaves()][2] == -1.0 and episode.nodes[2].error == "ValueError: bad line"
    (group,) = GRPO(branch_at="root", group_size=4).groups(episode)
    assert len(group.values) == 4 and group.lost == 0 and min(group.values) == group.values[2] == -1.0
    assert episode_metrics([episode])["failed_branches"] == 1


def test_a_trajectory_without_reward_is_left_out_and_did_not_fail():
    class Unjudged(Count):
        def step(self, actions):
            step = super().step(actions)
            return replace(step, info={"no_reward": actions["a"] != "0"})

    (episode,), _ = grow(lambda: Unjudged(1), Branching("root", 3), script=lambda query, i: str(i))
    assert episode.error is None and [n.error for n in episode.nodes] == [None, "no reward", "no reward"]
    assert episode_metrics([episode])["no_reward_branches"] == 2 and episode.failed_share == 0
    (none,), _ = grow(lambda: Unjudged(1), Branching(), script=lambda query, i: "1")
    figures = episode_metrics([none])
    assert none.error is None and not none.leaves() and (figures["episodes"], figures["failed"]) == (1, 0)
    silent = episode_metrics([none, episode])
    assert silent["return"] == sum(n.team_reward + n.rewards.get("a", 0) for n in episode.leaves())


# ---- metrics


def test_metrics_by_hand():
    """Two instances of two secrets: one trajectory ends right, one wrong."""

    def script(query, i):
        return "1" if query.role == "w" else str(i)

    episodes, _ = grow(lambda: Whisper(turns=2), Branching(), script=script, seats=("guide", "walker"), matches=8)
    wins = [e.nodes[-1].info["success"] for e in episodes]
    figures = episode_metrics(episodes)
    assert 0 < figures["success"] == sum(wins) / 8 < 1
    assert figures["steps_per_episode"] == 4
    assert figures["team_return"] == sum(n.team_reward for e in episodes for n in e.nodes) / 8
    guide = policy_metrics(episodes, "guide")
    paid = sum(n.team_reward for e in episodes for n in e.nodes)  # in the walker's steps
    assert guide["answers"] == 16 and guide["team_reward"] == paid / 16 and guide["invalid"] == 0
    assert guide["local_reward"] == sum(n.rewards.get("guide", 0) for e in episodes for n in e.nodes) / 16
    assert guide["tokens"] == len("guide@1:0") and guide["truncated_fraction"] == 0


@pytest.mark.parametrize("flag", [{"a": True, "b": False}, ["a"], {"a"}, ("a",)])
def test_env_info_flags_invalid_answers_per_seat(flag):
    class Flags(Both):
        def step(self, actions):
            step = super().step(actions)
            return Step(step.observations, info={"invalid": flag})

    episodes, _ = grow(lambda: Flags(1), Branching(), seats=("a", "b"))
    assert policy_metrics(episodes, "a")["invalid"] == 1 and policy_metrics(episodes, "b")["invalid"] == 0


# ---- policies without a model


def test_scripted_answers_depend_on_the_turn_only():
    """They do not depend on other seats: a resumed run must get the answers of an uninterrupted one."""
    policy = ScriptedPolicy(["4", "5", "6"])
    team = {"a": policy}
    episodes = asyncio.run(
        EpisodeRunner(lambda: Count(5), "toy").play_all([EpisodeSpec(i, team, i) for i in range(3)], Branching())
    )
    assert [[n.answers["a"].text for n in e.nodes] for e in episodes] == [["4", "5", "6", "4", "5"]] * 3


def test_random_policy_picks_legal_actions():
    from palestra.text.policies.base import Query

    answers = asyncio.run(RandomPolicy().act(Query("", "", n=50, seed=3, legal_actions=[1, 2, 3])))
    assert {a.text for a in answers} == {"1", "2", "3"}
    again = asyncio.run(RandomPolicy().act(Query("", "", n=50, seed=3, legal_actions=[1, 2, 3])))
    assert [a.text for a in again] == [a.text for a in answers]


def test_derived_seeds_have_fixed_values():
    assert derive_seed(0, "play", 3) == derive_seed(0, "play", 3) != derive_seed(0, "play", 4)
    assert derive_seed(1, "a", (0, 1)) == 5536374289449337412
    assert len({derive_seed(s, k) for s in range(50) for k in range(50)}) == 2500
    assert all(0 <= derive_seed(s) < 2**63 for s in range(50))


def test_endless_game_gives_a_failed_episode():
    team = {"a": Spoken("a@1", lambda query, i: "1")}
    arena = EpisodeRunner(lambda: Count(10**9), "toy", max_steps=7)
    (episode,) = asyncio.run(arena.play_all([EpisodeSpec(0, team, 0)], Branching()))
    assert "has not ended after 7 joint steps" in (episode.error or "") and len(episode.nodes) == 7


class NeverAnswers:
    """Never answers."""

    name = "thinker"

    def __init__(self):
        self.asked = asyncio.Event()

    async def act(self, query):
        self.asked.set()
        await asyncio.Event().wait()


def test_cancelled_rollouts_close_their_envs():
    kind, thinker = type("Fragile", (Fragile,), {"opened": [], "closed": []}), NeverAnswers()

    async def broken_off():
        playing = asyncio.create_task(
            EpisodeRunner(kind, "fragile").play(EpisodeSpec(0, {"a": thinker}, 0), Branching())
        )
        await thinker.asked.wait()
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        assert playing.cancelled()

    asyncio.run(broken_off())
    assert kind.opened and kind.opened == kind.closed
