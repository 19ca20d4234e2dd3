"""The form of parsed expressions: what is left to compute, and whether an answer restates its question.

Two expressions of equal value may differ in what they leave to do: `(x+1)(x-1)` answers "factor" and `x^2-1` does not.
`keeps_form` compares an answer with the right answer by their operators, not by their text: the order of terms and
factors, signs and the notation of fractions, powers and roots have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import chain
from typing import Any, NamedTuple

from sympy import Add, E, Expr, Float, Integer, Mul, Pow, S, exp, preorder_traversal
from sympy.core.relational import Relational
from sympy.sets import Set

MAX_EXPONENT = 1000  # of plain numbers that are computed
INFINITIES = (S.Infinity, S.NegativeInfinity, S.ComplexInfinity, S.NaN)


class Form(NamedTuple):
    """What an expression leaves to do.

    `operators` are counted once for each sum, product, quotient, power, root or function; `roots` are those that are
    not simplified or stand in a denominator; `products` are those that hold a sum and could be multiplied out.
    """

    operators: int = 0
    roots: int = 0
    products: int = 0

    def plus(self, other: Form) -> Form:
        return Form(*(one + two for one, two in zip(self, other, strict=True)))


# ---- what is always left to compute


def is_finished(answer: Any, gold: Any) -> bool:
    """False if more parts of an answer than of the right answer can be computed (1 + 2, 2^10, 7x - x), or if it
    bounds more than a letter and the right answer, a set or relation, does not."""
    said = list(preorder_traversal(answer))
    wanted = list(preorder_traversal(gold))
    if sum(map(is_unevaluated, said)) > sum(map(is_unevaluated, wanted)):
        return False
    bounds = any(isinstance(node, Relational | Set) for node in wanted)
    return not bounds or all(map(is_solved, said)) or not all(map(is_solved, wanted))


def is_unevaluated(node: Any) -> bool:
    """True for a sum with like terms, a product of several plain numbers or of powers of one letter, a power or root of
    plain numbers with a rational value, a power of a power, and operations on infinity."""
    if isinstance(node, Add):
        terms = [split_factors(term) for term in _parts(node, Add)]
        kinds = {frozenset(powers.items()) for _, powers in terms}
        is_infinite = any(base in INFINITIES for _, powers in terms for base in powers)
        return is_infinite or len(kinds) < len(terms) or any(number == 0 for number, _ in terms)
    if isinstance(node, Mul):
        return _has_open_numbers(node) or _has_like_powers(node)
    if not isinstance(node, Pow) or node.exp == -1:
        return False
    is_nested = isinstance(node.base, Pow | exp) and (node.exp.is_Integer or not node.free_symbols)
    if node.base in INFINITIES or is_nested:
        return True
    if not (_is_plain(node.base) and _is_plain(node.exp) and abs(node.exp) < MAX_EXPONENT):
        return False
    return bool(_is_plain(Pow(node.base, node.exp)))


def _has_like_powers(product: Any) -> bool:
    """True if a letter occurs twice among the factors, or a factor above and below a fraction bar."""
    powers = [split_factors(factor)[1] for factor in _parts(product, Mul)]
    pairs = list(chain.from_iterable(one.items() for one in powers))
    letters = [base for base, _ in pairs if base.is_Symbol or base == E]
    under = {base for base, exponent in pairs if exponent.could_extract_minus_sign()}
    over = {base for base, exponent in pairs if not exponent.could_extract_minus_sign()}
    return len(set(letters)) < len(letters) or bool(over & under)


def _parts(expression: Any, kind: type) -> Iterator[Any]:
    """Yields the terms of a sum or the factors of a product, also of those inside it."""
    for argument in expression.args:
        if isinstance(argument, kind):
            yield from _parts(argument, kind)
        else:
            yield argument


def is_solved(node: Any) -> bool:
    """False for a relation without a single letter on one side."""
    return not isinstance(node, Relational) or node.lhs.is_Symbol or node.rhs.is_Symbol


def _has_open_numbers(product: Any) -> bool:
    if any(factor in INFINITIES for factor in product.args) and set(product.args) != {S.Infinity, Integer(-1)}:
        return True
    over = [number for number in _numbers(product) if abs(number) > 1]
    under = [1 / number for number in _numbers(product) if abs(number) < 1]
    if len(over) > 1 or len(under) > 1:
        return True
    if not over or not under:
        return False
    return not over[0].is_Integer or not under[0].is_Integer or math.gcd(over[0], under[0]) > 1


def _numbers(factor: Any) -> Iterator[Any]:
    """Yields the plain numbers among the factors of a product, those of its denominator as their inverses."""
    if factor.is_Rational:
        yield Integer(factor.p)
        yield 1 / Integer(factor.q)
    elif factor.is_Float:
        yield factor
    elif isinstance(factor, Mul):
        for argument in factor.args:
            yield from _numbers(argument)
    elif isinstance(factor, Pow) and factor.exp == -1:
        yield from (1 / number for number in _numbers(factor.base) if number)


def _is_plain(number: Any) -> bool:
    return bool(number.is_Rational or number.is_Float)


# ---- what the right answer has done and a restated question has not


def keeps_form(answer: Any, gold: Any) -> bool:
    """True if an answer of the right value has also the right answer's form, or a shorter one of the same kind."""
    if not isinstance(answer, Expr) or not isinstance(gold, Expr):
        return _relation_keeps_form(answer, gold)
    if any(map(is_unevaluated, preorder_traversal(gold))):  # such as 2^10 or 2^3 * 3^2, whose numbers are the form
        return integers_in(answer) == integers_in(gold)
    if _is_plain(answer):
        return True
    said = form_of(answer)
    wanted = form_of(gold)
    if said.operators > wanted.operators or said.roots > wanted.roots:
        return False
    if all(letter.name == "i" for letter in gold.free_symbols):
        return True
    if kind_of(answer) != kind_of(gold) or said.products != wanted.products:
        return False
    return count_factors(answer) >= count_factors(gold)


