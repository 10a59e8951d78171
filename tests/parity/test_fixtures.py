"""Our decoder against what transformers computed for tiny models of every family, recorded; no PyTorch."""

from pathlib import Path

import numpy as np
import pytest

from mutualrl.models.config import ModelConfig
from mutualrl.models.families import FAMILIES
from mutualrl.models.weights import load_params

FIXTURES = Path(__file__).parent.parent / "fixtures/models"


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, make, forward, decode):
    """Logits of a left-padded batch, the same by cached decode, and greedy tokens."""
    config = ModelConfig.from_hf(FIXTURES / family)
    params = load_params(FIXTURES / family, config)
    expected = np.load(FIXTURES / family / "expected.npz")
    tokens, positions = make.prompts()

    full, _ = forward(config, params, tokens, positions)
    np.testing.assert_allclose(np.asarray(full)[positions >= 0], expected["logits"], rtol=0, atol=1e-4)
    stepped, new = decode(config, params, tokens, positions, make.NEW_TOKENS)
    np.testing.assert_allclose(stepped[positions >= 0], np.asarray(full)[positions >= 0], rtol=0, atol=1e-4)
    np.testing.assert_array_equal(new, expected["greedy"])
