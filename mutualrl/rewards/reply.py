"""Where in a reply the answer stands. Plain text work, shared by the graders that read free-form replies.

Order of search, the first that yields something wins; of several candidates of one form the last counts:

  1. thoughts are dropped (up to the last `</think>`; an unfinished thought has no answer), then, where the problem
     has `extra['answer_tag']`, everything before the tag's last occurrence, then all but the last `<answer>` element;
  2. `\\boxed{...}`, unless a later "answer is ..." holds a formula or number; boxes joined by nothing but commas,
     "and", "or" form one list;
  3. `#### ...`, "answer: ...", "answer is ..." in a few languages, and the rest of that sentence;
  4. the whole reply, if all of it reads as one formula or it is a word or two;
  5. the last formula between math fences or the last number, whichever comes last.

A reply may be long nonsense, so every search here takes time linear in its length: nothing is searched for to the end
of the text from many places, and of the statements only the last `_STATEMENTS` are read, `_REACH` characters each.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator

from mutualrl.types import Problem

_STATEMENTS, _REACH = 100, 4000

_SPECIAL = re.compile(r"<\|[a-z_]+\|>")
_ANSWER_ELEMENT = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_FENCE = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<!\\)\$((?:\\\$|[^$\n])+?)(?<!\\)\$", re.DOTALL)
_ANCHOR = re.compile(
    r"####|\b(?:final\s+)?answer\b(?:[^.\n:$\\]{0,60}?\bis\b|\s*:|[^.\n:$\\]{0,60}:|(?=\s*[$\\]))"
    r"|\b(?:réponse|respuesta|antwort|risposta)\b\s*(?:(?:finale?|correcta?)\s*)?(?::|est\b|es\b|ist\b|è)"
    r"|(?:答案|答|ответ)\s*(?:是|为|[:：])",
    re.IGNORECASE,
)
_CURRENCY = "$€£¥₹₽"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_LATEX_ARGS = r"(?:\\(?:[dtc]?frac|sqrt)\s*(?:\[[^\[\]]*\])?(?:\{[^{}]*\}){1,2})"
_NUMBER = re.compile(
    rf"(?:(?<![\w.)}}])-\s?)?[{_CURRENCY}]?(?:{_DIGITS}(?:\s\d+/\d+|\s*{_LATEX_ARGS})?|{_LATEX_ARGS})"
    rf"(?:\s*/\s*(?:{_DIGITS}))?(?:\s*\\?%)?"
)
# What may stand between two boxes or fences that together make one list.
_JOINT = re.compile(
    r"(?:[\s,;$&~]|\\[,;:! ()\[\]]|\\q?quad\b|\\(?:text|mbox)\s*\{[^{}]*\b(?:and|or)\s*\}|\b(?:and|or)\b"
    r"|[A-Za-z](?:_\{?\w+\}?)?\s*=)*"
)
_SEPARATOR = re.compile(r"[,;]|\b(?:and|or)\b")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|[。！？]|\n|\\n")
_BOLD = re.compile(r"(?<![\w)*])\*\*(?=\S)([^*\n]+?)\*\*(?!\w)")
# Letters that are no words: functions and constants of code-style formulas, connectives of a list.
_MATH_WORDS = re.compile(
    r"\b(?:sqrt|exp|log|ln|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|pi|inf|infinity|oo|and|or|mod|percent|pct)\b"
)
_SHORT_WORDS = frozenset("is of to in we so it as at by be if an no on he do my us go up am me".split())


def final_part(reply: str, problem: Problem) -> str:
    """The reply without thoughts, without what comes before the answer tag, and without a following chat turn."""
    text = next((part for part in _SPECIAL.split(reply) if part.strip()), "")
    _, end, after = text.rpartition("</think>")
    if end:
        text = after
    elif "<think>" in text:
        return ""
    tag = problem.extra.get("answer_tag")
    if tag and tag in text:
        text = text.rpartition(tag)[2]
    elements = [m.group(1) for m in _ANSWER_ELEMENT.finditer(text)]
    return elements[-1] if elements else text


def boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of each outermost `\\boxed{...}`; braces inside are matched, unclosed boxes left out."""
    starts = {m.end() - 1: m.start() for m in _BOX.finditer(text)}  # by the place of the opening brace
    if not starts:
        return []
    found: list[tuple[int, int, tuple[int, int]]] = []
    opened: list[int] = []
    for m in _BRACE.finditer(text):
        if m.group() == "{":
            opened.append(m.start())
        elif m.group() == "}" and opened:
            brace = opened.pop()
            if brace in starts:
                while found and found[-1][0] > brace:  # within this one
                    found.pop()
                found.append((starts[brace], m.end(), (brace + 1, m.start())))
    return [(start, end, text[slice(*inner)]) for start, end, inner in found]


def last_list(text: str, spans: list[tuple[int, int, str]]) -> str:
    """The last span, together with those that commas, "and" or "or" join to it as a list."""
    contents = [spans[-1][2]]
    for (_, end, content), (start, _, _) in zip(spans[-2::-1], spans[:0:-1]):
        between = text[end:start]
        if not (_JOINT.fullmatch(between) and _SEPARATOR.search(between)):
            break
        contents.append(content)
    return ", ".join(reversed(contents))


