"""The rules for answers that are not plain numbers: which text is parsed at all, and which forms are final.

An answer is **readable** if it consists of ASCII letters, digits, the signs of `_SIGN` and the LaTeX commands of
`VALUE_COMMANDS` and `OPERATOR_FAMILIES`, nested at most `MAX_DEPTH` deep. Anything else is rejected without parsing;
math-verify receives only the text that `join_tokens` builds from our own tokens.

An answer is **final** if it leaves nothing to be computed that the right answer has computed:

- an operator of `OPERATOR_FAMILIES` (integrals, sums, limits, gcd, logarithms, trigonometry, ...) is allowed only if
  one of the same family occurs in the right answer;
- its fractions of two integers are in lowest terms;
- it is not copied from the question, and holds no root of a number from there, unless the right answer does so too.

`expression_form` adds what the parsed expressions show: no more is left to compute than in the right answer, and an
answer to a question that states an expression of this value, or asks for a form (`asks_for_form`), has the right
answer's form.
"""

from __future__ import annotations

import math
import re

from palestra.core.mappings import key_by_value
from palestra.environments.math.plain_numbers import normalize_latex

MAX_DEPTH = 20
MAX_TOKENS = 400
MAX_STATED = 6  # expressions of a question that are compared with the right answer

_VALUES = """
    frac sqrt pi infty pm mp cdot times div circ degree cup cap setminus in notin emptyset varnothing mathbb
    mathbf mathrm mathcal text textbf textit textrm mbox le leq ge geq lt gt ne neq approx equiv mid overline
    bar vec hat angle triangle to land lor lbrace rbrace langle rangle begin end ldots dots cdots alpha beta
    gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon
    phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell subset subseteq perp
    parallel prime leftarrow rightarrow operatorname
"""
VALUE_COMMANDS = frozenset(_VALUES.split())
_FAMILIES = {
    "integral": "int iint iiint oint",
    "sum": "sum prod bigcup bigcap",
    "limit": "lim limsup liminf",
    "divisor": "gcd lcm",
    "extreme": "max min sup inf",
    "matrix function": "det rank tr dim ker",
    "choice": "binom dbinom tbinom choose",
    "logarithm": "log ln lg",
    "exponential": "exp",
    "trigonometry": "sin cos tan cot sec csc",
    "inverse trigonometry": "arcsin arccos arctan arccot arcsec arccsc",
    "hyperbolic": "sinh cosh tanh coth sech csch",
    "rounding": "lfloor rfloor lceil rceil floor ceil round",
    "absolute value": "lvert rvert vert lVert rVert Vert abs",
    "remainder": "mod bmod pmod",
    "derivative": "partial nabla",
    "complex part": "Re Im arg",
}
OPERATOR_FAMILIES = key_by_value({family: names.split() for family, names in _FAMILIES.items()})
_SIGN_OPERATORS = {"!": "factorial", "|": "absolute value", "'": "derivative"}

_SIGN = r"[-+*/^_=<>()\[\],;:.!%|&']"
_TOKEN = re.compile(rf"\s*(?:\\(?P<command>[A-Za-z]++)|[A-Za-z]++|[0-9]++|{_SIGN}|\\[{{}}%|\\]|[{{}}])")
_DERIVATIVE = re.compile(r"\\frac\{d[^{}]*\}\{d[A-Za-z\\]")
_ROOT = re.compile(r"\\sqrt\s*\{?\s*([0-9]+)")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_ASKS_FOR_FORM = re.compile(
    r"simpl|factor(?!ial)|expan|rationali[sz]|multiply out|(?:single|one) (?:fraction|log)|lowest terms"
    r"|complet\w+ the square|(?:standard|vertex|intercept|slope|radical|expanded) form",
    re.IGNORECASE,
)
_MATRIX = re.compile(r"(?:[A-Za-z]=)?\\begin(?:(?!\\begin).)*\\end\{[a-z]+\}")
_FRACTION = re.compile(r"\\frac\{([0-9]+)\}\{([0-9]+)\}|(?<![\w.}^])([0-9]+)/([0-9]+)(?![0-9.])")
_SQRT = re.compile(r"(?<!\\)\bsqrt\s*(?:\(([^()]*)\)|(\d+))")
_BETWEEN_WORDS = re.compile(r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|of|in|to|is|as|by|at|on|or|if|an|be|it)(?![A-Za-z])")
_OPEN = ("{", "(", "[", "\\{")
_CLOSED = ("}", ")", "]", "\\}")


