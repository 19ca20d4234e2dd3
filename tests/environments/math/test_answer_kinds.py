"""Answers of many kinds, each with honest variants, which are paid, and wrong or lazy ones, which are not.

None of the right answers is in the other tests of the judge. Those that are judged wrongly are in docs/security.md.
"""

import asyncio
import json
from fractions import Fraction
from math import gcd
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from palestra.environments.math.answer_extraction import answers_equal_text
from palestra.environments.math.env import Math
from palestra.environments.math.grading import CORRECT, AnswerGrade, grade_answer, grade_directly

# family, question, right answer, variants of it, others
ANSWERS: list[tuple[str, str, str, list[str], list[str]]] = [
    ("absolute values", "What is it?", "|x|", [r"\lvert x\rvert"], ["x", "-x"]),
    ("angles", "What is it?", r"30^\circ", ["30", "30 degrees", r"30^{\circ}"], ["30 radians", r"60^\circ", "30'"]),
    ("bases", "Write 5 in base 2.", "101_2", ["101_{2}", "101_2"], ["101_3", "101", "101_{10}", "5"]),
    (
        "bases",
        "Write 13 in base 2.",
        "1101_2",
        ["1101_{2}", "1101_{(2)}", "(1101)_2", r"1101_{\text{two}}"],
        ["1101", "1101_{8}", "13", "13_{10}", "1011_2"],
    ),
    ("bases", "Hex?", "2A_{16}", ["2a_{16}"], ["2A", "42", "2B_{16}"]),
    ("binomials", "What is it?", r"\binom{n}{2}", [r"\frac{n(n-1)}{2}"], [r"\binom{n}{3}", "n^2/2"]),
    ("completed squares", "Complete the square: $x^2-4x+7$.", "(x-2)^2+3", ["3+(x-2)^2"], ["x^2-4x+7"]),
    ("complex", "Compute $(1+i)^2$.", "2i", ["2 i"], ["(1+i)^2", "(i+1)^{2}", "-2i", r"\sqrt{-4}"]),
    ("complex", "Compute $(1+i)(2-i)$.", "3+i", ["i+3"], ["(2-i)(1+i)", "3-i"]),
    ("complex", "Compute $(2+i)^2$.", "3+4i", ["4i+3", "3 + 4 i"], ["3-4i", "4+3i", "5", "(2+i)^2"]),
    ("complex", "Compute $i^3$.", "-i", ["-i"], ["i", "i^3", "1/i"]),
    ("complex", r"Compute $\frac{1}{1-i}$.", r"\frac{1}{2}+\frac{1}{2}i", [r"\frac{1+i}{2}"], [r"\frac{1}{1-i}"]),
    ("dates", "When?", "March 5", ["March 5"], ["March 6", "5", "May 5"]),
    (
        "dates",
        "When?",
        "July 4, 1776",
        ["July 4 1776", "july 4, 1776", "4 July 1776"],
        ["July 4", "June 4, 1776", "July 1776", "1776"],
    ),
    ("decimals", "What is it?", "0.1234", ["0.1234"], ["0.1243", "0.123", "1.234"]),
    ("decimals", "What is it?", "1/7", ["0.142857", "1/7"], ["0.14", "0.142"]),
    ("empty set", "What is it?", r"\emptyset", [r"\varnothing"], ["0", r"\mathbb{R}"]),
    ("equations", "What is it?", "12x+3y=7", ["3y+12x=7"], ["12x+3y=8", "12x-3y=7"]),
    (
        "equations",
        "Write $2x-y+3=0$ in slope-intercept form.",
        "y=2x+3",
        ["3+2x=y", "y = 2x + 3"],
        ["2x-y+3=0", "y-3=2x", "2x=y-3"],
    ),
    ("equations", "Write $x^2-2x+y^2=0$ in standard form.", "(x-1)^2+y^2=1", ["y^2+(x-1)^2=1"], ["x^2+y^2-2x=0"]),
    ("equations", "Solve 2x=6.", "x=3", ["3", "x=3.0"], ["x=-3", "y=3", "x^2=9", "2x=6"]),
    (
        "equations",
        r"Solve $4x=\pi$.",
        r"x=\frac{\pi}{4}",
        [r"\pi/4", r"\frac{\pi}{4}=x"],
        [r"4x=\pi", r"x=\frac{\pi}{2}"],
    ),
    ("equations", "Write x+y=2 in slope-intercept form.", "y=-x+2", ["y=2-x"], ["x+y=2", "x+y-2=0", "y=x+2"]),
    ("equations", "Circle?", "x^2+y^2=25", ["y^2+x^2=25"], ["x^2+y^2=5", "x+y=5"]),
    (
        "expanded",
        "Expand $(a+b)(a-b)$.",
        "a^2-b^2",
        ["-b^2+a^2", "a^{2}-b^{2}"],
        ["(a-b)(a+b)", "(a+b)(a-b)", "a(a-b)+b(a-b)", "a^2+ab-ab-b^2", "a(a+b)-b(a+b)"],
    ),
    ("expanded", "Expand $(x-1)(x+1)$.", "x^2-1", ["-1+x^2", "x^{2}-1"], ["(x-1)(x+1)"]),
    ("expanded", "Expand $(x+1)^2$.", "x^2+2x+1", ["1+2x+x^2"], ["(1+x)^2", "(x+1)(x+1)", "x(x+2)+1"]),
    (
        "expanded",
        "Expand $(x-1)(x-2)(x-3)$.",
        "x^3-6x^2+11x-6",
        ["-6+11x-6x^2+x^3"],
        ["(x-1)(x-2)(x-3)", "(x-1)(x^2-5x+6)"],
    ),
    ("exponentials", "Differentiate $x^2e^x$.", "xe^x(x+2)", ["x^2e^x+2xe^x", "e^x(x^2+2x)"], ["x^2e^x"]),
    ("exponentials", r"Simplify $\frac{e^x}{e^{2x}}$.", "e^{-x}", [r"\frac{1}{e^x}"], ["e^{-2x}"]),
    (
        "factored",
        "Factor x^2-5x+6.",
        "(x-2)(x-3)",
        ["(x-3)(x-2)", r"(x-2)\cdot(x-3)", r"\left(x-3\right)\left(x-2\right)", "(2-x)(3-x)", "(-3+x)(x-2)"],
        ["6-5x+x^2", "x(x-5)+6", "x^2-5x+6", "x^2+6-5x", "x^2-2x-3x+6"],
    ),
    ("factored", "Factor $x^4-1$.", "(x-1)(x+1)(x^2+1)", ["(x^2+1)(x-1)(x+1)"], ["(x^2-1)(x^2+1)", "x^4-1"]),
    ("factored", "Factor $x^2+2x+1$.", "(x+1)^2", ["(x+1)(x+1)", "(1+x)^2"], ["x^2+1+2x"]),
    ("factored", "Factor $2x^2-18$.", "2(x+3)(x-3)", ["2(x-3)(x+3)", "(2x+6)(x-3)"], ["2x^2-18", "2(x^2-9)"]),
    ("factored", "Factor $3x^2+6x$.", "3x(x+2)", ["3x(2+x)", "x(3x+6)"], ["3x^2+6x", "3(x^2+2x)"]),
    ("factorials", "What is it?", "n!", ["n!"], ["n", "(n+1)!"]),
    ("fractions", "Simplify 2/4.", r"\frac12", ["1/2", "0.5"], ["2/4"]),
    ("fractions", "What is it?", "14/4", ["7/2", "3.5"], ["3 1/4", "7/4"]),
    ("fractions", "What is it?", "3/4", ["0.75", "3/4"], ["6/8", "75/100", "4/3", r"\frac{9}{12}"]),
    (
        "inequalities",
        r"Solve $2x>\pi$.",
        r"x>\frac{\pi}{2}",
        [r"x > \pi/2", r"\frac{\pi}{2}<x"],
        [r"2x>\pi", r"\pi<2x"],
    ),
    ("inequalities", "Solve 2x>8.", "x>4", ["4<x", r"(4,\infty)"], [r"x\ge4", "x<4", "2x>8", "x-4>0"]),
    ("inequalities", "Solve |x-1|<2.", "-1<x<3", ["(-1,3)"], ["-1<x", "x<3", r"-1\le x\le 3", "|x-1|<2", "-2<2x<6"]),
    (
        "inequalities",
        "Solve x^2>=4.",
        r"x\le -2 \text{ or } x\ge 2",
        [r"x\ge 2 \text{ or } x\le -2"],
        [r"-2\le x\le 2", r"x\ge2", r"x^2\ge 4"],
    ),
    ("infinity", "Limit?", r"\infty", [r"\infty"], [r"\infty+1", r"-\infty", r"2\infty", r"\infty^2"]),
    ("infinity", "What is it?", r"-\infty", [r"-\infty"], [r"\infty", r"-\infty-1", r"-2\infty", "0"]),
    ("infinity", "What is it?", r"\infty", [r"+\infty"], [r"\infty-5", r"\infty\cdot\infty", "10^{100}"]),
    ("intervals", "Solve x^2<4.", "(-2,2)", ["-2<x<2", r"x\in(-2,2)"], [r"\{-2,2\}", "[-2,2]", "(-2,2]"]),
    ("intervals", "What is it?", "[1,2]", ["[1, 2]", r"1\le x\le 2"], ["(1,2)", "[1,2)", r"\{1,2\}"]),
    (
        "intervals",
        "Domain?",
        r"[-3,\infty)",
        [r"x\ge -3", r"x \in [-3, \infty)", r"-3\le x"],
        [r"(-3,\infty)", r"(-\infty,-3]", "x>-3"],
    ),
    ("like terms", "What is it?", "2x", ["2x"], ["x+x", "3x-x", "2x+0", "2x+1"]),
    ("like terms", "What is it?", r"6\pi", [r"6\pi"], [r"2\cdot3\pi", r"\frac{12\pi}{2}", r"2\pi+4\pi"]),
    ("lists", "What is it?", "3 5", ["3 5"], ["35"]),
    ("lists", "What is it?", "1 2 3", ["1 2 3"], ["123"]),
    ("lists", "What is it?", "1,2,3", ["1, 2, 3", r"\{1,2,3\}", "3,2,1"], ["1,2", "1,2,3,4", "123"]),
    ("lists", "List the primes below 10.", "2, 3, 5, 7", ["2,3,5,7"], ["2,3,5", "2357", "2,3,5,9"]),
    ("lists", "What is it?", "12 and 18", ["18 and 12", "12, 18"], ["12", "1218", "12 and 81"]),
    ("lists of pairs", "What is it?", "(1,2),(3,4)", ["(3,4),(1,2)"], ["(1,3),(2,4)", "1,2,3,4", "(2,1),(4,3)"]),
    ("logarithms", r"Write $\log 2+\log 3$ as a single logarithm.", r"\log 6", [r"\log(6)"], [r"\log 3+\log 2"]),
    (
        "logarithms",
        r"Write $\ln 9$ as a multiple of $\ln 3$.",
        r"2\ln 3",
        [r"2\ln(3)"],
        [r"\ln 9", r"\ln 3", r"2\ln 4"],
    ),
    ("logarithms", "Solve 3^x=7.", r"\log_3 7", [r"\frac{\ln 7}{\ln 3}"], [r"\log_7 3"]),
    (
        "matrices",
        "Find A.",
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        [r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"],
        [r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", r"\begin{pmatrix}1\\2\\3\\4\end{pmatrix}", r"\{1,2,3,4\}"],
    ),
    (
        "matrices",
        "What is it?",
        r"\begin{pmatrix}1&0\\0&1\end{pmatrix}",
        [r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}"],
        ["1", r"\begin{pmatrix}1&0&0\\0&1&0\\0&0&1\end{pmatrix}"],
    ),
    ("mixed numbers", "What is it?", r"\frac{7\pi}{2}", [r"3\frac12\pi", r"3.5\pi"], [r"3\cdot\frac12\pi"]),
    ("mixed numbers", "What is it?", r"3\frac12\pi", [r"\frac{7\pi}{2}"], [r"\frac{3}{2}\pi"]),
    ("mixed numbers", "How much?", "12 1/2", ["12.5", "25/2", r"12\frac{1}{2}"], ["121/2", "12/2", "12 1/3"]),
    ("mixed numbers", "What is it?", "-2 1/3", ["-7/3", r"-2\frac13"], ["-5/3", "2 1/3", "-21/3"]),
    (
        "mixed numbers",
        "What is it?",
        r"1\frac{3}{4}",
        ["7/4", "1.75", "1 3/4"],
        ["13/4", r"\frac{3}{4}", r"1\frac{6}{8}"],
    ),
    ("money", "What is it?", r"\$3.50", ["3.5", "350 cents", r"\$3.50", "3.50 dollars"], ["3.50 cents", "€3.50", "35"]),
    ("money", "What is it?", "€20", ["20 euros", "20"], ["$20", "£20"]),
    ("multiple choice", "Which?", "C", ["(C)", r"\textbf{(C)}", "c"], ["A", "D", "C, D", "ABCDE"]),
    (
        "multiples of pi",
        "What is (7pi - pi)/2?",
        r"3\pi",
        [r"\pi\cdot3"],
        [r"\frac{7\pi-\pi}{2}", r"\frac{7\pi}{2}-\frac{\pi}{2}", r"\frac{6\pi}{2}"],
    ),
    (
        "one fraction",
        "Write 1/x + 1/y as one fraction.",
        r"\frac{x+y}{xy}",
        ["(x+y)/(xy)", r"\frac{y+x}{yx}"],
        ["x^{-1}+y^{-1}", r"\frac1y+\frac1x"],
    ),
    ("pairs", "Find the point.", "(3,-1)", ["(3, -1)", r"\left(3,-1\right)"], [r"\{3,-1\}", "(-1,3)", "[3,-1]", "3"]),
    ("pairs", "What is it?", r"(\frac12, \sqrt3)", [r"(0.5,\sqrt{3})"], [r"(\sqrt3,\frac12)", r"(\frac24,\sqrt3)"]),
    ("percent", "How many?", "1234567", ["1,234,567"], ["1234567%", "123456700%"]),
    ("percent", "Probability?", "0.5", ["1/2", "50%"], ["0.5%", "5%"]),
    ("percent", "What is it?", r"15\%", ["15%", "15 percent", "0.15"], ["0.15%", "1.5%", "15/10"]),
    ("percent", "What percent?", "15", ["15%"], ["1500%", "0.15"]),
    ("percent", "What is the chance?", "0.25", ["25%", "1/4"], ["25", "0.25%"]),
    ("plain numbers", "What is it?", "1,000,000", ["1000000"], ["1,000", "1,000,00"]),
    (
        "plus-minus",
        "Solve.",
        r"3\pm\sqrt{5}",
        [r"3+\sqrt5,3-\sqrt5", r"x=3\pm\sqrt5"],
        [r"3+\sqrt5", r"\pm3+\sqrt5", r"3\pm\sqrt6"],
    ),
    ("plus-minus", "Solve.", r"\pm 3", ["3,-3", "-3 and 3"], ["3", "-3", "(-3,3)"]),
    ("polynomials", "Find the polynomial with double root -1.", "x^2+2x+1", ["(x+1)^2"], ["(x+2)^2"]),
    (
        "polynomials",
        "Find the sum of the first n numbers.",
        r"\frac{n(n+1)}{2}",
        [r"\frac{n^2+n}{2}", "n(n+1)/2", r"\frac12 n(n+1)"],
        [r"\frac{n^2}{2}"],
    ),
    ("powers", r"Simplify $x^2 \cdot x^3$.", "x^5", ["x^{5}"], ["x^3x^2", r"x^4\cdot x"]),
    ("powers", r"Simplify $\frac{x}{x^3}$.", r"\frac{1}{x^2}", ["x^{-2}"], [r"\frac{x}{x^3}"]),
    ("quotients", "What is it?", r"\frac{a}{b}", ["a/b"], ["b/a", "ab"]),
    ("quotients", "What is it?", "a^{-1}", [r"\frac1a"], ["-a", "a"]),
    (
        "radicals",
        "Simplify sqrt(50).",
        r"5\sqrt2",
        [r"5 \cdot \sqrt{2}", r"\sqrt2\cdot 5", "7.0710678"],
        [
            r"\sqrt{50}",
            r"\sqrt{25\cdot2}",
            "50^{1/2}",
            r"\frac{\sqrt{200}}{2}",
            r"\sqrt{25}\sqrt2",
            r"\frac{10}{\sqrt2}",
            r"\sqrt{50.0}",
            r"2.5\sqrt8",
        ],
    ),
    ("radicals", r"Simplify $\sqrt{12}$.", r"2\sqrt3", [r"2 \cdot \sqrt{3}"], [r"\sqrt{12}"]),
    (
        "radicals",
        "What is the sine of 45 degrees?",
        r"\frac{\sqrt2}{2}",
        [r"\frac{1}{\sqrt2}", r"\frac12\sqrt2"],
        [r"\frac{\sqrt3}{2}"],
    ),
    ("radicals", "What is it?", r"\sqrt[3]{2}", ["2^{1/3}", r"\sqrt[3]{2}"], [r"\sqrt2", r"3\sqrt2"]),
    ("radicals", r"Simplify $\sqrt[3]{54}$.", r"3\sqrt[3]{2}", [r"3\cdot 2^{1/3}"], [r"\sqrt[3]{54}"]),
    (
        "radicals",
        r"Find $\sin 75^\circ$.",
        r"\frac{\sqrt{6}+\sqrt{2}}{4}",
        [r"\frac{\sqrt2+\sqrt6}{4}"],
        [r"\sin 75^\circ", r"\frac{\sqrt6-\sqrt2}{4}"],
    ),
    (
        "rationalised",
        "Rationalise 1/(sqrt2-1).",
        r"\sqrt2+1",
        [r"1+\sqrt{2}"],
        [r"(\sqrt2-1)^{-1}", r"\frac{1}{\sqrt2-1}", r"\frac{1}{-1+\sqrt2}", r"\frac{\sqrt2+1}{1}-0"],
    ),
    (
        "rationalised",
        r"Rationalise $\frac{1}{\sqrt2}$.",
        r"\frac{\sqrt2}{2}",
        [r"\frac12\sqrt2"],
        ["2^{-1/2}", r"\sqrt{1/2}"],
    ),
    ("ratios", "Find the ratio.", "3:2", ["3 : 2"], ["2:3", "6:4"]),
    ("ratios", "Ratio?", "2:3:5", ["2 : 3 : 5"], ["2:3", "5:3:2", "4:6:10", "1/2"]),
    ("rounding", "What is it?", r"\lfloor x\rfloor", [r"\lfloor x \rfloor"], ["x", r"\lceil x\rceil"]),
    (
        "scientific notation",
        "What is it?",
        r"6.02\times 10^{23}",
        ["6.02e23", r"6.02 \cdot 10^{23}"],
        [r"6.02\times10^{22}", "6.02", r"6.03\times10^{23}"],
    ),
    (
        "scientific notation",
        "What is it?",
        r"3\times 10^{8}",
        ["300000000", "300,000,000", "3e8"],
        ["3^8", r"30 \times 10^{8}"],
    ),
    ("sets", "Solve x^2=4.", r"\{-2,2\}", ["2,-2", r"\pm 2", r"x=2 \text{ or } x=-2"], ["(-2,2)", "[-2,2]", "2"]),
    ("sets", "What is it?", r"\{0,1\}", ["0,1"], [r"\{0.0000001,1\}"]),
    ("sets", "List.", r"\{1,3,5\}", ["5,3,1", r"\{5,1,3\}"], ["(1,3,5)", "1,3", "135", r"\{1,3,5,7\}"]),
    ("several unknowns", "Solve.", "x=2,y=3", ["y=3, x=2", "2,3"], ["x=3,y=2", "3,2"]),
    (
        "simplified fractions",
        "Simplify (x^2-1)/(x-1).",
        "x+1",
        ["x+1", "1+x"],
        [r"\frac{-1+x^2}{x-1}", "(x^2-1)/(x-1)", r"\frac{2x^2-2}{2x-2}", "x+2-1"],
    ),
    ("text", "Which day?", "Monday", ["monday", r"\text{Monday}"], ["dayMon", "Mondya", "Tuesday"]),
    ("text", "Is it?", "yes", ["Yes", r"\text{yes}"], ["sey", "no", "yes or no"]),
    ("text", "What is it?", "No solution", ["no solution"], [r"\emptyset", "0"]),
    ("text", "What is it?", "Tuesday", ["tuesday"], ["Thursday", "Tue day", "Tuesday or Friday"]),
    (
        "text",
        "What is it?",
        "Alice and Bob",
        ["Bob and Alice", "alice, bob"],
        ["Alice", "Alice and Carl", "Bob, Alice, Carl"],
    ),
    ("text", "What is it?", "odd", ["Odd", r"\text{odd}"], ["even", "do d", "dod"]),
    ("times", "When?", "10:30", ["10:30"], ["1/3", "20:60", "10:31", "11:30"]),
    ("times", "When?", "3 pm", ["3 pm", "3 p.m."], ["3 am"]),
    ("times", "When?", "9:45", ["9:45"], ["9:54", "9.45", "1/5", "9:45:30"]),
    ("times", "When?", "7:30 pm", ["7:30 pm", "7:30 PM", "7:30"], ["7:30 am", "8:30 pm"]),
    ("trigonometry", r"Simplify $2\sin x\cos x$.", r"\sin 2x", [r"\sin(2x)"], [r"2\cos x\sin x"]),
    (
        "trigonometry",
        r"Find $\cos 150^\circ$.",
        r"-\frac{\sqrt3}{2}",
        [r"\frac{-\sqrt3}{2}"],
        [r"\cos 150^\circ", r"\frac{\sqrt3}{2}"],
    ),
    ("trigonometry", r"Find $\arcsin\frac12$.", r"\frac{\pi}{6}", [r"\pi/6"], [r"\arcsin(1/2)", "30"]),
    ("triples", "What is it?", "(2,-1,4)", ["(2, -1, 4)"], ["(2,4,-1)", r"\{2,-1,4\}", "(2,-1)"]),
    ("unions", "Domain?", r"(-\infty,0)\cup(0,\infty)", [r"x\ne 0"], [r"\mathbb{R}", "x>0"]),
    ("units", "What is it?", "5 km", ["5.0 km", r"5\text{ km}"], ["5 mm", "5 hours", "50 km"]),
    ("units", "What is it?", "90 minutes", ["1.5 hours", "90 min", "90"], ["90 hours", "1.5"]),
    ("units", "What is it?", "2 hours", ["120 minutes", "2 h"], ["2 days", "120 seconds"]),
    (
        "units",
        "Area?",
        r"25 \text{ cm}^2",
        [r"25\text{ cm}^{2}", "25 square centimeters", r"0.0025 \text{ m}^2"],
        [r"25\text{ cm}^3", "25 cm", r"25\text{ m}^2"],
    ),
    (
        "units",
        "What is it?",
        "60 km/h",
        ["60 kph", "60 kilometers per hour", r"60\,\mathrm{km/h}"],
        ["60 km", "60 m/s", "60 mph"],
    ),
    ("units", "What is it?", r"98.6^\circ F", ["98.6"], [r"98.6^\circ C"]),
    (
        "vectors",
        "What is it?",
        r"\begin{pmatrix}1\\2\end{pmatrix}",
        [r"\begin{bmatrix}1\\2\end{bmatrix}"],
        [r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"],
    ),
    ("vectors", "What is it?", r"\vec{a}+\vec{b}", [r"\vec{b}+\vec{a}"], [r"\vec{a}-\vec{b}"]),
    (
        "simplified fractions",
        r"Simplify $\dfrac{x^2-1}{x-1}$.",
        "x+1",
        ["x+1"],
        [
            r"\frac{(x-1)(x+1)}{x-1}",
            "(x^2-1)(x-1)^{-1}",
            r"\frac{x^2-1^2}{x-1}",
            r"\frac{(x+1)^2}{x+1}",
            r"\sqrt{(x+1)^2}",
            r"\frac{x^3-x}{x^2-x}",
            r"x^2-1 \div (x-1)",
            r"\frac{x^2-1.0}{x-1}",
        ],
    ),
    (
        "factored",
        "Factor the trinomial x^2 - 5x + 6.",
        "(x-2)(x-3)",
        ["(x - 3)(x - 2)"],
        [
            "(x-2)(x-3)+0",
            "x^2-5x+3!",
            "(x-2.5)^2-0.25",
            "(x-2)x-3(x-2)",
            "x^2-5x+6.0",
            "1(x^2-5x+6)",
            "(x^2-5x+6)^1",
            r"\frac{x^2-5x+6}{1}",
            "2(x^2/2-5x/2+3)",
            "(x^2-5x+6)",
        ],
    ),
    (
        "expanded",
        "Multiply (3x+2)(2x-1).",
        "6x^2+x-2",
        ["-2+x+6x^2"],
        ["(3x+2)(2x-1)", "3x(2x-1)+2(2x-1)", "6x^2+4x-3x-2", "(2x-1)(3x+2)"],
    ),
    (
        "radicals",
        "What is the square root of 48 in simplest radical form?",
        r"4\sqrt{3}",
        [r"4 \sqrt 3", r"\sqrt{3} \cdot 4"],
        [
            r"\sqrt{48}",
            r"2\sqrt{12}",
            r"\sqrt{16\cdot 3}",
            "48^{0.5}",
            r"\sqrt{3}+3\sqrt{3}",
            r"\sqrt{50-2}",
            r"\frac{12}{\sqrt3}",
            r"\sqrt{4}\sqrt{12}",
            r"\sqrt{\frac{96}{2}}",
            r"\sqrt[4]{2304}",
        ],
    ),
    (
        "fractions",
        r"Add $\frac12+\frac13$.",
        r"\frac{5}{6}",
        ["5/6", "0.833333"],
        [r"\frac{1}{2}+\frac13", r"\frac{10}{12}", "1/2+1/3", r"\frac{2.5}{3}"],
    ),
    (
        "fractions",
        r"Add $\frac{x}{2}+\frac{x}{3}$.",
        r"\frac{5x}{6}",
        [r"\frac56 x", "5x/6"],
        [r"\frac{x}{2}+\frac{x}{3}", r"\frac{10x}{12}", r"\frac{3x+2x}{6}", r"x(\frac12+\frac13)"],
    ),
    (
        "powers",
        r"Simplify $\frac{4x^5}{2x^2}$.",
        "2x^3",
        ["2x^{3}", r"2 \cdot x^3"],
        [r"2x^2\cdot x", "x^3+x^3", "2xxx", r"\frac{4x^5}{2x^2}", r"\frac{4x^3}{2}"],
    ),
    ("powers", "Simplify $(a^2)^3$.", "a^6", ["a^{6}"], ["(a^2)^3", "(a^3)^2", r"a^{2\cdot 3}", "a^{3+3}", "a^2a^4"]),
    (
        "simplified fractions",
        r"Simplify $\frac{x-1}{x^2-1}$.",
        r"\frac{1}{x+1}",
        ["(x+1)^{-1}", "1/(x+1)"],
        [r"\frac{x-1}{x^2-1}", r"\frac{x-1}{(x-1)(x+1)}"],
    ),
    ("simplified fractions", r"Simplify $\frac{1-x^2}{x-1}$.", "-x-1", ["-(x+1)", "-1-x"], [r"\frac{1-x^2}{x-1}"]),
    (
        "trigonometry",
        r"Simplify $\frac{\sin 2x}{2 \sin x}$.",
        r"\cos x",
        [r"\cos(x)"],
        [r"\frac{\sin 2x}{2\sin x}", r"\sin(x+\frac{\pi}{2})"],
    ),
    (
        "trigonometry",
        r"Simplify $\frac{\sin x}{\cos x}$.",
        r"\tan x",
        [r"\tan(x)"],
        [r"\frac{\sin x}{\cos x}", r"\sin x \sec x"],
    ),
    (
        "logarithms",
        r"Write $\ln 8$ in terms of $\ln 2$.",
        r"3\ln 2",
        [r"3\ln(2)"],
        [r"\ln 8", r"\ln 4+\ln 2", r"\ln 2^3"],
    ),
    (
        "logarithms",
        r"Write $\ln 3 + 2\ln 2$ as one logarithm.",
        r"\ln 12",
        [r"\ln(12)"],
        [r"\ln 3+\ln 4", r"2\ln 2+\ln 3"],
    ),
    ("exponentials", "Simplify $e^{2x}e^{3x}$.", "e^{5x}", [r"\exp(5x)"], ["e^{2x}e^{3x}", "(e^x)^5", "e^{2x+3x}"]),
    (
        "equations",
        "Write $y+1=3(x-1)$ in slope-intercept form.",
        "y=3x-4",
        ["y=-4+3x", "3x-4=y"],
        ["y+1=3(x-1)", "3x-y=4", "y-3x=-4", "y-3x+4=0"],
    ),
    ("equations", "Write $y=3x-4$ in standard form.", "3x-y=4", ["-y+3x=4"], ["y=3x-4", "3x=y+4"]),
    (
        "fractions",
        "Write 0.666... as a fraction.",
        r"\frac{2}{3}",
        ["2/3"],
        [r"0.\overline{6}+0", "4/6", "0.67", r"\frac{2}{3}\%", "66.7%"],
    ),
    ("sets", "What is it?", r"\{x \mid x>3\}", [r"\{x \mid x>3\}"], [r"\{x\mid x<3\}", r"\{3\}"]),
    (
        "powers",
        "Write 1024 as a power of 2.",
        "2^{10}",
        ["2^{10}"],
        ["2^{9}", "2^9+2^9", r"4^5\cdot 1", r"2^5\cdot2^5"],
    ),
    (
        "prime factors",
        "Write 72 as a product of primes.",
        r"2^3\cdot 3^2",
        [r"3^2 \cdot 2^3"],
        ["72", r"8\cdot 9", "2^3+3^2", r"2^2\cdot 3^3"],
    ),
    ("mixed numbers", "What is it?", r"1\frac12", ["1.5"], [r"1\cdot\frac12", "0.5", "11/2", r"\frac{1}{2}"]),
    (
        "multiples of pi",
        "Convert 270 degrees to radians.",
        r"\frac{3}{2}\pi",
        [r"1.5\pi", r"\frac{3\pi}{2}"],
        [r"\pi+\frac{\pi}{2}", r"\frac{6}{4}\pi", "270"],
    ),
    ("intervals", "What is it?", "(1,2]", [r"1<x\le 2"], ["[1,2]", "(1,2)", r"\{1,2\}", "1,2"]),
    ("lists", "What is it?", "5,12,13", ["5, 12, 13"], ["(5,12)", "51213", "5,12", "12,13,5,6"]),
    ("polynomials", "What is it?", "4x^2y", ["4yx^2"], ["4x^2", "4xy^2", r"2xy\cdot 2x"]),
    ("units", "What is it?", "100 cm", ["1 m", "1000 mm", "100"], ["100 m", "1 cm"]),
    ("units", "What is it?", "50 mph", ["50 miles per hour", "50"], ["50 km/h", "50 kph"]),
    ("units", "What is it?", r"32^\circ F", [r"32^{\circ}F"], [r"32^\circ C", r"0^\circ F"]),
    ("text", "What is it?", "noon", ["Noon"], ["no on", "midnight"]),
    ("times", "What is it?", "12:00", ["12:00"], ["12", "0:12", "24:00"]),
    ("text", "Is it?", "True", ["true"], ["false", "1"]),
    ("text", "What is it?", "not enough information", ["Not enough information"], ["enough information", "0"]),
    ("text", "What is it?", r"\text{Thursday}", ["Thursday", "thursday."], ["Tuesday", r"\text{Thu}"]),
    ("text", "What is it?", "isosceles", ["Isosceles"], ["scalene", "soscelesi"]),
    ("number sets", "What is it?", r"\mathbb{R}", [r"\mathbb{R}"], [r"\mathbb{Z}", "0"]),
    ("number sets", "What is it?", r"x \in \mathbb{Z}", [r"x\in\mathbb{Z}"], [r"x\in\mathbb{R}"]),
    ("segments", "What is it?", r"\overline{AB}", [r"\overline{AB}"], [r"\overline{AC}"]),
    ("functions", "What is it?", "f(x)=2x+1", ["2x+1", "f(x)=1+2x"], ["f(x)=2x", "2x-1"]),
    (
        "expanded",
        "Find the product of $x-2$ and $x+2$ and expand.",
        "x^2-4",
        ["-4+x^2"],
        ["(x-2)(x+2)", "(x+2)(x-2)", "x^2-2^2", "(x-2)^2+4(x-2)"],
    ),
    ("integrals", "Integrate 2x.", "x^2+C", ["C+x^2"], ["x^2", "2x"]),
    ("decimals", "What is it?", "0.0001", ["1e-4", r"1\times10^{-4}"], ["0.001", "0", "0.0002"]),
    ("decimals", "What is it?", "-0.5", ["-1/2", r"-\frac12"], ["0.5", "-0.05"]),
    (
        "plain numbers",
        "What is it?",
        "7",
        ["7", "7.0", "+7"],
        ["-7", "07.1", "7/2", "7!", "7^2", "|7|", r"\sqrt{49}", "0.7e1.0"],
    ),
    ("factored", "Factor $4x^2+4x+1$.", "(2x+1)^2", ["(1+2x)^2", "(2x+1)(2x+1)"], ["4x^2+4x+1", "(2x)^2+2(2x)+1"]),
    ("completed squares", "Write $4x^2+4x+1$ in vertex form.", r"4(x+\frac12)^2", [r"4(\frac12+x)^2"], ["4x^2+4x+1"]),
    ("factored", "Factor $ac+ad+bc+bd$.", "(a+b)(c+d)", ["(c+d)(b+a)"], ["ac+ad+bc+bd", "a(c+d)+b(c+d)"]),
    ("factored", "Factor $x^3+x$.", "x(x^2+1)", ["(1+x^2)x"], ["x^3+x"]),
    ("complex", "Simplify $i^5$.", "i", ["i"], [r"\sqrt{-1}", "-i", "i^5"]),
    ("complex", r"Simplify $\frac{5}{3-i}$.", r"\frac{3+i}{2}", [r"\frac32+\frac12 i"], [r"\frac{5}{3-i}"]),
    (
        "matrices",
        r"Square $\begin{pmatrix}1&2\\3&4\end{pmatrix}$.",
        r"\begin{pmatrix}7&10\\15&22\end{pmatrix}",
        [r"\begin{bmatrix}7&10\\15&22\end{bmatrix}"],
        [
            r"\begin{pmatrix}1&2\\3&4\end{pmatrix}^2",
            r"\begin{pmatrix}1&2\\3&4\end{pmatrix}\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        ],
    ),
]


async def grades(question: str, gold: str, answers: list[str]) -> list[AnswerGrade]:
    tried = (grade_answer(answer, gold, question=question, cpu_limit_s=5.0) for answer in answers)
    return await asyncio.gather(*tried)


@pytest.mark.parametrize("family", sorted({family for family, *_ in ANSWERS}))
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


@settings(max_examples=12, deadline=None)
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
