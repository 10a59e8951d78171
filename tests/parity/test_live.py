"""Our decoder against transformers, live: logits, cached decode, greedy generation, export. Needs PyTorch."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from mutualrl.models.config import ModelConfig
from mutualrl.models.weights import export_hf, load_params

pytest.importorskip("torch", reason="live parity compares with transformers models, which need PyTorch")

CASES = list(json.loads((Path(__file__).parent.parent / "fixtures/models/cases.json").read_text()))


@dataclasses.dataclass
class Pair:
    """The same model in transformers and here."""

    reference: object
    config: ModelConfig
    params: dict
    tokens: np.ndarray
    positions: np.ndarray
    real: np.ndarray
    length: int


@pytest.fixture(scope="module", params=CASES)
def pair(request, make, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parity") / request.param
    reference = make.make_model(request.param, folder)
    tokens, positions = make.prompts()
    length = tokens.shape[1] + make.NEW_TOKENS
    config = ModelConfig.from_hf(folder).for_length(length)
    return Pair(reference, config, load_params(folder, config), tokens, positions, positions >= 0, length)


def test_logits(pair, make, forward):
    ours, _ = forward(pair.config, pair.params, pair.tokens, pair.positions)
    theirs = make.logits(pair.reference, pair.tokens, pair.positions)
    assert np.isfinite(ours).all()
    difference = np.abs(np.asarray(ours) - theirs)[pair.real].max()
    print(f"max abs logit difference {difference:.2e}, logits up to {np.abs(theirs[pair.real]).max():.1f}")
    assert difference < 1e-4


def test_decode_and_greedy(pair, make, forward, decode):
    full, _ = forward(pair.config, pair.params, pair.tokens, pair.positions)
    stepped, new = decode(pair.config, pair.params, pair.tokens, pair.positions, make.NEW_TOKENS)
    difference = np.abs(np.asarray(full) - stepped)[pair.real].max()
    print(f"max abs difference of cached decode {difference:.2e}")
    assert difference < 1e-4
    np.testing.assert_array_equal(new, make.greedy(pair.reference, pair.tokens, pair.positions))


def test_export(pair, make, tmp_path):
    export_hf(pair.params, pair.config, tmp_path, shard_bytes=20_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    before = make.logits(pair.reference, pair.tokens, pair.positions)
    after = make.logits(make.load_model(tmp_path), pair.tokens, pair.positions)
    np.testing.assert_array_equal(after[pair.real], before[pair.real])


@pytest.mark.parametrize("writer", ["transformers", "export"])
def test_written_config_reads_as_the_same_model(pair, writer, tmp_path):
    """The layout transformers writes today, and our own export, say the same as the config on the hub."""
    if writer == "transformers":
        pair.reference.config.save_pretrained(tmp_path)
    else:
        export_hf(pair.params, pair.config, tmp_path)
    again = ModelConfig.from_hf(tmp_path).for_length(pair.length)
    assert dataclasses.replace(again, hf=pair.config.hf) == pair.config
