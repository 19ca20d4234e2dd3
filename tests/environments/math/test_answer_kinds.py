"""Answers of many kinds, each with honest variants, which are paid, and wrong or lazy ones, which are not.

None of the right answers is in the other tests of the judge. Those that are judged wrongly are in docs/security.md.
"""

import asyncio
import json
from fractions import Fraction
from math import gcd
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from palestra.environments.math.answer_extraction import answers_equal_text
from palestra.environments.math.env import Math
from palestra.environments.math.grading import CORRECT, AnswerGrade, grade_answer, grade_directly

# family, question, right answer, variants of it, others
TABLE = yaml.safe_load(Path(__file__).with_name("answer_kinds.yaml").read_text(encoding="utf-8"))
ANSWERS: list[tuple[str, str, str, list[str], list[str]]] = [
    (family, row["question"], row["answer"], row["right"], row["wrong"])
    for family, rows in TABLE.items()
    for row in rows
]


async def grades(question: str, gold: str, answers: list[str]) -> list[AnswerGrade]:
    tried = (grade_answer(answer, gold, question=question, cpu_limit_s=5.0) for answer in answers)
    return await asyncio.gather(*tried)


@pytest.mark.parametrize("family", sorted({family for family, *_ in ANSWERS}))
@pytest.mark.few(18)
def test_variants_are_paid_and_others_are_not(family: str) -> None:
    wrong = []
    for _, question, gold, good, bad in (row for row in ANSWERS if row[0] == family):
        judged = asyncio.run(grades(question, gold, [gold, *good, *bad]))
        for answer, grade in zip([gold, *good, *bad], judged, strict=True):
            if grade.is_correct == (answer in bad) or not grade.is_graded:
                wrong.append((question, gold, answer, grade))
    assert wrong == []


def test_restated_questions_of_a_file_earn_nothing(tmp_path: Path) -> None:
    """The whole way: rows of a file, the env, and its reward."""
    rows = [row for row in ANSWERS if row[0] in ("factored", "expanded", "rationalised", "mixed numbers")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": row[1], "answer": row[2]}) + "\n" for row in rows))
    env = Math(team="single", path=path, split="all", grader_time_limit_s=5.0)

    async def reward(seed: int, answer: str) -> float:
        env.reset(seed)
        return (await env.step({"reasoner": f"#### {answer}"})).team_reward

    for seed, (_, _, gold, good, bad) in enumerate(rows):
        assert asyncio.run(reward(seed, gold)) == 1.0, gold
        assert asyncio.run(reward(seed, good[0])) == 1.0, good[0]
        assert asyncio.run(reward(seed, bad[0])) == 0.0, bad[0]


# ---- properties

INTEGERS = st.integers(1, 10**9)
WRITTEN = ["{}", "x = {}", "{:,}", "\\${}", "{}.0", "-{}", "{} apples", "\\frac{{{}}}{{7919}}", "{}/7919", "{}\\%"]


@given(INTEGERS, st.data(), st.sampled_from(WRITTEN))
def test_an_answer_with_another_digit_is_never_equal(number: int, data: st.DataObject, form: str) -> None:
    assume(number % 7919)
    digits = str(number)
    place = data.draw(st.integers(0, len(digits) - 1))
    digit = data.draw(st.sampled_from("0123456789").filter(lambda one: one != digits[place]))
    other = int(digits[:place] + digit + digits[place + 1 :])
    gold = form.format(number)
    assert grade_directly(form.format(number), gold) == CORRECT
    assert grade_directly(form.format(other), gold) != CORRECT


@given(st.lists(st.sampled_from(["x", "12", "y", "3.5", "\\pi", "(", ")"]), min_size=2, max_size=8), st.data())
def test_spaces_beside_operators_never_matter(operands: list[str], data: st.DataObject) -> None:
    signs = st.sampled_from(["+", "-", "*", "/", "^", "=", "<", "_"])
    spaces = st.sampled_from(["", " ", "  "])
    gold, spaced = operands[0], operands[0]
    for operand in operands[1:]:
        sign = data.draw(signs)
        gold += sign + operand
        spaced += data.draw(spaces) + sign + data.draw(spaces) + operand
    assert answers_equal_text(spaced, gold)
    assert grade_directly(spaced, gold) == CORRECT


@given(st.lists(st.integers(0, 999).map(str), min_size=2, max_size=4), st.data())
def test_numbers_never_run_together(numbers: list[str], data: st.DataObject) -> None:
    place = data.draw(st.integers(1, len(numbers) - 1))
    joined = " ".join([*numbers[: place - 1], numbers[place - 1] + numbers[place], *numbers[place + 1 :]])
    assert not answers_equal_text(joined, " ".join(numbers))
    assert answers_equal_text("  ".join(numbers), " ".join(numbers))


@given(st.integers(1, 999), st.integers(1, 99), st.integers(2, 99))
def test_a_mixed_number_means_its_value(whole: int, over: int, under: int) -> None:
    assume(over < under and gcd(over, under) == 1)
    value = whole + Fraction(over, under)
    for gold in (f"{whole} {over}/{under}", f"{whole}\\frac{{{over}}}{{{under}}}"):
        assert grade_directly(str(value), gold) == CORRECT
        run_together = Fraction(int(f"{whole}{over}"), under)
        assert (grade_directly(f"{whole}{over}/{under}", gold) == CORRECT) == (run_together == value)
    doubled = f"{whole} {2 * over}/{2 * under}"
    assert grade_directly(doubled, f"{whole} {over}/{under}") != CORRECT


UNITS = [("km", "m", 1000), ("m", "mm", 1000), ("hours", "minutes", 60), ("kg", "grams", 1000), ("feet", "inches", 12)]


@given(st.integers(1, 10**6), st.sampled_from(UNITS))
def test_known_units_are_converted(number: int, units: tuple[str, str, int]) -> None:
    large, small, factor = units
    assert grade_directly(f"{number * factor} {small}", f"{number} {large}") == CORRECT
    assert grade_directly(f"{number} {small}", f"{number} {large}") != CORRECT
    assert grade_directly(f"{number} dollars", f"{number} {large}") != CORRECT
    assert grade_directly(f"{number}", f"{number} {large}") == CORRECT


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("20 degrees Celsius", ["20°C", r"20^\circ\text{C}", "20 degrees", "20°"], ["20°F", "20 K", "20 degrees F"]),
        ("20 degrees", ["20°C", "20°"], ["20 radians", "20 K"]),
        ("£5", ["5 pounds", "£5.00", "5 GBP"], ["5 kg", "$5", "€5"]),
        ("5 pounds", ["£5", "5 lbs"], ["5 kg", "5 ounces"]),
        (r"25\text{ m}^2", ["25 meters squared", "25 square meters"], ["25 meters", "25 meters cubed", "5 squared"]),
        ("12 May", ["May 12", "12th May", "May 12th"], ["12 June", "June 12", "12", "13 May"]),
    ],
)
def test_units_and_dates_in_words(gold: str, right: list[str], wrong: list[str]) -> None:
    assert [answer for answer in right if grade_directly(answer, gold) != CORRECT] == []
    assert [answer for answer in wrong if grade_directly(answer, gold) == CORRECT] == []


