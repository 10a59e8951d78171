"""Reading HF configs: every layout, and nothing ignored in silence."""

import json

import pytest

from mutualrl.models.config import ModelConfig
from mutualrl.models.families import FAMILIES

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


def hf(model_type="llama", **fields):
    return {"model_type": model_type, **SIZES, **fields}


@pytest.mark.parametrize("family", FAMILIES)
def test_hashable_and_equal(family):
    assert hash(ModelConfig.from_hf(hf(family))) == hash(ModelConfig.from_hf(hf(family)))


def test_from_folder_file_and_dict(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf()))
    assert ModelConfig.from_hf(tmp_path) == ModelConfig.from_hf(tmp_path / "config.json") == ModelConfig.from_hf(hf())


def test_id_fields_may_be_lists():
    config = ModelConfig.from_hf(hf(pad_token_id=[128004], eos_token_id=[128001, 128008, 128009]))
    assert config.pad_id == 128004
    assert config.eos_ids == (128001, 128008, 128009)
    assert ModelConfig.from_hf(hf(eos_token_id=2)).eos_ids == (2,)
    assert ModelConfig.from_hf(hf()).pad_id is None


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "gpt2"}, ["model_type", "'gpt2'", "llama"]),
        ({"hidden_act": "relu"}, ["hidden_act", "'relu'", "silu"]),
        ({"attention_bias": True}, ["attention_bias", "True", "False"]),
        ({"mlp_bias": True}, ["mlp_bias", "True", "False"]),
        ({"sliding_window": 4096}, ["sliding_window", "4096"]),
        ({"layer_types": ["sliding_attention"] * 12}, ["layer_types", "sliding_attention"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config", "bits"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
        ({"vocab_size": None}, ["vocab_size", "missing"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_type", "'dynamic'", "yarn"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["factor", "linear"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, ["beta_fast", "3", "linear"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters", "llama"]),
        ({"model_type": "qwen3", "head_dim": None}, ["head_dim", "missing"]),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"model_type": "gemma2", "layer_types": ["chunked_attention"] * 12}, ["layer_types", "chunked_attention"]),
        ({"model_type": "gemma2", "layer_types": ["full_attention"] * 3}, ["layer_types", "3", "12"]),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 12}, ["use_sliding_window"]),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, ["no_rope_layers", "2", "12"]),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0] * 4}},
            ["short_factor", "4"],
        ),
    ],
)
def test_refused_in_one_line(fields, named):
    with pytest.raises(ValueError) as error:
        ModelConfig.from_hf({**hf(), **fields})
    message = str(error.value)
    assert "\n" not in message
    for part in named:
        assert part in message


def test_rope_layouts_agree():
    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = ModelConfig.from_hf(hf(rope_theta=5e5, rope_scaling={"type": "llama3", **scaling}))
    new = ModelConfig.from_hf(hf(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling}))
    newest = ModelConfig.from_hf(hf(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}))
    assert old.ropes == new.ropes == newest.ropes
    assert old.ropes[0].type == "llama3"
    assert old.ropes[0].theta == 5e5


def test_gemma3_rope_layouts_agree():
    old = ModelConfig.from_hf(
        hf("gemma3_text", rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling={"type": "linear", "factor": 8.0})
    )
    new = ModelConfig.from_hf(
        hf(
            "gemma3_text",
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        )
    )
    assert old.ropes == new.ropes
    assert [rope.theta for rope in old.ropes] == [1e6, 1e4]
    assert [rope.type for rope in old.ropes] == ["linear", "default"]
    assert old.layer_ropes == new.layer_ropes == (1, 1, 1, 1, 1, 0) * 2


def test_windows_of_each_family():
    def windows(*args, **fields):
        return ModelConfig.from_hf(hf(*args, **fields)).windows

    assert windows("gemma3_text", sliding_window=4) == (4, 4, 4, 4, 4, 0) * 2  # global: layers 5 and 11
    assert windows("gemma3_text", sliding_window=4, sliding_window_pattern=3) == (4, 4, 0) * 4
    assert windows("gemma2", sliding_window=4) == (4, 0) * 6
    assert windows("mistral", sliding_window=4) == (4,) * 12
    assert windows("mistral", sliding_window=None) == (0,) * 12
    assert windows("phi3", sliding_window=2047) == (2047,) * 12
    assert windows("qwen2", sliding_window=4) == (0,) * 12
    assert windows("qwen2", sliding_window=4, use_sliding_window=True, max_window_layers=9) == (0,) * 9 + (4,) * 3
    assert windows("smollm3", sliding_window=4, use_sliding_window=True) == (0, 0, 0, 4) * 3
    assert windows("llama") == (0,) * 12


def test_no_rope_layers():
    every_fourth = ModelConfig.from_hf(hf("smollm3"))
    listed = ModelConfig.from_hf(hf("smollm3", no_rope_layers=[1, 1, 1, 0] * 3))
    assert every_fourth.layer_ropes == listed.layer_ropes == (0, 0, 0, 1) * 3
    assert every_fourth.ropes[1].type == "none"


def test_values_a_config_may_leave_out():
    gemma = ModelConfig.from_hf(hf("gemma2"))
    assert gemma.tie_embeddings
    assert (gemma.attention_softcap, gemma.final_softcap, gemma.attention_scale) == (50.0, 30.0, 256**-0.5)
    assert ModelConfig.from_hf(hf("gemma2", attn_logit_softcapping=None)).attention_softcap == 0
    assert ModelConfig.from_hf(hf("smollm3")).tie_embeddings
    assert not ModelConfig.from_hf(hf("llama")).tie_embeddings
    assert ModelConfig.from_hf(hf("olmo2")).norm_eps == 1e-5


def test_longrope_side_is_chosen_once():
    scaling = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = ModelConfig.from_hf(hf("phi3", rope_scaling=scaling, original_max_position_embeddings=32))
    assert not config.ropes[0].long
    assert not config.for_length(32).ropes[0].long
    assert config.for_length(33).ropes[0].long
    assert config.for_length(33).for_length(32) == config
