"""Small tokenizers made on the spot, as HF folders: raw bytes, or byte-level BPE."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

KINDS = ("bytes", "bpe")
# Digits stand in pairs from the left, other text in runs that end before the next digit.
_PIECES = Regex(r"\p{N}{1,2}|[^\p{N}]+")


def train(folder: str | Path, kind: str, texts: Iterable[str], *, size: int = 0, bos: bool = False) -> None:
    """Makes a lossless tokenizer and saves it as an HF folder.

    Args:
      folder: must exist.
      kind: `bytes` (one token a byte) or `bpe` (byte-level BPE; digits at most in pairs).
      texts: what BPE merges are learnt from.
      size: ids of a BPE, special ones included; at least 259.
      bos: put a BOS before every prompt.

    Raises:
      ValueError: unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"tokenizer={kind!r}: allowed are {', '.join(KINDS)}")
    special = ["<pad>", "<eos>", *(["<bos>"] if bos else [])]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(special + alphabet)}, []))
        tokenizer.add_special_tokens([AddedToken(t, special=True) for t in special])
    else:
        tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(_PIECES, "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if kind == "bpe":
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
        )
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
        **({"bos_token": "<bos>"} if bos else {}),
    }
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
