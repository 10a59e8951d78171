"""Builds `tokenizers` tokenizers from raw vocabularies: SentencePiece pieces (a `.model` file, or llama-type GGUF)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors

from mutualrl.tokenizers.byte_table import SPACE_MARK

# SentencePiece's piece types, which GGUF took over.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A SentencePiece vocabulary.

    Attributes:
      tokens: the piece of every id.
      scores: its score; for BPE a higher score is merged first.
      types: its type (constants above).
      unigram: unigram instead of BPE.
      unk_id: id of the unknown piece, or None.
      dummy_prefix: a space is put before the text by default.
      squeeze_spaces: spaces at the ends and repeated spaces are removed.
      charsmap: the compiled normalisation rules, empty for identity.
    """

    tokens: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    unigram: bool = False
    unk_id: int | None = None
    dummy_prefix: bool = False
    squeeze_spaces: bool = False
    charsmap: bytes = b""


def from_pieces(p: Pieces) -> tokenizers.Tokenizer:
    """The tokenizer of a SentencePiece vocabulary; its default encoding has no BOS (see `add_bos`).

    The file stores no merges. Every split of a piece into two known pieces is one, ranked by the score of the
    whole piece, which is the order in which SentencePiece itself merges.
    """
    byte_fallback = BYTE in p.types
    unk = None if p.unk_id is None else p.tokens[p.unk_id]
    if p.unigram:
        pairs = list(zip(p.tokens, map(float, p.scores)))
        model = models.Unigram(pairs, unk_id=p.unk_id, byte_fallback=byte_fallback)
    else:
        vocab = {token: i for i, token in enumerate(p.tokens)}
        # SentencePiece takes user-defined pieces (runs of spaces, ...) out of the text before it merges anything.
        rank = {NORMAL: lambda i: -p.scores[i], USER_DEFINED: lambda i: -math.inf}
        normal = {token: (rank[k](i), i) for i, (token, k) in enumerate(zip(p.tokens, p.types)) if k in rank}
        ranked = [
            (*order, token[:cut], token[cut:])
            for token, order in normal.items()
            for cut in range(1, len(token))
            if token[:cut] in normal and token[cut:] in normal
        ]
        merges = [(left, right) for _, _, left, right in sorted(ranked)]
        model = models.BPE(vocab=vocab, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=byte_fallback)
    tokenizer = tokenizers.Tokenizer(model)
    rules = [normalizers.Precompiled(p.charsmap)] if p.charsmap else []
    if p.squeeze_spaces:
        rules += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if p.dummy_prefix:
        rules.append(normalizers.Prepend(SPACE_MARK))
    tokenizer.normalizer = normalizers.Sequence([*rules, normalizers.Replace(" ", SPACE_MARK)])
    strip = [decoders.Strip(" ", 1, 0)] if p.dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    add_tokens(tokenizer, p.tokens, p.types)
    return tokenizer


def add_tokens(tokenizer: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Registers control and unknown pieces as special, user-defined ones as plain added tokens (ids stay)."""
    special = [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types) if k in (CONTROL, UNKNOWN)]
    plain = [AddedToken(t, special=False, normalized=False) for t, k in zip(tokens, types) if k == USER_DEFINED]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def add_bos(tokenizer: tokenizers.Tokenizer, bos: str | None) -> None:
    """Makes the default encoding start with `bos`."""
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )


def read_sentencepiece(path: str | Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """A `.model` file → its tokenizer and its special tokens (`bos_token`, ...).

    SentencePiece adds a BOS only when told to, but every model trained with such a file was given one; so the default
    encoding here starts with it where the file has one.
    """
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(Path(path).read_bytes())
    trainer, normal = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type not in (trainer.UNIGRAM, trainer.BPE):
        raise ValueError(f"{path}: only unigram and BPE SentencePiece models are supported, not word or char models")
    tokens = [piece.piece for piece in proto.pieces]
    pieces = Pieces(
        tokens=tokens,
        scores=[piece.score for piece in proto.pieces],
        types=[piece.type for piece in proto.pieces],
        unigram=trainer.model_type == trainer.UNIGRAM,
        unk_id=trainer.unk_id,
        dummy_prefix=normal.add_dummy_prefix,
        squeeze_spaces=normal.remove_extra_whitespaces,
        charsmap=normal.precompiled_charsmap,
    )
    ids = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "pad_token": trainer.pad_id}
    special = {name: tokens[i] for name, i in ids.items() if 0 <= i < len(tokens)}
    tokenizer = from_pieces(pieces)
    add_bos(tokenizer, special.get("bos_token"))
    return tokenizer, special
