"""Tokenizers rebuilt from a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from mutualrl.models.gguf import read_header
from mutualrl.tokenizers.pieces import UNUSED, Pieces, add_bos, add_tokens, from_pieces
from mutualrl.tokenizers.sources import Source, readable

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_TAIL}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_TAIL}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _threes() -> pre_tokenizers.PreTokenizer:
    return _split(_CL100K.format(digits="{1,3}"))


def _ones() -> pre_tokenizers.PreTokenizer:
    return _split(_CL100K.format(digits=""))


# `tokenizer.ggml.pre` → pre-tokeniser. The name is all that the file says about it.
PRE_TOKENIZERS = {
    "gpt-2": _gpt2,
    "default": _gpt2,
    "olmo": _gpt2,
    "phi-2": _gpt2,
    "smollm": _digits,
    "starcoder": _digits,
    "refact": _digits,
    "command-r": _digits,
    "llama-bpe": _threes,
    "llama3": _threes,
    "llama-v3": _threes,
    "dbrx": _threes,
    "smaug-bpe": _threes,
    "qwen2": _ones,
    "deepseek-r1-qwen": _ones,
    "gpt-4o": lambda: _split(_O200K),
}
# Llama-3 looks a whole word up before it merges, and starts every text with a BOS.
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
# Tokens that end a turn although only the instruction-tuned model's configuration would say so.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>")
_NAMES = {
    "bos_token_id": "bos_token",
    "eos_token_id": "eos_token",
    "unknown_token_id": "unk_token",
    "padding_token_id": "pad_token",
    "seperator_token_id": "sep_token",  # the format's own spelling
}


def read_gguf(path: str | Path) -> Source:
    """The tokenizer of a GGUF file.

    Stop ids are those the file names and its end-of-turn tokens. The file stores no normaliser, and none is applied.

    Raises:
      ValueError: not a GGUF file, no tokenizer in it, or a tokenizer type or pre-tokeniser that is not supported.
    """
    metadata, _ = read_header(path)
    prefix = "tokenizer.ggml."
    meta = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if "tokens" not in meta:
        raise ValueError(f"{path} holds no tokenizer")
    tokens = meta["tokens"]
    types = [int(t) for t in meta.get("token_type", [1] * len(tokens))]
    # Rows that only pad the embedding are listed as unused tokens; they are no ids.
    size = max((i + 1 for i, kind in enumerate(types) if kind != UNUSED), default=0)
    tokens, types = tokens[:size], types[:size]
    special = {name: tokens[int(meta[key])] for key, name in _NAMES.items() if 0 <= int(meta.get(key, -1)) < size}
    pre = meta.get("pre", "default")
    bos = special.get("bos_token") if meta.get("add_bos_token", _bos_by_default(meta, pre)) else None
    build = {"gpt2": _byte_level, "llama": _sentencepiece}.get(meta.get("model"))
    if build is _byte_level and pre not in PRE_TOKENIZERS:
        raise ValueError(f"{path}: tokenizer.ggml.pre {pre!r} is not supported; allowed: {', '.join(PRE_TOKENIZERS)}")
    if build is None:
        raise ValueError(f"{path}: tokenizer.ggml.model {meta.get('model')!r} is not supported; allowed: gpt2, llama")
    with readable(path):  # of lists that do not go together
        backend = build(meta, tokens, types)
    add_bos(backend, bos)
    stops = [int(meta[key]) for key in ("eos_token_id", "eot_token_id", "eom_token_id") if key in meta]
    ids = {token: i for i, token in enumerate(tokens)}
    # SmolLM2 uses <|endoftext|> as its unknown token.
    stops += [ids[token] for token in _TURN_ENDS if token in ids and token != special.get("unk_token")]
    return Source(
        name=Path(path).stem,
        backend=backend,
        special=special,
        adds_bos=bos is not None,
        stop_ids=tuple(stops),
        pad_id=None,
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _bos_by_default(meta: Mapping[str, Any], pre: str) -> bool:
    return meta.get("model") == "llama" or pre in _LLAMA3


def _byte_level(meta: Mapping[str, Any], tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    pre = meta.get("pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in meta["merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3))
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    add_tokens(backend, tokens, types)
    return backend


def _sentencepiece(meta: Mapping[str, Any], tokens: list[str], types: list[int]) -> tokenizers.Tokenizer:
    unk = meta.get("unknown_token_id")
    return from_pieces(
        Pieces(
            tokens=tokens,
            scores=[float(score) for score in meta["scores"]][: len(tokens)],
            types=types,
            unk_id=None if unk is None else int(unk),
            dummy_prefix=bool(meta.get("add_space_prefix", True)),
            squeeze_spaces=bool(meta.get("remove_extra_whitespaces", False)),
        )
    )