def tokenize_answer(text: str) -> list[str] | None:
    """Returns the tokens of an answer; None if it is not readable."""
    text = normalize_latex(text)
    place = 0
    depth = 0
    tokens = list[str]()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if not match or len(tokens) >= MAX_TOKENS or not _is_known(match["command"]):
            return None
        token = match[0].strip()
        depth += (token in _OPEN) - (token in _CLOSED)
        if depth > MAX_DEPTH or (token == "_" and tokens[-1:] == ["_"]):
            return None
        tokens.append(token)
        place = match.end()
    return tokens


def join_tokens(tokens: list[str]) -> str:
    """Returns the text of tokens, for math-verify."""
    text = ""
    for token in tokens:
        is_glued = (text[-1:].isalpha() and token[0].isalpha()) or (text[-1:].isdigit() and token.isdigit())
        text += f" {token}" if is_glued else token
    return text


def operator_families(tokens: list[str]) -> set[str]:
    """Returns the operator families that occur among the tokens."""
    families = {OPERATOR_FAMILIES[name] for token in tokens if (name := token.removeprefix("\\")) in OPERATOR_FAMILIES}
    if _DERIVATIVE.search("".join(tokens)):
        families.add("derivative")
    return families | {_SIGN_OPERATORS[token] for token in tokens if token in _SIGN_OPERATORS}


def is_copied_from(tokens: list[str], text: str) -> bool:
    """True if an answer with an operation in it occurs in `text`, apart from spaces, brackets and dollar signs."""
    answer = _bare("".join(tokens))
    return bool(re.search(r"[-+*/^\\]", answer)) and answer in _bare(normalize_latex(text))


def asks_for_form(question: str) -> bool:
    """True if a question asks for another form of an expression: to simplify, expand, factor or rationalise it."""
    return bool(_ASKS_FOR_FORM.search(question))


def stated_expressions(question: str) -> list[str]:
    """Returns the first `MAX_STATED` readable expressions with an operator or digit in a question, for math-verify: its
    formulas, or without dollar signs what stands between words."""
    formulas = [next(filter(None, found)) for found in _FORMULA.findall(question)]
    if not formulas:
        text = _SQRT.sub(r"\\sqrt{\1\2}", question)
        formulas = _BETWEEN_WORDS.split(text)
    pieces = [piece.strip(" .") for formula in formulas for piece in re.split(r"[,;:?\n]|\.\s", formula)]
    found = [tokens for piece in pieces if re.search(r"[-+*/^\\0-9]", piece) and (tokens := tokenize_answer(piece))]
    return [join_tokens(tokens) for tokens in found[:MAX_STATED]]


def count_open_fractions(text: str) -> int:
    """Returns how many fractions of two integers are not in lowest terms."""
    pairs = [[int(number) for number in groups if number] for groups in _FRACTION.findall(text)]
    return sum(under < 2 or math.gcd(over, under) > 1 for over, under in pairs)


def is_calculation_of_matrices(tokens: list[str], gold: list[str]) -> bool:
    """True if an answer holds more than one matrix, or anything around it, and the right answer is a single matrix."""
    said = "".join(tokens)
    wanted = "".join(gold)
    return "\\begin" in said and bool(_MATRIX.fullmatch(wanted)) and not _MATRIX.fullmatch(said)


def integers_under_roots(text: str) -> set[str]:
    """Returns the integers (as text) under LaTeX root signs."""
    return set(_ROOT.findall(normalize_latex(text)))


def _is_known(command: str | None) -> bool:
    return command is None or command in VALUE_COMMANDS or command in OPERATOR_FAMILIES


def _bare(text: str) -> str:
    return re.sub(r"\\(?=[()\[\]])|[\s${}()\[\]]", "", text)
