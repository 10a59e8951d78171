"""One notation for mathematical answers: strings in LaTeX, code style or Unicode to one LaTeX form, and exact numbers.

Only text is handled here: nothing is evaluated, so nothing can hang.
"""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction

from mutualrl.rewards.reply import boxes, fences

_UNICODE = {
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\neq ", "×": r"\cdot ", "·": r"\cdot ",
    "÷": "/", "−": "-", "–": "-", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "°": r"^\circ ", "∈": r"\in ",
    "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "θ": r"\theta ",
    "≈": r"\approx ", "，": ",", "\u00a0": " ", "\u202f": " ",
}  # fmt: skip
_FULL_WIDTH = {c: c - 0xFEE0 for c in range(0xFF01, 0xFF5F)}
# (pattern, replacement), applied in order.
_SPELLING = [
    (r"\\n\\n|[\n\t]", " "),
    (r"√\s*(\d+|[A-Za-z]|(?=\())", r"\\sqrt{\1}"),
    (r",\s*\\!\s*", ","),
    (r"\{,\}", ","),
    (r"\\(?:left|right|[bB]igg?[lr]?)\b(?=\s*(?:[\[\](){}|.]|\\[{}|]))\.?", ""),
    (r"(?<!\\)\\(?:[,;:! ]|q?quad\b|displaystyle\b|limits\b|hfill\b)|~", " "),
    (r"\\(?:dfrac|tfrac|cfrac)\b", r"\\frac"),
    (r"\\(?:text\w+|mbox|mathrm|mathbf|mathit|mathsf|operatorname|rm)\s*\{", r"\\text{"),
    (r"\\text\{\s*(?:,\s*)?(and|or)\s*\}", r" \1 "),
    (r"\\text\{\s*([eidi])\s*\}", r" \1 "),
    (r"\\(?:leq|leqslant|leqq)\b|<=", r"\\le "),
    (r"\\(?:geq|geqslant|geqq)\b|>=", r"\\ge "),
    (r"\\lt\b", "<"),
    (r"\\gt\b", ">"),
    (r"\\ne\b|!=|\\not\s*=", r"\\neq "),
    (r"\\times\b", r"\\cdot "),
    (r"\\lvert|\\rvert|\\vert|\\mid\b", "|"),
    (r"\{bmatrix\}|\{smallmatrix\}|\{matrix\}", "{pmatrix}"),
    (r"\\degree\b", r"^\\circ "),
    (r"\^\s*\{\s*\\circ\s*\}", r"^\\circ "),
    (r"\\?%|(?<![A-Za-z])(?:percent(?:age)?|pct)\b", "%"),
    (r"\*\*", "^"),
    (r"(?<!\\)\*", r"\\cdot "),
    (r"(?<![\\A-Za-z])(?:infinity|infty|inf|oo)\b", r"\\infty "),
    (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
    (r"(?<![\\A-Za-z])(arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln)(?=\W|$)", r"\\\1 "),
    (r"(?<![\\A-Za-z])sqrt\s*(?=\()", r"\\sqrt"),
    (r"(?<![\\A-Za-z])exp\s*(?=\()", "e^"),
    (r"\^\s*(-?\d+)", r"^{\1}"),
    (r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}"),
    (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
    (r"(\\frac\s*\{[^{}]*\})\s*(\w)", r"\1{\2}"),
    (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
    (r"\\sqrt\s+(\\\w+)", r"\\sqrt{\1}"),
]
# A LaTeX command ends where its letters end: `\\tfrac83` is one.
_SPELLING = [(re.compile(pattern.replace(r"\b", "(?![A-Za-z])")), new) for pattern, new in _SPELLING]
_MIXED = re.compile(r"(?<![\d.}^_])(\d+)\s*(?:\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|\s(\d+)/(\d+)(?!\d))")
_SLASH = re.compile(r"(?<![\w}).])(?:\(([^()]*)\)\s*/\s*\(([^()]*)\)|(\d+)\s*/\s*(\d+))(?!\s*[\d.^!/])")
_UNIT_TEXT = re.compile(r"(?<=[\d})%])\s*(?:\\text\s*\{([^{}]*)\})+\s*(?:\^\s*\{?\d\}?)?$")
_UNIT_WORDS = re.compile(r"^(-?[\d.,/ ]*\d|-?\\frac\{[^{}]*\}\{[^{}]*\})\s*((?:[A-Za-z]{2,}[. ]*)+)(?:\^\s*\{?\d\}?)?$")
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])")
_CURRENCY = re.compile(r"^(-?)\s*(?:\\\$|[$€£¥₹₽])\s*|\s*(?:\\\$|[$€£¥₹₽])$")
_MATH_NAMES = {"and", "or"}


def unfence(text: str) -> str:
    """The formula in `text` without fences and boxes; words around several fences stay (a list, a unit)."""
    text = text.strip()
    if found := boxes(text):
        return ", ".join(content for _, _, content in found)
    spans = fences(text)
    if len(spans) == 1 and not text[: spans[0][0]].strip(" .") and not text[spans[0][1] :].strip(" ."):
        return spans[0][2]
    parts, at = [], 0
    for start, end, content in spans:
        parts += [text[at:start], content]
        at = end
    return " ".join([*parts, text[at:]])


def normalise(text: str) -> tuple[str, str]:
    """One spelling of an answer: (formula in plain LaTeX, unit in lower case, '' if there is none).

    Thousands separators, currency signs, spacing commands and closing punctuation are dropped; a percent sign stays.
    Degrees are dropped as a unit, but converted to radians inside trigonometric functions.
    """
    text = unfence(text).translate(_FULL_WIDTH)
    for char, latex in _UNICODE.items():
        text = text.replace(char, latex)
    text = _CURRENCY.sub(r"\1", text.strip())
    for pattern, replacement in _SPELLING:
        text = pattern.sub(replacement, text)
    text = _parens_to_braces(text)
    text = re.sub(r"\s+", " ", text).strip().rstrip(".,;:").lstrip(":=").strip()
    while text.endswith("\\"):
        text = text[:-1].rstrip()
    text = _strip_parens(text)
    text, unit = _split_unit(text)
    text = _drop_thousands(text)
    text = _CURRENCY.sub(r"\1", text)
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        text = re.sub(r"([\d.]+)\s*\^\\circ", r"\\frac{\1\\pi}{180}", text)
    text = re.sub(r"\s*\^\\circ", "", text)
    text = _MIXED.sub(_mixed, text)
    # The LaTeX parser reads 5/2 x as 5/(2x).
    return _SLASH.sub(lambda m: rf"\frac{{{m[1] or m[3]}}}{{{m[2] or m[4]}}}", text).strip(), unit


def _mixed(m: re.Match) -> str:
    whole, a, b = m.group(1), m.group(2) or m.group(4), m.group(3) or m.group(5)
    if int(a) >= int(b):  # `4 10/3` is no mixed number: leave it as it stands
        return m.group()
    return rf"({whole}+\frac{{{a}}}{{{b}}})"


def _split_unit(text: str) -> tuple[str, str]:
    if m := _UNIT_TEXT.search(text):
        words = re.sub(r"\W+", " ", m.group(1)).strip().lower()
        return text[: m.start()].strip(), words.rstrip("s")
    if (m := _UNIT_WORDS.match(text)) and not set(m.group(2).split()) & _MATH_NAMES:
        return m.group(1).strip(), re.sub(r"\W+", " ", m.group(2)).strip().lower().rstrip("s")
    return text, ""


def _parens_to_braces(text: str) -> str:
    """`^(a+b)` to `^{(a+b)}` and `\\sqrt(a)` to `\\sqrt{a}`."""
    heads = {m.end() - 1: m for m in re.finditer(r"(\^|\\sqrt(?:\{\})?)\s*\(", text)}  # by the place of the "("
    opened, changes = [], []
    for m in re.finditer(r"[()]", text) if heads else ():
        if m.group() == "(":
            opened.append(m.start())
        elif opened and (head := heads.get(opened.pop())):
            changes += [(*head.span(), head.group(1).replace("{}", "") + "{"), (*m.span(), "}")]
    parts, at = [], 0
    for start, end, new in sorted(changes):
        parts += [text[at:start], new]
        at = end
    return "".join([*parts, text[at:]])


def _strip_parens(text: str) -> str:
    """`((x))` to `(x)`: of pairs that close one another at once, one is enough. Linear in the length."""
    n = min(len(text) - len(text.lstrip("(")), len(text) - len(text.rstrip(")")))
    if n > 1:
        inner, depth, low = text[n:-n], 0, 0
        for c in inner:
            depth += {"(": 1, ")": -1}.get(c, 0)
            low = min(low, depth)
        text = "(" * (1 - low) + inner + ")" * (1 - low)
    return text


def _depths(text: str) -> list[int]:
    """Bracket depth before each character; any opening bracket matches any closing one, as in `[0, 1)`."""
    depths, depth, i = [], 0, 0
    while i < len(text):
        step = 1
        change = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[i], 0)
        if text[i] == "\\":
            if text.startswith("\\begin", i):
                change = 1
            elif text.startswith("\\end", i):
                change = -1
            elif text[i + 1 : i + 2] in ("{", "}"):
                step, change = 2, 1 if text[i + 1] == "{" else -1
        depths += [depth] * step
        depth += change
        i += step
    return depths


