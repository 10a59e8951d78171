"""Loading is strict, reads slices, and export is its reverse."""

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mutualrl.models.config import ModelConfig
from mutualrl.models.decoder import init_params
from mutualrl.models.families import FAMILIES
from mutualrl.models.weights import export_hf, load_params, resolve

FIXTURES = Path(__file__).parent.parent / "fixtures/models"
Q0 = "model.layers.0.self_attn.q_proj.weight"


class Tensors(dict):
    """HF tensors by name, as a source; counts what is read."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.read = []

    def names(self):
        return list(self)

    def get(self, name):
        self.read.append(name)
        return self[name]


def tensors(family="llama"):
    return Tensors(load_file(FIXTURES / family / "model.safetensors"))


def config(family="llama", **fields):
    return ModelConfig.from_hf({**json.loads((FIXTURES / family / "config.json").read_text()), **fields})


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_and_source_give_the_same_float32(family):
    params = load_params(FIXTURES / family, config(family))
    same(params, load_params(tensors(family), config(family)))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}


@pytest.mark.parametrize("family", FAMILIES)
def test_export_is_the_reverse(family, tmp_path):
    params = load_params(FIXTURES / family, config(family))
    export_hf(params, config(family), tmp_path)
    written, original = load_file(tmp_path / "model.safetensors"), tensors(family)
    assert written.keys() == original.keys()
    for name, tensor in original.items():
        np.testing.assert_array_equal(written[name], tensor.astype(np.float32))
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["architectures"] == [FAMILIES[family].architecture]
    assert saved["torch_dtype"] == "float32"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_stored_dtypes(dtype, tmp_path):
    stored = {name: tensor.astype(dtype) for name, tensor in tensors().items()}
    save_file(stored, tmp_path / "model.safetensors")
    same(load_params(tmp_path, config()), load_params(Tensors(stored), config()))


def refused(source, config, *named):
    with pytest.raises(ValueError) as error:
        load_params(source, config)
    for part in named:
        assert part in str(error.value)


def test_unknown_missing_misshapen(tmp_path):
    extra = tensors()
    extra["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    refused(extra, config(), "q_proj.bias")
    refused(tensors(), config(num_hidden_layers=2), "model.layers.2.")
    fewer = tensors()
    del fewer[Q0]
    refused(fewer, config(), Q0, "(32, 32)")
    refused(tensors(), config(num_hidden_layers=4), "model.layers.3.", "missing")
    wrong = tensors()
    wrong[Q0] = np.zeros((32, 31), np.float32)
    refused(wrong, config(), Q0, "(32, 31)", "(32, 32)")
    save_file(dict(wrong), tmp_path / "model.safetensors")
    refused(tmp_path, config(), Q0, "(32, 31)", "(32, 32)")
    refused(tensors(), config(vocab_size=65), "embed_tokens", "(64, 32)", "(65, 32)")


def test_double():
    twice = tensors()
    twice["language_model." + Q0] = twice[Q0]
    refused(twice, config(), Q0, "twice")


def test_quantised_dtype_is_refused(tmp_path):
    stored = dict(tensors())
    stored[Q0] = np.zeros((32, 32), np.int8)
    save_file(stored, tmp_path / "model.safetensors")
    refused(tmp_path, config(), Q0, "I8")


def test_buffers_and_other_prefixes_are_accepted():
    expected = load_params(tensors(), config())
    old = tensors()
    old["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    same(load_params(old, config()), expected)
    base = Tensors({name.removeprefix("model."): tensor for name, tensor in tensors().items()})
    same(load_params(base, config()), expected)
    nested = Tensors({f"language_model.{name}": tensor for name, tensor in tensors().items()})
    same(load_params(nested, config()), expected)


def test_tied_head():
    tied = config(tie_word_embeddings=True)
    stored = tensors()
    del stored["lm_head.weight"]
    expected = load_params(stored, tied)
    assert "head" not in expected

    redundant = Tensors({**stored, "lm_head.weight": stored["model.embed_tokens.weight"]})
    same(load_params(redundant, tied), expected)
    refused(tensors(), tied, "lm_head.weight", "tie_word_embeddings")
    refused(stored, config(tie_word_embeddings=False), "lm_head.weight", "tie_word_embeddings")


def test_tied_head_is_written_once(tmp_path):
    tied = config(tie_word_embeddings=True)
    export_hf(init_params(tied, jax.random.key(0)), tied, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True


def test_shards(tmp_path):
    params = load_params(FIXTURES / "phi3", config("phi3"))
    export_hf(params, config("phi3"), tmp_path, shard_bytes=30_000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    assert all(shard.stat().st_size < 35_000 for shard in shards)
    same(load_params(tmp_path, config("phi3")), params)

    shutil.copy(shards[0], tmp_path / "copy.safetensors")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    doubled = {**index, "weight_map": {**index["weight_map"], "model.norm.weight": "copy.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(doubled))
    refused(tmp_path, config("phi3"), "two weight files")

    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shards[1].unlink()
    refused(tmp_path, config("phi3"), shards[1].name)

    export_hf(params, config("phi3"), tmp_path)  # no shard of the earlier export survives
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize("family", ["llama", "phi3", "olmo2"])
def test_slices(family):
    """Any slice equals that slice of the whole, and only the layers asked for are read."""
    whole = load_params(FIXTURES / family, config(family))
    source = tensors(family)

    def put(path, shape, read):
        leaf = whole
        for key in path:
            leaf = leaf[key]
        index = tuple(slice(size // 3, size // 3 + max(1, size // 2)) for size in shape)
        np.testing.assert_array_equal(read(index), leaf[index])
        np.testing.assert_array_equal(read(index[:1]), leaf[index[:1]])
        np.testing.assert_array_equal(read((slice(None),) * len(shape)), leaf)
        if path[0] == "layers":
            source.read.clear()
            read((slice(1, 2),))
            assert len(source.read) == 1
            assert "layers.1." in source.read[0]
        return read(())

    same(load_params(source, config(family), put), whole)
    same(load_params(FIXTURES / family, config(family), put_sharded), whole)


def put_sharded(path, shape, read):
    """As the mesh code does it."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.make_array_from_callback(shape, sharding, read)


def test_wrong_parameters_are_not_exported(tmp_path):
    params = load_params(FIXTURES / "llama", config())
    with pytest.raises(ValueError, match="head"):
        export_hf(params, config(tie_word_embeddings=True), tmp_path)
    with pytest.raises(ValueError, match="norm"):
        export_hf({**params, "norm": params["norm"][:4]}, config(), tmp_path)


def test_tokenizer_files_go_along(tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "from/tokenizer.json").write_text("{}")
    (tmp_path / "from/README.md").write_text("")
    export_hf(load_params(FIXTURES / "llama", config()), config(), tmp_path / "to", tmp_path / "from")
    assert (tmp_path / "to/tokenizer.json").is_file()
    assert not (tmp_path / "to/README.md").exists()


def test_resolve(tmp_path, monkeypatch):
    assert resolve(tmp_path) == tmp_path
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="no local folder") as error:
        resolve("nobody/no-such-model")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="no local folder"):
        resolve(tmp_path / "missing" / "deeper")