@pytest.mark.parametrize(
    ("question", "gold", "right", "wrong"),
    [
        ("Simplify √50.", r"5\sqrt{2}", ["5√2", "5√(2)", "√2 · 5"], ["√50", "√(50)", "5√3", "5√25"]),
        ("Rationalise 1/√x.", r"\frac{\sqrt{x}}{x}", ["√x/x", "√(x)/x"], ["1/√x", "√x"]),
        ("What is it?", r"\sqrt{x+1}", ["√(x+1)"], ["√x+1"]),
    ],
)
def test_root_signs(question: str, gold: str, right: list[str], wrong: list[str]) -> None:
    judged = asyncio.run(grades(question, gold, right + wrong))
    assert [grade.is_correct for grade in judged] == [True] * len(right) + [False] * len(wrong)


@given(st.integers(2, 16), st.integers(2, 16), st.integers(1, 10**6))
def test_numbers_in_a_base_are_compared_with_their_base(base: int, other: int, digits: int) -> None:
    assert grade_directly(f"{digits}_{{{base}}}", f"{digits}_{base}") == CORRECT
    assert (grade_directly(f"{digits}_{other}", f"{digits}_{base}") == CORRECT) == (base == other)
    assert grade_directly(str(digits), f"{digits}_{base}") != CORRECT


@settings(max_examples=4, deadline=None)
@given(st.permutations([-3, 2, 5, 7]).map(lambda roots: roots[:3]), st.permutations([0, 1, 2]))
def test_the_order_of_factors_and_terms_never_matters(roots: list[int], order: list[int]) -> None:
    factors = [f"(x{-root:+d})" for root in roots]
    one, two, three = roots
    c = -one * two * three
    terms = ["x^3", f"{-one - two - three:+d}x^2", f"{one * two + one * three + two * three:+d}x"]
    factored, expanded = "".join(factors), f"{''.join(terms)}{c:+d}"
    turned = "".join(factors[place] for place in order)
    shuffled = "".join([f"{c:+d}", *(terms[place] if terms[place] != "x^3" else "+x^3" for place in order)])
    judged = asyncio.run(grades(f"Factor ${expanded}$.", factored, [turned, shuffled.lstrip("+"), expanded]))
    assert [grade.is_correct for grade in judged] == [True, False, False]
    judged = asyncio.run(grades(f"Expand ${factored}$.", expanded, [shuffled.lstrip("+"), turned, factored]))
    assert [grade.is_correct for grade in judged] == [True, False, False]
