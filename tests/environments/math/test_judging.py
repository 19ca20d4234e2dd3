"""Grading of answers: directly if they are plain, otherwise by math-verify, without blocking the event loop."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from palestra.environments.math.answer_extraction import final_answer, multiline_answer, parse_number, parse_relation
from palestra.environments.math.env import Math
from palestra.environments.math.grading import CORRECT, INCORRECT, UNREADABLE, AnswerGrade, grade_answer, grade_directly
from palestra.sandbox import client
from palestra.text.policies.scripted import ScriptedPolicy
from palestra.text.rollouts.tree_rollout import Branching, EpisodeRunner, EpisodeSpec

HANG = "(x+1)^{99999}"  # sympy would expand it
GOLD = "2\\sqrt{2}"  # not a plain number, so math-verify grades it
SAME = "\\sqrt{8}"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def graders():
    """Returns the process of the graders, None before the first request and if it has died: a fork server of this
    test alone."""
    client.stop_fork_server()

    def process():
        return client._held[0].process if client._held and client._held[0].is_usable() else None

    yield process
    client.stop_fork_server()


# ---- extraction of the answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 26", "26"),
        ("12 + 14\n#### 24\nNo:\n#### **26**.\nThat is it.", "26"),
        (r"So it is \boxed{\frac{7}{2}}, not \boxed{3.", None),
        (r"First \boxed{3}, then \boxed{\frac{7}{2}}.", r"\frac{7}{2}"),
        (r"#### \boxed{x > 3}", "x > 3"),
        ("#### $\\sqrt{2}$", r"\sqrt{2}"),
        ("26", None),
        ("####   ", None),
        ("", None),
    ],
)
def test_final_answer_is_extracted(text, answer):
    assert final_answer(text) == answer


def test_bare_text_is_an_answer_if_allowed():
    assert final_answer(" 26 \n ", allow_unmarked=True) == "26"
    assert final_answer("7 #### 26", allow_unmarked=True) == "26"


def test_multiline_answer_is_extracted():
    assert multiline_answer("Thus\n####\n1 0\n0 1\n") == "1 0\n0 1"
    assert multiline_answer("1 0\n0 1") is None
    assert multiline_answer("1 0\n0 1", allow_unmarked=True) == "1 0\n0 1"


# ---- direct grading


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("26", "26.0"),
        ("+26", "26"),
        ("x = -4", "-4"),
        ("\u22124", "-4"),
        ("1,234", "1234"),
        ("$72", "72"),
        ("$72$", "72."),
        ("7/2", "3.5"),
        ("0.333333", "1/3"),
        ("x > 3", "3 < x"),
        (r"x \le 7/2", "3.50 >= x"),
        ("( 1 , 2 )", "(1,2)"),
    ],
)
def test_equal_answers_are_graded_directly(one, other):
    assert grade_directly(one, other) == CORRECT
    assert grade_directly(other, one) == CORRECT


@pytest.mark.parametrize(
    ("one", "other"), [("26", "62"), ("0.33", "1/3"), ("1000001", "1000000"), ("x > 3", "x >= 3"), ("x > 3", "y > 3")]
)
def test_different_answers_are_graded_directly(one, other):
    assert grade_directly(one, other) == grade_directly(other, one) == INCORRECT


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("3", "3xy"), ("3 fish", "3xy"), ("6mn", "6ab"), ("2", "2xy^2"), ("-8", "-8mn"), ("3 fifths", "3"), ("3xy", "3")],
)
def test_number_is_not_a_term_and_not_a_part_of_one(answer, gold):
    assert asyncio.run(grade_answer(answer, gold)).score == 0


@pytest.mark.parametrize("answer", ["26cm", "26 cm", "26 men", "26 apples", "26m", r"26\text{ ab}", "26 km/h", "26 pm"])
def test_units_are_not_compared(answer):
    assert grade_directly(answer, "26") == grade_directly("26", answer) == CORRECT


@pytest.mark.parametrize("answer", ["1" + " " * 990 + "!", "1" + " a" * 490 + "!", "x" + " " * 990 + ">"])
def test_time_of_grading_does_not_grow_with_the_spaces(answer):
    started = time.perf_counter()
    assert grade_directly(answer, "26") == UNREADABLE
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize("answer", [None, "", "twenty-six", "9" * 2000, "x"])
def test_answers_without_number_are_unreadable(answer):
    assert grade_directly(answer, "26") == UNREADABLE


@pytest.mark.parametrize(
    "answer", ["12 + 14", "2 * 13", "26 * 1", r"\frac{52}{4}*2", "5^2 + 1", "26 = 26 = 26", "30 - 4", r"\sqrt{676}"]
)
def test_unevaluated_expressions_are_unreadable(answer):
    assert grade_directly(answer, "26") == UNREADABLE


def test_fraction_must_be_in_lowest_terms():
    assert (
        grade_directly("12/4", "3")
        == grade_directly("14/4", "7/2")
        == grade_directly("x > 14/4", "x > 7/2")
        == INCORRECT
    )
    assert grade_directly("7/2", "7/2") == grade_directly("7/2", "14/4") == CORRECT


@pytest.mark.parametrize(
    "text", ["", "1/0", "1,23", "1 2", "--1", "26 or 27", "٣", "1" * 50, "x", "1/2/3", "2 million"]
)
def test_invalid_numbers_parse_to_none(text):
    assert parse_number(text) is None


@pytest.mark.parametrize("text", ["x", "x = 3", "1 < x < 3", "x > y", "2x > 3", "xy > 3", "> 3", "x > x = 3"])
def test_invalid_relations_parse_to_none(text):
    assert parse_relation(text) is None


# ---- by math-verify


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("(x+1)^2", "x^2+2x+1", True),
        ("(x+1)^2", "x^2+2x+2", False),
        (r"(3, \infty)", "x > 3", True),
        (r"\sqrt{2} \text{ or } 2", r"\sqrt{2}", False),
    ],
)
def test_judged_by_math_verify(answer, gold, right):
    assert asyncio.run(grade_answer(answer, gold)) == AnswerGrade(float(right))


def test_unparsable_answers_are_unreadable():
    assert asyncio.run(grade_answer("\\{3", GOLD)) == AnswerGrade(0.0, is_readable=False)


def test_grader_process_starts_lazily(graders):
    assert asyncio.run(grade_answer("26", "26")).is_correct
    assert asyncio.run(grade_answer("27", "26")) == INCORRECT
    assert graders() is None
    assert asyncio.run(grade_answer(SAME, GOLD)).is_correct
    assert graders() is not None


def test_graders_serve_consecutive_event_loops(graders):
    for _ in range(2):
        assert asyncio.run(grade_answer(SAME, GOLD)).is_correct


def test_grading_timeout_is_reported_as_not_graded(graders):
    assert asyncio.run(grade_answer(HANG, GOLD, cpu_limit_s=0.3)) == AnswerGrade(
        0.0, is_readable=False, is_graded=False
    )


@pytest.mark.slow
def test_hung_grading_does_not_block_other_episodes(graders, tmp_path):
    """With a few graders and one queue the last of the others would wait for nearly all hanging ones."""
    seconds, ended = 0.3, {}
    questions = [{"question": f"{n} times one?", "answer": f"{n}\\pi"} for n in range(1000, 1200)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, questions)))

    def answer(query, rng):
        said = query.observation.split()[1]
        return {0: f"#### {HANG}", 5: f"#### \\pi \\cdot {said}"}.get(int(said) % 10, f"#### {said}\\pi")

    arena = EpisodeRunner(
        lambda: Math(team="single", path=tmp_path / "q.jsonl", split="all", grader_time_limit_s=seconds), "math"
    )
    matches = [EpisodeSpec(n, {"reasoner": ScriptedPolicy(answer)}, n) for n in range(200)]
    asyncio.run(grade_answer(SAME, GOLD))  # the graders have started
    began = time.monotonic()
    episodes = asyncio.run(
        arena.play_all(matches, Branching(), lambda episode: ended.update({episode.seed: time.monotonic() - began}))
    )
    assert [episode.error for episode in episodes] == [None] * 200
    hanging = range(0, 200, 10)
    assert [seed for seed in range(200) if not episodes[seed].success] == list(hanging)
    for seed in range(200):
        assert episodes[seed].nodes[-1].info["unjudged"] == {"reasoner": seed % 10 == 0}
    others = max(ended[seed] for seed in range(200) if seed % 10)
    assert sum(ended[seed] > others for seed in hanging) >= 4  # of 20: one queue would leave one or two


# ---- processes


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=20.0):
    """Waits until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.02)


