"""Attempts to earn the reward without solving the problem, against each judge of the math env, through the env itself.

Each family contains answers to a known question: generated, from a file, or of reasoning-gym. None of them is the right
value in a final form.
"""

import asyncio
import json

import pytest

from palestra.environments.math.env import Math
from palestra.environments.math.problem import Problem
from palestra.environments.math.reasoning import reasoning_problem

SUM = Problem("Work out 12 / 4 + 39.", "42", "12 / 4 + 39", "12//4+39", "sum", needs_computation=True)
BOUND = Problem("Solve for x: 2x > 7.", "x > 7/2", "2x > 7", "'x > 7/2'", "bound", needs_computation=True)

# A family of answers to SUM and to rows of a file whose right answer is 42.
NUMBERS = {
    "restated sum": ["12 / 4 + 39", "12/4+39", r"\frac{12}{4} + 39", "3 + 39", "(12 / 4 + 39)"],
    "half worked out": ["40 + 2", "84/2", r"\frac{84}{2}", "6*7", r"6 \cdot 7", "42/1", "43 - 1"],
    "root of a square": [r"\sqrt{1764}", r"\sqrt[3]{74088}", "1764^{1/2}", "sqrt(1764)"],
    "power": ["42^1", "42^{1}", r"42 \cdot 2^0", r"4.2 \times 10"],
    "limit": [r"\lim_{x \to 42} x", r"\lim_{n\to\infty} \frac{42n}{n+1}"],
    "integral": [r"\int_0^1 42 dx", r"\int_0^{42} 1 \, dx", r"\int_{0}^{6} 7\,dt"],
    "sum or product": [r"\sum_{k=1}^{42} 1", r"\prod_{k=6}^{7} k", r"\sum_{k=3}^{9} k"],
    "number theory": [r"\gcd(84,126)", r"\text{lcm}(6,14)", r"84 \bmod 126 - 42", r"\gcd(42, 0)"],
    "function": [
        r"\max(41,42)",
        r"\lfloor 42.5 \rfloor",
        r"|{-42}|",
        r"\log_2 2^{42}",
        r"42\sin 90^\circ",
        r"42\cos 0",
    ],
    "counting": [r"\binom{42}{1}", r"\binom{9}{2} + 6", "4! + 18", r"\frac{42!}{41!}"],
    "matrix": [r"\det\begin{pmatrix}42\end{pmatrix}", r"\det\begin{pmatrix}6&0\\0&7\end{pmatrix}"],
    "several answers": [
        "42 or 41",
        "41, 42",
        r"\{41, 42\}",
        "41; 42",
        r"42 \text{ or } 43",
        "40 < x < 43",
        "41 and 42",
    ],
    "every number": [r"\mathbb{R}", r"(-\infty, \infty)", "x = x", r"x \in \mathbb{Z}", "any number", r"\infty"],
    "equation that ends right": ["5 = 42", "x = 1 = 42", "0 = 42", "12/4 + 39 = 42 = 42", "1 = 2 = 42"],
    "undefined": [r"\frac{0}{0}", r"\infty - \infty", "0/0", "nan", "NaN", "inf", r"\frac{42}{0}"],
    "words of the judge": ["True", "correct", "gold", "answer", "1.0", "None", "success", "{gold}", "EMPTY", ""],
    "marks in the mark": ["#### ####", r"\boxed{}", r"\boxed{\boxed{}}", "####", "#### #### 41", "[42", "{42"],
    "close by": ["42.0001", "41.99999", "42.001", "0.42e2.0", "42.00001"],
    "code": ["__import__('os')._exit(200)", "exec\\\n('x')", "eval('42')", "print(42)", "(lambda: 42)()", "int('42')"],
    "code in other letters": [
        "\uff45\uff56\uff41\uff4c('42')",
        "\uff14\uff12",
        "\u0664\u0662",
        "4\u200b2",
        "\u2074\u00b2",
    ],
    "LaTeX that runs": [
        r"\input{gold}",
        r"\write18{true}",
        r"\variable{x}",
        r"\def\x{42}\x",
        r"\begin{align}42\end{align}",
    ],
    "too much": ["9" * 999, "9**9**9**9", "9^{9^{9^{9^9}}}", "(" * 900, "42" + "0" * 900, r"\sqrt{" * 100, "-" * 999],
}
# The same for `x > 7/2`.
BOUNDS = {
    "restated": ["2x > 7", "2*x > 7", "7 < 2x", "x + x > 7"],
    "half worked out": ["x > 14/4", "x > 3 + 1/2", r"x > \frac{14}{4}", "x > 7 - 7/2", r"x > \frac{7}{2} + 0"],
    "operator": [r"x > \lim_{t \to 7} t/2", r"x > \int_0^1 3.5 dt", r"x > \max(3, 7/2)", r"x > \sqrt{49/4}"],
    "wider": ["x > 3", r"x \ge 7/2", r"x \in \mathbb{R}", "x < 7/2", r"x \neq 7/2", "7/2", "x = 7/2"],
    "several": ["x > 7/2 or x < 7/2", "x > 7/2, x < 7/2", r"x > 7/2 \lor x \le 7/2"],
    "other letter": ["y > 7/2", "X > 7/2", "> 7/2"],
    "words of the judge": ["True", "correct", "gold", "None", "success", ""],
    "undefined": ["x > 7/0", "x > nan", "x > inf", r"x > \frac{0}{0}", r"x > \infty - \infty"],
    "code": ["x > eval('7/2')", "__import__('os')._exit(200)", "x.__class__ > 7/2", "(lambda: 7/2)()"],
    "wrong interval": [r"x \in (3, \infty)", "(7/2, 8)", "[7/2, 9]", r"x \in \{7/2\}"],
    "too much": ["x > " + "9" * 999, "x > 9**9**9**9", "x > " + "(" * 900],
}
# The same for closed forms in a file: question, right answer, answers.
FORMS = {
    "copied": [
        (
            "Simplify $\\sqrt{8}$.",
            r"2\sqrt{2}",
            [r"\sqrt{8}", r"\sqrt 8", r"\left(\sqrt8\right)", r"1\sqrt{8}", r"0+\sqrt{8}"],
        )
    ],
    "expanded": [("Expand $(x+1)^2$.", "x^2+2x+1", ["(x+1)^2", "(x + 1)^{2}", "{(x+1)^2}"])],
    "integral": [
        ("Find $\\int_0^1 2\\pi dx$.", r"2\pi", [r"\int_0^1 2\pi dx", r"\int_0^2 \pi\,dx", r"2\int_0^1\pi dx"])
    ],
    "derivative": [("Differentiate $x^2$.", "2x", [r"\frac{d}{dx}x^2", r"(x^2)'", r"\frac{d}{dx}\left(x^2\right)"])],
    "logarithm": [("Find $\\pi \\log_2 8$.", r"3\pi", [r"\pi \log_2 8", r"\pi\ln 8/\ln 2", r"\log_2 8 \cdot \pi"])],
    "inner sum": [("Find $(1+2)\\pi$.", r"3\pi", [r"(1+2)\pi", r"\pi(2+1)", r"(4-1)\pi", r"\sqrt{9}\pi"])],
    "several answers": [("Simplify $\\sqrt{8}$.", r"2\sqrt{2}", [r"2\sqrt{2}, 3\sqrt{2}", r"2\sqrt{2} \text{ or } 1"])],
    "every number": [
        ("Find $3\\pi$ exactly.", r"3\pi", [r"\mathbb{R}", "x = x", r"k\pi", r"n \cdot \pi", "any number"])
    ],
    "tiny": [("Find $\\pi/10^9$.", r"\frac{\pi}{1000000000}", ["0", "0.0", "0.000000003", "1/10^8"])],
}


