"""From a tokenizer's description to the exact bytes of every id, and to a copy of it that encodes plain text.

A *spec* is the parsed `tokenizer.json` of the `tokenizers` library. Four ways of writing bytes as token strings exist:

    byte-level      every byte is one printable character (GPT-2's map)
    sentencepiece   U+2581 is a space, `<0xNN>` is a byte
    wordpiece       `##` continues a word; the spaces themselves are lost
    literal         the string itself (character or word vocabularies)
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator
from typing import Any

Spec = dict[str, Any]

BYTE_LEVEL, SENTENCEPIECE, WORDPIECE, LITERAL = "byte-level", "sentencepiece", "wordpiece", "literal"
SPACE_MARK = "\u2581"
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# What marks turns and documents in the published families. Needed for tokenizers that come without a chat template;
# `<think>`-like tags must not match.
MARKER = re.compile(
    r"im_(start|end|sep)|header_id|\beot\b|eot_id|eom_id|(start|end)_of_(turn|role|text|image|audio)|begin_of_text"
    r"|end_?of_?(text|prompt|utterance|turn|message)|(begin|end)▁of▁sentence|of_turn_token"
    r"|^</?s>$|^<\|?(pad(ding)?|bos|eos|unk|mask|sep|cls)\|?>$|^\[(PAD|UNK|CLS|SEP|MASK|BOS|EOS)\]$"
    r"|^\[/?(INST|SYSTEM_PROMPT)\]$|^<[|｜](user|assistant|system|end|turn)[|｜]>$|▁pad▁",
    re.IGNORECASE,
)
# Special tokens of this shape stand for text that a model writes (`<think>`, `</answer>`).
TAG = re.compile(r"</?[A-Za-z][A-Za-z_]*>")


def byte_level_alphabet() -> dict[str, int]:
    """Printable character → byte, the 256 entries of GPT-2's map."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + k): b for k, b in enumerate(shifted)}


def components(part: Any) -> Iterator[Spec]:
    """All normalisers, pre-tokenisers or decoders below `part`, sequences opened."""
    if part is None:
        return
    children = part.get("normalizers") or part.get("pretokenizers") or part.get("decoders")
    if children is None:
        yield part
    for child in children or ():
        yield from components(child)


def writing(spec: Spec) -> str:
    """Which of the four ways of writing bytes the spec uses."""
    parts = [c for key in ("normalizer", "pre_tokenizer", "decoder") for c in components(spec.get(key))]
    types = {c["type"] for c in parts}
    if "ByteLevel" in types:
        return BYTE_LEVEL
    if "Metaspace" in types or any(c["type"] == "Replace" and SPACE_MARK in str(c) for c in parts):
        return SENTENCEPIECE
    if spec["model"].get("type") == "WordPiece" or "WordPiece" in types:
        return WORDPIECE
    return LITERAL


def vocabulary(spec: Spec) -> dict[int, str]:
    """id → token string of the model's own vocabulary (added tokens not included)."""
    vocab = spec["model"]["vocab"]
    if isinstance(vocab, dict):
        return {i: token for token, i in vocab.items()}
    return {i: entry[0] for i, entry in enumerate(vocab)}


def added(spec: Spec) -> dict[int, Spec]:
    """id → entry of the added tokens."""
    return {entry["id"]: entry for entry in spec.get("added_tokens") or ()}


def bytes_table(spec: Spec, control: Collection[int]) -> list[bytes]:
    """The bytes of every id, list of length (highest id + 1).

    Control ids and ids that name no token have no bytes; other added tokens have the bytes of their literal text.
    """
    kind, alphabet = writing(spec), byte_level_alphabet()
    prefix = spec["model"].get("continuing_subword_prefix") or ""
    suffix = spec["model"].get("end_of_word_suffix") or ""

    def convert(token: str) -> bytes:
        if kind == BYTE_LEVEL:
            # A few vocabularies hold whole special strings besides the mapped ones; those are literal text.
            return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token.encode()
        if kind == SENTENCEPIECE:
            piece = BYTE_PIECE.fullmatch(token)
            return bytes([int(piece[1], 16)]) if piece else token.replace(SPACE_MARK, " ").encode()
        if kind == WORDPIECE:
            return token[len(prefix) :].encode() if prefix and token.startswith(prefix) else b" " + token.encode()
        if suffix and token.endswith(suffix):
            token = token[: -len(suffix)] + " "
        return token.removeprefix(prefix).encode()

    tokens, extra = vocabulary(spec), added(spec)
    table = [b""] * (max([*tokens, *extra], default=-1) + 1)
    for i, token in tokens.items():
        table[i] = convert(token)
    for i, entry in extra.items():
        # SentencePiece's user-defined pieces (runs of spaces) are in both lists, and are written as pieces.
        if entry["special"] or tokens.get(i) != entry["content"] or kind != SENTENCEPIECE:
            table[i] = entry["content"].encode()
    for i in control:
        table[i] = b""
    return table


def plain_text_spec(spec: Spec, control: Collection[int]) -> Spec:
    """A copy of the spec that encodes a text as it stands.

    No BOS, no padding or cutting, no dummy prefix space, no white space eaten around added tokens, and neither control
    tokens nor other special tokens recognised in the text. Tag-shaped specials (`<think>`) are recognised: they are how
    the model writes that text. To be used with `encode_special_tokens` on, which spells out whatever is special here.
    """
    spec = copy.deepcopy({**spec, "truncation": None, "padding": None, "post_processor": None})
    for entry in spec.get("added_tokens") or ():
        hidden = entry["special"] and not TAG.fullmatch(entry["content"])
        entry.update(lstrip=False, rstrip=False, special=entry["id"] in control or bool(hidden))
    spec["normalizer"] = _without_prepend(spec.get("normalizer"))
    parts = list(components(spec.get("pre_tokenizer")))
    if not any(c["type"] in ("WhitespaceSplit", "Whitespace", "BertPreTokenizer") for c in parts):
        # Behind a split on white space the mark is not a dummy prefix: it is the only trace of the space.
        for c in parts:
            if c["type"] == "Metaspace":
                c["prepend_scheme"] = "never"
                c.pop("add_prefix_space", None)
            elif c["type"] == "ByteLevel":
                c["add_prefix_space"] = False
    return spec


def _without_prepend(normalizer: Any) -> Any:
    if normalizer is None or normalizer["type"] == "Prepend":
        return None
    if normalizer["type"] == "Sequence":
        kept = [_without_prepend(child) for child in normalizer["normalizers"]]
        return {"type": "Sequence", "normalizers": [child for child in kept if child is not None]}
    return normalizer