@LINUX
def test_killed_graders_are_replaced_and_retried(graders):
    async def play():
        assert (await grade_answer(SAME, GOLD)).is_correct
        first = graders().pid
        limits = ((HANG, 0.4), (SAME, 20.0), (HANG, 0.4))  # a right answer may take long on a busy machine
        asked = [asyncio.create_task(grade_answer(text, GOLD, cpu_limit_s=limit)) for text, limit in limits]
        while len(children(first)) < 2:
            await asyncio.sleep(0.01)
        os.kill(first, signal.SIGKILL)
        verdicts = await asyncio.gather(*asked)
        assert graders().pid != first
        return verdicts

    verdicts = asyncio.run(play())
    assert [(verdict.is_correct, verdict.is_graded) for verdict in verdicts] == [
        (False, False),
        (True, True),
        (False, False),
    ]


@LINUX
@pytest.mark.slow
def test_repeatedly_dying_graders_are_given_up(graders):
    async def play():
        asked = asyncio.create_task(grade_answer(HANG, GOLD, cpu_limit_s=20.0))
        for _ in range(2):
            while not (graders() and children(graders().pid)):
                await asyncio.sleep(0.01)
            killed, orphans = graders(), children(graders().pid)
            killed.kill()
            wait_until(lambda orphans=orphans: not any(map(alive, orphans)))
            while graders() is killed:
                await asyncio.sleep(0.01)
        return await asked

    assert asyncio.run(play()) == AnswerGrade(0.0, is_readable=False, is_graded=False)