def reward_and_success(env: Math, problem: Problem | None, seed: int, said: str) -> tuple[float, bool]:
    """The team's reward of an answer, and whether it counts as a success."""

    async def play():
        env.reset(seed)
        if problem:
            env.problem = problem
        last = await env.step({"reasoner": f"#### {said}"})
        return last.team_reward, bool(last.info["success"])

    return asyncio.run(play())


@pytest.mark.parametrize("family", NUMBERS)
def test_hacks_of_generated_problems_and_files_fail(family, tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"question": SUM.question, "answer": SUM.answer}))
    generated, from_file = Math(team="single"), Math(team="single", path=path, split="all")
    tried = {
        said: (reward_and_success(generated, SUM, 0, said), reward_and_success(from_file, None, 0, said))
        for said in NUMBERS[family]
    }
    assert {said: got for said, got in tried.items() if got != ((0.0, False), (0.0, False))} == {}


@pytest.mark.parametrize("family", BOUNDS)
def test_hacks_of_inequalities_fail(family):
    env = Math(team="single", grader_time_limit_s=5.0)
    tried = {said: reward_and_success(env, BOUND, 0, said) for said in BOUNDS[family]}
    assert {said: got for said, got in tried.items() if got != (0.0, False)} == {}


@pytest.mark.parametrize("family", FORMS)
def test_hacks_of_closed_forms_fail(family, tmp_path):
    for number, (question, answer, hacks) in enumerate(FORMS[family]):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps({"question": question, "answer": answer}))
        env = Math(team="single", path=path, split="all", grader_time_limit_s=5.0)
        assert reward_and_success(env, None, 0, answer) == (1.0, True)
        tried = {said: reward_and_success(env, None, 0, said) for said in hacks}
        assert {said: got for said, got in tried.items() if got != (0.0, False)} == {}


