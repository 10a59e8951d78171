"""Finds out by trying what a tokenizer alters in a text."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mutualrl.tokenizers.tokenizer import Tokenizer

# What is altered → texts that show it.
PROBES = {
    "case": ("Solve It", "ABC", "É"),
    "accents": ("café naïve", "Ångström ñ"),
    "white space": ("a  b", " a", "a ", "a b", "a\nb", "a\n\nb", "a\tb", "a\r\nb", "\n", "a   b .", "x , y !"),
    "compatibility characters (NFKC)": ("x²", "①", "ﬁne", "Ａ１", "…", "a\u00a0b"),
    "symbols and scripts": (
        "{x}^2 \\frac{1}{2} <= `#~|@",
        "你好世界",
        "привет",
        "नमस्ते",
        "🙂👩\u200d🚀",
        "\u200b",
        "l'été",
    ),
}
UNUSUAL = ("e\u0301", "a\u030a", "\u1100\u1161", "\u212b")


def losses_of(tokenizer: Tokenizer) -> tuple[bool, str]:
    """(lossless, reason) of a tokenizer; the rule is in the docstring of `Tokenizer`."""
    singles = {b for b in tokenizer.token_bytes if b}
    altered, closed = [], False
    for what, texts in PROBES.items():
        for text in texts:
            got = tokenizer.bytes_of(tokenizer.encode(text))
            if got == text.encode():
                continue
            if got == b"".join(_known(c, singles) for c in text):
                closed = True
            elif what not in altered:
                altered.append(what)
    if altered:
        return False, "alters " + ", ".join(altered)
    notes = ["exact for text over its own alphabet"] if closed else []
    texts = [(text, tokenizer.bytes_of(tokenizer.encode(text))) for text in UNUSUAL]
    if any(got == unicodedata.normalize("NFC", text).encode() != text.encode() for text, got in texts):
        notes.append("exact for NFC text")
    return True, "; ".join(notes)


def _known(char: str, singles: set[bytes]) -> bytes:
    """The bytes of a character that the vocabulary can spell, nothing for another one."""
    data = char.encode()
    return data if data in singles else b"".join(bytes([b]) for b in data if bytes([b]) in singles)
