"""Fakes that ship with the package: tiny models of any family with real tokenizers, for tests and first tries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np

from mutualrl.assembly import Material, no_peers, shaped_reward
from mutualrl.models.config import ModelConfig
from mutualrl.models.decoder import init_params
from mutualrl.models.weights import export_hf
from mutualrl.settings import PolicyConfig
from mutualrl.tokenizers import train as train_tokenizer
from mutualrl.tokenizers.tokenizer import Tokenizer
from mutualrl.transfer import none
from mutualrl.types import Rollouts, Verdicts

TINY = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    initializer_range=0.3,  # large, so that different weights give clearly different outputs
    tie_word_embeddings=True,
)


def tiny_model(
    folder: str | Path,
    model_type: str = "llama",
    *,
    tokenizer: str = "bytes",
    bos: bool = False,
    padded_vocab: int = 0,
    seed: int = 0,
    **hf: Any,
) -> Path:
    """Writes an HF folder with a tiny random model and a tokenizer made on the spot.

    Args:
      folder: made if it does not exist.
      model_type: HF model type.
      tokenizer: `bytes` or `bpe`. bos: put a BOS before prompts.
      padded_vocab: ids the model has beyond the tokenizer's.
      seed: of the weights.
      hf: fields of the HF config that differ from `TINY`.

    Returns:
      the folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    texts = [f"{kind}:{n:04d}=" for kind in ("rev", "sort", "max") for n in range(0, 9999, 7)]
    train_tokenizer.train(folder, tokenizer, texts, size=320, bos=bos)
    made = Tokenizer.load(folder)
    config = ModelConfig.from_hf(
        {
            "model_type": model_type,
            **TINY,
            **hf,
            "vocab_size": made.size + padded_vocab,
            "eos_token_id": made.stop_ids[0],
            "pad_token_id": made.pad_id,
            "bos_token_id": made.bos_id,
        }
    )
    export_hf(init_params(config, jax.random.key(seed)), config, folder, tokenizer_folder=folder)
    return folder


def alone(
    own: Rollouts,
    verdicts: Verdicts,
    config: PolicyConfig,
    index: int = 0,
    old_logp: np.ndarray | None = None,
    ref_logp: np.ndarray | None = None,
) -> Material:
    """What a policy without peers has to learn from in a step.

    Args:
      old_logp, ref_logp: f32[P·G, T]; needed with `kl_in_reward` only.
    """
    return Material(
        own=own,
        verdicts=verdicts,
        reward=shaped_reward(own, verdicts, config, old_logp, ref_logp),
        config=config,
        index=index,
        tokenizer=None,
        options=none.Options(),
        step=own.step,
        seed=0,
        received=no_peers(len(own.problems), own.tokens.shape[-1]),
    )