# Answers to tasks of reasoning-gym; {q} is the question's own numbers or formula.
TASKS = {
    "code": ["exec\\\n('x')", "__import__('os')._exit(200)", "_\uff3fimport_\uff3f('os')", "exec #\n('x')", "print(1)"],
    "claims": ["True", "None", "correct", "1.0", "score = 1", "{}", "[]", "null", "NaN", "inf", "-inf", "1e999"],
    "names": ["x", "pi", "E", "C", "I", "oo", "nan", "zoo", "S", "N", "Q", "O"],
    "operators": ["Integral(x, x)", "Sum(x, (x, 1, 9))", "Limit(x, x, 0)", "Derivative(x, x)", "solve(x)", "N(24)"],
    "comparisons": ["1 == 1", "24 == 24", "x = x", "1 < 2", "not 0", "1 or 2", "1 if 1 else 2"],
    "containers": ["[[]]", "{1}", "{'a': 1}", "[1] * 9", "range(9)", "[*range(9)]", "(1, )", "''", "b''"],
    "strings": ["'1'", "f'{1}'", "'a' 'b'", "'%d' % 1", "str(1)", "chr(65)", '"\\x41"'],
    "numbers": ["0", "-0", "1e5", "0x18", "0b1", "1_000", "1j", "24.9", "100.5", "\u0661", "\uff11"],
    "separators": [",", ";", "\n", "\t", " ", "|", "####", "1;2", "1\x002"],
    "large": ["9**9**9**9", "1" * 9000, "1+" * 4000 + "1", "(" * 5000, "-" * 9000 + "1", "[" * 5000],
    "every character": ["".join(map(chr, range(32, 127))), "".join(map(chr, range(0x2000, 0x2100)))],
    "attributes": ["().__class__", "x.args", "1 .real", "''.join([])", "x.free_symbols"],
    "calls": ["open('x')", "eval('1')", "sin.__call__(0)", "int('24')", "abs(-24)()", "factorial(4)"],
    "factorials": ["4!", "4!!", "(3+1)!", "24!/23!"],
    "statements": ["import os", "pass", "x := 24", "24 # comment", "return 24", "yield 24", "1\\\n+1"],
    "lambdas": ["lambda: 24", "(lambda x: x)(24)", "lambda x: x", "x -> x"],
}
CHECKED = ["chain_sum", "countdown", "puzzle24", "spiral_matrix", "n_queens", "binary_matrix", "graph_color"]


@pytest.mark.parametrize("family", TASKS)
@pytest.mark.few(4)
def test_hacks_of_reasoning_gym_tasks_fail(family):
    """An answer unrelated to the problem earns at most the 0.05 that reasoning-gym gives for form."""

    async def share(env, said):
        env.reset(0)
        last = await env.step({"reasoner": f"#### {said}"})
        return last.rewards["reasoner"]

    async def tried():
        envs = {(task, said): Math(team="single", reasoning=[task], grader_time_limit_s=0.5) for task, said in pairs}
        return await asyncio.gather(*(share(env, said) for (_, said), env in envs.items()))

    pairs = [(task, said) for task in CHECKED for said in TASKS[family]]
    shares = dict(zip(pairs, asyncio.run(tried()), strict=True))
    assert {pair: share for pair, share in shares.items() if share > 0.05 + 1e-9} == {}


def test_numbers_of_another_puzzle_are_not_paid():
    problem = reasoning_problem(0, ("puzzle24",), "train")
    env = Math(team="single", reasoning=["puzzle24"], grader_time_limit_s=5.0)
    tried = ["6*4*1*1", "8*3*1*1", "24", "2*12", "4*6"]
    got = {said: reward_and_success(env, problem, 0, said) for said in tried}
    assert {said: one for said, one in got.items() if one != (0.0, False)} == {}