def integers_in(expression: Any) -> list[Any]:
    """Returns the integers in an expression, sorted."""
    return sorted(node for node in preorder_traversal(expression) if node.is_Integer)


def _relation_keeps_form(answer: Any, gold: Any) -> bool:
    said = form_of(answer)
    wanted = form_of(gold)
    if isinstance(answer, Relational) and isinstance(gold, Relational):
        sides = [sorted(f"{kind_of(side)} {side.free_symbols}" for side in one.args) for one in (answer, gold)]
        return sides[0] == sides[1] and said.operators <= wanted.operators and said.products == wanted.products
    return said.roots <= wanted.roots


def kind_of(expression: Any) -> str:
    """Returns "sum", "product" (also of a quotient or power), or the name of another type."""
    number, powers = split_factors(expression)
    if not powers:
        return "number"
    if abs(number) != 1 or len(powers) > 1 or set(powers.values()) != {1}:
        return "product"
    (base,) = powers
    return "sum" if isinstance(base, Add) else type(base).__name__


def count_factors(expression: Any) -> int:
    """Returns how many factors with letters a product has, equal ones included."""
    _, powers = split_factors(expression)
    counts = (int(exponent) for base, exponent in powers.items() if exponent.is_Integer and base.free_symbols)
    return sum(count for count in counts if count > 0)


def split_factors(expression: Any) -> tuple[Any, dict[Any, Any]]:
    """Returns an expression as a plain number and the exponents of its other factors by their bases."""
    if _is_plain(expression):
        return expression, {}
    if isinstance(expression, exp):
        return Integer(1), {E: expression.args[0]}
    if isinstance(expression, Mul):
        number = Integer(1)
        powers = dict[Any, Any]()
        for factor in expression.args:
            other, more = split_factors(factor)
            number *= other
            for base, exponent in more.items():
                powers[base] = powers.get(base, 0) + exponent
        return number, powers
    if isinstance(expression, Pow):
        exponent, letters = split_factors(expression.exp)
        exponent = expression.exp if letters else exponent
        number, powers = split_factors(expression.base)
        if exponent.is_Integer and abs(exponent) < MAX_EXPONENT and number != 0:
            return number**exponent, {base: power * exponent for base, power in powers.items()}
        return Integer(1), {expression.base: exponent}
    return Integer(1), {expression: Integer(1)}


def form_of(expression: Any) -> Form:
    """Returns the form of an expression, relation, set, tuple or matrix."""
    if isinstance(expression, Add):
        return total(map(form_of, expression.args)).plus(Form(len(expression.args) - 1))
    if not isinstance(expression, Expr):
        return total(map(form_of, expression.flat() if hasattr(expression, "flat") else expression.args))
    number, powers = split_factors(expression)
    if not powers:
        return Form()
    if powers == {expression: 1}:
        return total(map(form_of, expression.args)).plus(Form(bool(expression.args)))
    return _form_of_product(number, powers)


def _form_of_product(number: Any, powers: dict[Any, Any]) -> Form:
    has_number = abs(number) != 1
    form = Form(len(powers) - 1 + has_number)
    if not has_number and all(exponent.could_extract_minus_sign() for exponent in powers.values()):
        form = form.plus(Form(1))
    is_product = has_number or len(powers) > 1
    is_open = False
    for base, exponent in powers.items():
        is_under = exponent.could_extract_minus_sign()
        size = -exponent if is_under else exponent
        form = form.plus(form_of(base))
        if size != 1:
            form = form.plus(Form(1)).plus(form_of(size))
        is_open |= isinstance(base, Add) and not is_under and (is_product or size != 1)
        form = form.plus(Form(0, _is_open_root(base, exponent, is_under)))
    return form.plus(Form(0, 0, is_open))


def _is_open_root(base: Any, exponent: Any, is_under: bool) -> bool:
    """True for a root of a number that can be simplified, and for one in a denominator."""
    is_root = exponent.is_Rational and not exponent.is_Integer
    if is_under:
        return not base.free_symbols and (is_root or base.has(Pow))
    number, others = split_factors(base)
    return is_root and not others and not isinstance(Pow(number, exponent), Pow)


def total(forms: Iterable[Form]) -> Form:
    """Returns the sum of forms."""
    return reduce(Form.plus, forms, Form())


# ---- values


def is_near(gold: Any, answer: Any, tolerance: float) -> bool | None:
    """Returns whether two constants, one of them a decimal, are within a relative `tolerance`; else None."""
    constants = isinstance(gold, Expr) and isinstance(answer, Expr) and not (gold.free_symbols | answer.free_symbols)
    if not constants or not (gold.has(Float) or answer.has(Float)):
        return None
    wanted = complex(gold.evalf(20))
    got = complex(answer.evalf(20))
    return abs(wanted - got) <= tolerance * abs(wanted)
