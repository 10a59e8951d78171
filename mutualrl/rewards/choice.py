"""Multiple choice: the letter of an option, or the option's own text.

The answer is looked for in this order: the whole reply as the text of an option; the last `\\boxed{...}`; the last
"answer is ..." / "answer: ..." (in a few languages); a letter with which the reply begins; the last letter that stands
alone and is not denied ("not A"); the last line as the text of an option. A statement that names several letters
("A or B") is no answer. Letters go as far as there are options; without options from A to J.
"""

from __future__ import annotations

import math
import re

from mutualrl.rewards import reply as replies
from mutualrl.types import Problem

IN_WORKER = False
BY_ANSWER = True
VERSION = "1"

_ANCHOR = re.compile(
    r"####|\b(?:answer|choice|option)\b(?:[^.\n:]{0,40}?\bis\b|\s*:|\s*(?=\(?[A-J]\b))"
    r"|\b(?:réponse|respuesta|antwort|risposta)\b[^.\n:]{0,40}?(?::|\best\b|\bes\b|\bist\b|è)|(?:答案|ответ)\s*(?:是|为|[:：])?",
    re.IGNORECASE,
)
_WRAP = r"[\s*_(\[{$\"']*(?:\\(?:text\w*|mathrm|mathbf|mbox)\s*\{[\s*(\[]*)?"
_DENIED = re.compile(r"(?:\bnot|n't|\bnon?|\bnever|不是|不|neither|\bnor)\s*(?:the\s+)?[(*]*$", re.IGNORECASE)
_DENIAL = 40  # characters before a letter in which a denial is looked for
_WORD = re.compile(r"[AI] [a-z]")  # "A" and "I" before a word are words
_END = r"(?![A-Za-z0-9'’])"


def extract(reply: str, problem: Problem) -> str | None:
    """The letter chosen, in upper case, or None."""
    text = replies.final_part(reply, problem).strip()
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(problem.choices) or 10]
    if letter := _by_text(text, letters, problem):
        return letter
    if boxes := replies.boxes(text):
        return _said(boxes[-1][2], letters, problem)
    for _, tail in replies.after(_ANCHOR, text):
        tail = tail.lstrip(" \t:：*\n")
        if said := _said(tail, letters, problem):
            return said
        if re.match(rf"{_WRAP}[{letters}]{_END}", tail):
            return None  # it names several
    start = re.match(rf"{_WRAP}([{letters}])(?:[\s)*\]}}]*$|[).:,。，、：]|\n|(?=[^\x00-\u024f]))", text)
    if start:
        return start.group(1)
    for m in reversed(list(re.finditer(rf"(?<![A-Za-z0-9'’\\])[{letters}]{_END}", text))):
        at = m.start()
        if not _DENIED.search(text, max(0, at - _DENIAL), at) and not _WORD.match(text, at):
            return m.group()
    return _by_text(text.split("\n")[-1], letters, problem)


def grade(reply: str, problem: Problem) -> float:
    """1.0 if the letter chosen is the gold answer's, else 0.0; a gold text counts as the option that it is.

    NaN without a gold answer: nothing can be judged.
    """
    if problem.answer is None:
        return math.nan
    gold = problem.answer.strip()
    if not re.fullmatch(r"[A-Za-z]", gold):
        gold = extract(gold, problem) or ""
    return float(bool(gold) and extract(reply, problem) == gold.upper())


def _said(text: str, letters: str, problem: Problem) -> str | None:
    """The one letter, or the option's text, at the head of `text`."""
    line = re.split(r"[\n。]|\.\s", text, maxsplit=1)[0]
    if letter := _by_text(text.split("\n")[0], letters, problem) or _by_text(line, letters, problem):
        return letter
    m = re.match(rf"{_WRAP}(?:(?:option|choice)\s+)?\(?([{letters}{letters.lower()}]){_END}", line, re.IGNORECASE)
    letter = m.group(1) if m and not re.match(r"[AaIi] [a-z]", line[m.start(1) :]) else None
    if letter and re.match(rf"[)\]*\s,}}]*(?:or|and|,|/|&)\s*\(?[{letters}]{_END}", line[m.end(1) :]):
        return None
    return letter and letter.upper()


def _plain(text: str) -> str:
    text = re.sub(r"\\text\w*\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"[\s$\\{}*_\"'.]+", " ", text).strip().casefold()


def _by_text(text: str, letters: str, problem: Problem) -> str | None:
    """The letter of the one option whose text this is; a text of one letter is taken for a letter."""
    plain = _plain(text)
    if not plain or re.fullmatch(r"[a-z]", plain):
        return None
    found = [letter for letter, option in zip(letters, problem.choices) if _plain(option) == plain]
    return found[0] if len(found) == 1 else None
