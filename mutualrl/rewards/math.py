"""Mathematical answers: numbers, expressions, equations, intervals, lists, tuples, matrices, words.

`reply.find` finds the answer, `notation.normalise` gives it one spelling, and the comparison here takes it apart:
lists, sets, tuples, unions and matrices are compared member by member, numbers exactly, expressions by exact parsing
and evaluation at fixed points to 30 digits, and what is left (equations, inequalities, determinants) by math-verify.
math-verify alone rounds to six places, searches a part of a list, and cannot run off the main thread.

What was decided where graders differ:

  - order: bare lists, "a and b" and {a, b} have none; (a, b) and [a, b] do, and their brackets count. A bare list
    stands for a tuple if it has the tuple's order. Every member must be there, once.
  - percent: 7% is 7% and, where only one side has the sign, 7 or 0.07.
  - decimals: exact, but for six or more significant digits of an endless fraction or a root (see `same_number`).
  - units, currency, degrees, thousands separators: dropped if only one side has a unit; two units must agree.
  - `x = 3` and `x \\in A` stand for 3 and A, if both sides that name something name the same thing.
  - a chain `a = b = c` stands for c; `a \\approx b` for a.
  - `101_2` is a numeral of that base and not 101.
  - of several boxed answers the last counts, unless they form a list ("\\boxed{1} and \\boxed{2}").
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
import re

from mutualrl.rewards import reply as replies
from mutualrl.rewards.notation import Numeral, brackets, normalise, numeral, same_number, split
from mutualrl.types import Problem

IN_WORKER = True
BY_ANSWER = True
VERSION = "1"
PACKAGES = ("math-verify", "sympy")

_LONGEST = 10_000  # characters of an answer; what is longer is none
_DIGITS = 30  # decimal digits to which expressions are evaluated
_POINTS = 10  # points at which expressions with variables are compared

_LIST = r"[,;]|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])"
_NAME = re.compile(
    r"\(?\s*(?:[\\|]?[A-Za-z]+[A-Za-z']*(?:_\{?\w+\}?)?\|?(?:\s*\([\w\s,]*\))?|\\angle\s*[A-Z]+|\\text\s*\{[^{}]*\})"
    r"(?:\s*[,:/]\s*(?:\\?[A-Za-z]+(?:_\{?\w+\}?)?))*\s*\)?|\\frac\{[A-Z]+\}\{[A-Z]+\}"
)
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|log|ln|arc\w+|sqrt|pi|infty)\b|^\(?\s*[ei]\s*\)?$")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]|\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega|text)\b")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'’.\- ]*")
_MATRIX = re.compile(r"\\begin\{pmatrix\}((?:(?!\\end).)*)\\end\{pmatrix\}")


def warm_up() -> None:
    """Pays for imports and first calls."""
    grade(r"$\frac{x+2}{7}$", Problem("", "", answer=r"\frac{x}{7}+\frac{2}{7}"))


@dataclasses.dataclass(frozen=True)
class Options:
    """How answers are found."""

    last_number: bool = True  # in a reply that states no answer its last formula or number counts as one


def extract(reply: str, problem: Problem, options: Options = Options()) -> str | None:
    """The answer in one spelling, without spaces and units; numbers as integer or reduced fraction. None if absent."""
    found = _found(reply, problem, options)
    if not found:
        return None
    text = normalise(found)[0]
    text = _subject(text)[1] if text else ""
    number = numeral(text)
    if number:
        return f"{number.value}%" if number.percent else str(number.value)
    return _squeeze(text) or None


def grade(reply: str, problem: Problem, options: Options = Options()) -> float:
    """1.0 if the answer in the reply equals the gold answer, else 0.0 (also where either cannot be read).

    NaN without a gold answer: nothing can be judged.
    """
    if problem.answer is None:
        return math.nan
    found = _found(reply, problem, options)
    if not found or not problem.answer:
        return 0.0
    gold, gold_unit = normalise(_gold(problem.answer))
    answer, unit = normalise(found)
    if not answer or unit and gold_unit and unit != gold_unit:
        return 0.0
    try:
        return float(_equal(gold, answer))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # sympy and the LaTeX parser raise nearly anything on nonsense
        return 0.0


def _found(reply: str, problem: Problem, options: Options) -> str | None:
    found = replies.find(replies.final_part(reply, problem), options.last_number)
    return found if found and len(found) <= _LONGEST else None


def _gold(answer: str) -> str:
    """The answer within a gold text, which may be a whole solution."""
    prose = re.sub(r"\\[A-Za-z]+(?:\{[^{}]*\})?", " ", answer)
    if replies.boxes(answer) or len(re.findall(r"[A-Za-z]{2,}", prose)) < 8:
        return answer
    return replies.find(answer) or answer


def _squeeze(text: str) -> str:
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"\{(\w)\}", r"\1", re.sub(r"\s+|\\(?:cdot)\b\s*(?=[A-Za-z\\(])", "", text))


def _equal(gold: str, answer: str) -> bool:
    if _squeeze(gold) == _squeeze(answer):
        return True
    if _based(gold) or _based(answer):
        return False  # numerals with a base are equal as written or not at all
    gold_name, gold_value = _subject(gold)
    name, value = _subject(answer)
    if gold_name and name and gold_name != name and not ("(" in gold_name or "(" in name):
        return False
    if bool(gold_name) != bool(name) and "=" in gold and "=" in answer and _relations(gold, answer):
        return True  # 2x + y = 3 and y = 3 - 2x
    if (gold_value, value) != (gold, answer):
        return _equal(gold_value, value)
    kind, items = _members(gold)
    other_kind, others = _members(answer)
    if kind or other_kind:
        verdict = _equal_collections(kind, items, other_kind, others)
        return _relations(gold, answer) if verdict is None else verdict
    return _equal_atoms(gold, answer)


def _based(text: str) -> bool:
    return bool(re.fullmatch(r"[\dA-F]+_\{?\d+\}?", _squeeze(text)))


def _subject(text: str) -> tuple[str, str]:
    """(name, value): `x = 3` gives x and 3, `2 + 2 = 4` nothing and 4; an equation proper stays whole."""
    text = split(text, r"\\approx")[0] if not re.match(r"^[^=]*\\approx", text) else text.replace(r"\approx", "=", 1)
    if len(split(text, _LIST)) > 1:
        head = re.match(r"^([^=,]*)=([^=]*)$", text)
        if head and _is_name(head.group(1)):  # n = 1, 2, 3
            return "", head.group(2).strip()
        return "", text
    if len(parts := split(text, r"\\in\b")) == 2 and _is_name(parts[0]):
        return _squeeze(parts[0]), parts[1]
    parts = split(text, r"(?<![<>!:])=")
    if len(parts) < 2:
        return "", text
    left, right = parts[0], parts[-1]
    if _is_name(left):
        return _squeeze(left), right
    if len(parts) > 2 or not _LETTER.search(left) and not _LETTER.search(right):
        return "", right
    return "", text


def _is_name(text: str) -> bool:
    return bool(_NAME.fullmatch(text.strip())) and not _FUNCTION.search(text)


def _members(text: str) -> tuple[str, list[str]]:
    """(kind, members): kind is 'list', 'set', 'union', 'matrix', an opening and closing bracket, or '' for an atom."""
    parts = split(text, _LIST)
    if len(parts) > 1:
        return "list", list(itertools.chain.from_iterable(map(_signs, parts)))
    if len(parts := split(text, r"\\cup\b")) > 1:
        return "union", parts
    if m := _MATRIX.fullmatch(text.strip()):
        rows = [split(row, "&") for row in re.split(r"\\\\", m.group(1)) if row.strip()]
        return f"matrix{len(rows)}", list(itertools.chain.from_iterable(rows))
    if pair := brackets(text):
        opening, inner, closing = pair
        parts = split(inner, r"[,;]")
        if opening == "{":
            return "set", list(itertools.chain.from_iterable(map(_signs, parts)))
        if len(parts) > 1:
            return opening + closing, parts
    signs = _signs(text)
    return ("list", signs) if len(signs) > 1 else ("", [text])


def _signs(text: str) -> list[str]:
    if r"\pm" not in text:
        return [text]
    return [text.replace(r"\pm", "+").lstrip("+ "), text.replace(r"\pm", "-")]


def _equal_collections(kind: str, items: list[str], other_kind: str, others: list[str]) -> bool | None:
    """Member-wise comparison; None where one side may be a relation that describes a set."""
    loose = {"list", "set"}
    if kind in loose and other_kind in loose:
        return _same_members(items, others)
    if kind == other_kind == "union":
        return _same_members(items, others) or None
    if kind == other_kind:
        return len(items) == len(others) and all(map(_equal, items, others))
    if {kind, other_kind} & {"list"} and not {kind, other_kind} & {"", "union"}:
        return len(items) == len(others) and all(map(_equal, items, others))
    if {kind, other_kind} == {"set", ""}:
        return len(items) == len(others) == 1 and _equal(items[0], others[0])
    return None if "" in (kind, other_kind) else False


def _same_members(items: list[str], others: list[str]) -> bool:
    if len(items) != len(others):
        return False
    rest = list(others)
    for item in items:
        match = next((i for i, other in enumerate(rest) if _equal(item, other)), None)
        if match is None:
            return False
        del rest[match]
    return True


def _equal_atoms(gold: str, answer: str) -> bool:
    a, b = numeral(gold), numeral(answer)
    if a and b:
        return same_number(a, b)
    if _is_words(gold) or _is_words(answer):
        return _words(gold) == _words(answer)
    return _equal_scalars(gold, answer, a, b)


def _is_words(text: str) -> bool:
    inner = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).strip(" ()")
    return bool(_WORDS.fullmatch(inner)) and (len(inner) == 1 or bool(re.search(r"[A-Za-z]{3}", inner)))


def _words(text: str) -> str:
    text = re.sub(r"[\s().'’]+", "", re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text))
    return text.lower() if len(text) > 1 else text  # case tells variables apart, not words


def _equal_scalars(gold: str, answer: str, a: Numeral | None, b: Numeral | None) -> bool:
    import sympy

    left, right = _parse(gold), _parse(answer)
    if left is None or right is None:
        return False
    if not (isinstance(left, sympy.Expr) and isinstance(right, sympy.Expr)):
        return _relations(gold, answer)
    if left.is_Matrix or right.is_Matrix:
        return _relations(gold, answer)
    verdict = _equal_values(left, right, a or b)
    return _relations(gold, answer) if verdict is None else verdict


def _equal_values(left, right, decimal: Numeral | None) -> bool | None:
    """Compares two sympy expressions by value; None where neither can be evaluated."""
    names = sorted({s.name for e in (left, right) for s in e.free_symbols})
    rng = random.Random(0)
    agreed = 0
    for _ in range(_POINTS if names else 1):
        # Irregular rationals of either sign, so that |x| and x, or a and b, cannot pass for one another.
        at = {name: _rational(rng) for name in names}
        x, y = (_value(e, at) for e in (left, right))
        if x is None or y is None:
            continue
        if names and (x.imag or y.imag):
            continue  # branches of roots differ between equal formulas
        size = max(abs(x), abs(y))
        if abs(x - y) > size * 10 ** (5 - _DIGITS):
            rounded = decimal and decimal.significant >= 6 and not names and not x.imag and not y.imag
            return bool(rounded and abs(x - y) < 10**-decimal.digits)
        agreed += 1
    return True if agreed >= (3 if names else 1) else None


def _rational(rng: random.Random):
    import sympy

    return sympy.Rational(rng.choice((-1, 1)) * rng.randint(100, 4000), rng.choice((997, 1009, 1013)))


def _value(expression, at: dict):
    """mpmath number at a point, or None."""
    import mpmath
    import sympy

    substituted = expression.subs({s: at[s.name] for s in expression.free_symbols}).doit()
    value = sympy.N(substituted, _DIGITS, maxn=400)
    if not value.is_number or not value.is_finite or value.has(sympy.Function):
        return None
    with mpmath.workdps(_DIGITS):
        re_, im = value.as_real_imag()
        real, imag = mpmath.mpf(re_), mpmath.mpf(im)
        return mpmath.mpc(real, imag if abs(imag) > abs(real) * mpmath.mpf(10) ** (5 - _DIGITS) else 0)


def _parse(text: str):
    """A formula as a sympy object, decimals taken exactly; None if it is no formula or too large to evaluate."""
    if len(text) > 1000 or _explodes(text) or '"' in text or "__" in text:
        return None
    exact = re.sub(r"(?<![\d.])(\d*)\.(\d+)", lambda m: rf"\frac{{{m[1]}{m[2]}}}{{1{'0' * len(m[2])}}}", text)
    return _parse_latex(exact.rstrip("%"))


@functools.lru_cache(maxsize=1024)
def _parse_latex(text: str):
    import latex2sympy2_extended
    from math_verify.grader import should_treat_as_complex

    # Not math_verify.parse: its own rewriting of the text loses formulas that the parser behind it reads.
    try:
        return latex2sympy2_extended.latex2sympy(
            text, is_real=not should_treat_as_complex(text), convert_degrees=False, normalization_config=None
        )
    except (MemoryError, RecursionError):
        raise
    except Exception:  # the parser's, ANTLR's and sympy's many error classes
        return None


def _explodes(text: str) -> bool:
    """Whether evaluating could take for ever: towers of powers, very large exponents, factorials of large numbers."""
    if re.search(r"\^\s*\{?\s*[(\d.\s]*\d\s*\)*\s*\^|\^\s*\{\s*\(*-?\d{6,}|\d{5,}\s*[})]*\s*!|![)}\s]*!", text):
        return True
    exponents = [int(n) for n in re.findall(r"\^\s*\{\s*-?(\d+)", text)]
    return not _LETTER.search(text) and math.prod(exponents) > 10**6  # ((10^1000)^1000)^1000


def _relations(gold: str, answer: str) -> bool:
    """math-verify's verdict: equations up to scaling, inequalities as intervals, determinants, matrix products."""
    import math_verify

    left, right = _parse(gold), _parse(answer)
    if left is None or right is None:
        return False
    return math_verify.verify(left, right, float_rounding=15, allow_set_relation_comp=True, timeout_seconds=None)