def fences(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of each formula between `$`, `$$`, `\\(` or `\\[`."""
    closed = text
    for opening, closing in (("\\[", "\\]"), ("\\(", "\\)")):  # those that are never closed are not searched for
        last = text.rfind(closing) + 1
        closed = closed[:last] + closed[last:].replace(opening, "\0\0")
    return [(m.start(), m.end(), text[slice(*m.span(m.lastindex))]) for m in _FENCE.finditer(closed)]


def is_formula(text: str) -> bool:
    """Whether all of `text` reads as one formula, number or list: no prose words outside `\\text`."""
    if len(text) >= 2000:
        return False
    bare = re.sub(r"\\(?:text\w*|mbox|math\w+|operatorname)\s*\{[^{}]*\}", "1", text)
    bare = re.sub(r"\\(?:begin|end)\s*\{\w+\*?\}", " ", bare)
    bare = _MATH_WORDS.sub("", re.sub(r"\\[A-Za-z]+", " ", bare))
    if '"' in bare or "__" in bare or not re.search(r"[A-Za-z0-9∞π]", re.sub(r"\\[nt]\b", "", text)):
        return False
    for word in re.findall(r"[^\W\d_]{2,}", bare):
        if word.lower() in _SHORT_WORDS or not (
            word.isascii() and (len(word) == 2 or word.isupper() and len(word) < 5)
        ):
            return False
    return True


def candidate(text: str, index: int) -> str | None:
    """Of the formulas and numbers of a stretch of prose the first (index 0) or the last (-1); None without any."""
    # `$5 and has $7` is two prices, not a formula.
    spans = [s for s in fences(text) if is_formula(s[2])]
    masked = list(text)
    for start, end, _ in spans:
        masked[start:end] = "\0" * (end - start)
    numbers = [(m.start(), m.end(), m.group()) for m in _NUMBER.finditer("".join(masked))]
    # A bare name such as `$n$` is what the prose speaks of, not what it says.
    kept = [s for s in spans if not numbers or not re.fullmatch(r"\s*\\?[A-Za-z](?:_\{?\w+\}?)?\s*", s[2])]
    found = sorted(kept + numbers)
    if not found:
        return None
    start, _, content = found[index]
    upto = [s for s in spans if s[0] <= start]
    return last_list(text, upto) if upto and upto[-1][0] == start else content


def _statement(tail: str) -> str | None:
    """The answer in what follows an anchor: a formula, number or a word or two."""
    tail = _BOLD.sub(r"\1", tail.lstrip(" \t:*\n"))
    spans = fences(tail)
    if spans and spans[0][0] == 0:
        first = [spans[0]]
        for s in spans[1:]:
            between = tail[first[-1][1] : s[0]]
            if not (_JOINT.fullmatch(between) and _SEPARATOR.search(between)):
                break
            first.append(s)
        rest = re.match(r"\s*(?:\\?%|percent\b)", tail[first[-1][1] :])
        return last_list(tail, first) + (rest.group() if rest else "")
    sentence = _SENTENCE_END.split(tail, maxsplit=1)[0].strip().rstrip(",:;*")
    if not sentence:
        return None
    if is_formula(sentence):
        return sentence
    # After an anchor the answer comes first ("answer: 220 $ in 12 months"), but for "... is" and "... =".
    said = re.split(r"\b(?:is|are|equals)\b|=", sentence)[-1]
    found = candidate(said, 0) or candidate(sentence, 0)
    if found is None and len(sentence.split()) <= 3:
        return sentence.strip(" !\"'")
    return found


def after(anchor: re.Pattern, text: str) -> Iterator[tuple[int, str]]:
    """(position, what follows) of the matches of `anchor`, the last first; the number and the length are bounded."""
    last = collections.deque(anchor.finditer(text), maxlen=_STATEMENTS)
    return ((m.start(), text[m.end() : m.end() + _REACH]) for m in reversed(last))


def stated(text: str) -> Iterator[tuple[int, str]]:
    """(position, answer) of each "answer is ..." that names one, the last first."""
    for at, tail in after(_ANCHOR, text):
        if answer := _statement(tail):
            yield at, answer


def find(text: str, last: bool = True) -> str | None:
    """The text of the answer in a reply whose thoughts are gone (see the head of this file), or None.

    Args:
      last: whether the last formula or number counts where nothing is said to be the answer.
    """
    box = boxes(text)
    for at, answer in stated(text):
        if box and (at < box[-1][1] or not re.search(r"\d|\\", answer)):
            break
        return answer
    if box:
        return last_list(text, box)
    text = text.strip()
    if not text:
        return None
    text = _BOLD.sub(r"\1", text)
    spans = fences(text)
    if len(spans) == 1 and spans[0][:2] == (0, len(text)) or len(spans) < 2 and is_formula(text):
        return text
    if len(text.split()) <= 3 and not re.search(r"\d|\\|\$|[^\x00-\u024f]", text):
        return text.strip(" .!\"'*")
    return candidate(text, -1) if last else None