def _drop_thousands(text: str) -> str:
    """Thousands commas dropped; inside brackets a comma separates members and stays."""
    depths = _depths(text)
    for m in reversed(list(_THOUSANDS.finditer(text))):
        if depths[m.start()] == 0:
            text = text[: m.start()] + m.group().replace(",", "") + text[m.end() :]
    return text


def split(text: str, pattern: str) -> list[str]:
    """`text` cut at matches of `pattern` outside all brackets; empty pieces are left out."""
    depths, parts, start = _depths(text), [], 0
    for m in re.finditer(pattern, text):
        if depths[m.start()] == 0:
            parts.append(text[start : m.start()])
            start = m.end()
    return [p.strip() for p in [*parts, text[start:]] if p.strip()]


def brackets(text: str) -> tuple[str, str, str] | None:
    """(opening, inner, closing) if one pair of brackets encloses all of `text`; `\\{` counts as `{`."""
    m = re.match(r"\\?[\[({]", text)
    end = re.search(r"\\?[\])}]$", text)
    if not m or not end or end.start() < m.end():
        return None
    if any(d == 0 for d in _depths(text)[m.end() : end.start()]):
        return None
    return m.group()[-1], text[m.end() : end.start()].strip(), end.group()[-1]


@dataclasses.dataclass(frozen=True)
class Numeral:
    """A written number.

    Attributes:
      value: exactly what is written; of a percentage the number before the sign.
      digits: digits after the decimal point, -1 where there is none.
      significant: significant digits of a decimal, 0 for others.
      percent: whether a percent sign follows.
    """

    value: Fraction
    digits: int = -1
    significant: int = 0
    percent: bool = False