@LINUX
def test_a_cancelled_grading_ends_its_process(graders):
    async def play():
        asked = asyncio.create_task(grade_answer(HANG, GOLD, cpu_limit_s=300.0))
        while not (graders() and children(graders().pid)):
            await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.wait([asked])

    asyncio.run(play())
    wait_until(lambda: not children(graders().pid))


@LINUX
def test_graders_end_with_their_parent():
    code = f"""
import asyncio, os, signal, time
from palestra.environments.math.grading import grade_answer
from palestra.sandbox.client import fork_server

async def main():
    asked = asyncio.create_task(grade_answer({HANG!r}, {GOLD!r}, cpu_limit_s=30.0))
    await asyncio.sleep(0.1)
    server = fork_server().process.pid
    place = f"/proc/{{server}}/task/{{server}}/children"
    while not open(place).read().strip():
        await asyncio.sleep(0.01)
    print(server, open(place).read(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    started = list(map(int, done.stdout.split()))
    assert len(started) == 2, done.stderr
    wait_until(lambda: not any(map(alive, started)))


@LINUX
def test_grader_process_does_not_load_torch(graders):
    asyncio.run(grade_answer(SAME, GOLD))
    assert "libtorch" not in Path(f"/proc/{graders().pid}/maps").read_text()


def test_missing_package_is_named_with_its_extra(graders, monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('not here')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"math-verify.*not here.*pip install 'palestra\[math\]'"):
        asyncio.run(grade_answer(SAME, GOLD))