_DECIMAL = re.compile(r"([+-]?)\s*(\d*)(?:\.(\d*))?")
_RATIO = re.compile(
    r"([+-]?)\s*(?:\((\d+)\+)?(?:\\frac\s*\{\s*([+-]?\s*\d+)\s*\}\s*\{\s*([+-]?\s*\d+)\s*\}"
    r"|(\d+)\s*/\s*(\d+|\(\s*-\s*\d+\s*\)))(\)?)"
)
_SCIENTIFIC = re.compile(r"([+-]?[\d.]+)\s*(?:\\cdot\s*10\^\{\s*([+-]?\d{1,4})\s*\}|[eE]([+-]?\d{1,3}))")


def numeral(text: str) -> Numeral | None:
    """The number that `text` (normalised) writes as an integer, decimal, fraction or mixed number, else None."""
    text = text.strip()
    if len(text) > 1000 or text.endswith("%%"):  # int() refuses numerals of more than 4300 digits
        return None
    if text.endswith("%"):
        inner = numeral(text[:-1])
        return dataclasses.replace(inner, percent=True) if inner and not inner.percent else None
    pair = brackets(text)
    if pair and pair[0] == "(" and pair[2] == ")" and (inner := numeral(pair[1])):
        return inner
    if (m := _DECIMAL.fullmatch(text)) and re.search(r"\d", text):
        sign, whole, part = m.group(1), m.group(2) or "0", m.group(3)
        value = Fraction(f"{whole}.{part or '0'}") * (-1 if sign == "-" else 1)
        if part is None:
            return Numeral(value)
        return Numeral(value, len(part), len((whole + part).lstrip("0")))
    if m := _RATIO.fullmatch(text):
        sign, whole, a, b, c, d, close = m.groups()
        top, bottom = (int(re.sub(r"[()\s]", "", t)) for t in (a or c, b or d))
        if bottom == 0 or bool(whole) != bool(close):
            return None
        return Numeral((Fraction(top, bottom) + int(whole or 0)) * (-1 if sign == "-" else 1))
    if (m := _SCIENTIFIC.fullmatch(text)) and (inner := numeral(m.group(1))):
        power = int(m.group(2) or m.group(3))
        return Numeral(inner.value * Fraction(10) ** power, max(inner.digits, 0) - power, max(inner.significant, 1))
    return None


def same_number(a: Numeral, b: Numeral) -> bool:
    """Whether two numerals name the same number.

    Exact values are compared, so 0.5 is 1/2 and 0.33 is not 1/3. A decimal of six or more significant digits also
    stands for a fraction that has no end in decimals, if it is its rounding or truncation: 0.333333 is 1/3, but
    16386.16 is not 16386.17. A percent sign is read as a unit or as a hundredth, whichever fits, where only one of the
    two has it: 50% is 50 and 0.5.
    """
    if a.percent != b.percent:
        scaled = [dataclasses.replace(n, value=n.value / 100 if n.percent else n.value, percent=False) for n in (a, b)]
        plain = [dataclasses.replace(n, percent=False) for n in (a, b)]
        return same_number(*plain) or same_number(*scaled)
    if a.value == b.value:
        return True
    for short, exact in ((a, b), (b, a)):
        if short.significant >= 6 and exact.digits < 0 and not _terminates(exact.value):
            return abs(short.value - exact.value) < Fraction(10) ** -short.digits
    return False


def _terminates(value: Fraction) -> bool:
    bottom = value.denominator
    for prime in (2, 5):
        while bottom % prime == 0:
            bottom //= prime
    return bottom == 1
