"""The table of model families: one record of flags and weight rules per Hugging Face `model_type`.

Adding a family is adding one record to `FAMILIES`. Traps the records encode: `post_attention_layernorm` is the norm
before the MLP in Llama, Qwen and Phi but a norm *after* attention in Gemma-2/3 and OLMo-2; Gemma norms scale by
(1 + weight); Qwen2 has biases on q, k and v only; Phi-3 fuses q, k, v and gate, up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

Windows = Callable[[Mapping[str, Any]], list[int]]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One HF tensor (per layer, if the name has `{}`) and where it goes; read the other way round it is the export.

    Attributes:
      name: HF tensor name, `{}` for the layer number.
      paths: our parameter paths. With several, the HF tensor is their concatenation along its first axis.
      transpose: the HF tensor is [out, in] and ours [in, out].
    """

    name: str
    paths: tuple[str, ...]
    transpose: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
    """What distinguishes a family, beyond the numbers in config.json.

    Attributes:
      architecture: HF class, written to an exported config.json.
      rules: weight rules without the output head, see `rules_for`.
      defaults: values HF takes where config.json lacks the field (config.json may hold only differences).
      fields: fields that must be in config.json besides the common sizes.
      activation_field: field that names the MLP activation.
      windows: HF dict -> attention window of each layer, 0 for global.
      pre_norm: norms before attention and MLP.
      post_norm: norms on the outputs of attention and MLP, before the residual sum.
      norm_offset: norms scale by (1 + weight).
      qk_norm: norm on queries and keys before rope: "head" over each head, "full" over all heads together, "" none.
      qkv_bias: biases on q, k and v.
      embed_scale: embeddings are multiplied by sqrt(D), rounded in the compute dtype.
      attention_scalar: field whose value to the power -1/2 scales the scores; "" means the head size.
      attention_softcap, final_softcap: the family reads `attn_logit_softcapping` / `final_logit_softcapping`.
      partial_rotary: the family reads `partial_rotary_factor`.
      local_rope: layers with a window have a rope of their own.
      no_rope: the family reads `no_rope_layers`.
      rope_aliases: older names of rope types.
      ignored: HF buffers that old checkpoints carry and that are computed anew.
    """

    architecture: str
    rules: tuple[Rule, ...]
    defaults: Mapping[str, Any]
    fields: tuple[str, ...] = ()
    activation_field: str = "hidden_act"
    windows: Windows | None = None
    pre_norm: bool = True
    post_norm: bool = False
    norm_offset: bool = False
    qk_norm: str = ""
    qkv_bias: bool = False
    embed_scale: bool = False
    attention_scalar: str = ""
    attention_softcap: bool = False
    final_softcap: bool = False
    partial_rotary: bool = False
    local_rope: bool = False
    no_rope: bool = False
    rope_aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ("model.layers.{}.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")


HEAD = Rule("lm_head.weight", ("head",), transpose=True)
EMBED = Rule("model.embed_tokens.weight", ("embed",))


def rules_for(family: Family, tied: bool) -> tuple[Rule, ...]:
    """All weight rules; a tied model has no tensor for the head."""
    return family.rules if tied else family.rules + (HEAD,)


def _layer(name: str, *paths: str, transpose: bool = False) -> Rule:
    return Rule(f"model.layers.{{}}.{name}", tuple(f"layers/{path}" for path in paths), transpose)


def _kernel(name: str, *paths: str) -> Rule:
    return _layer(f"{name}.weight", *paths, transpose=True)


_ENDS = (EMBED, Rule("model.norm.weight", ("norm",)))
_ATTENTION = tuple(_kernel(f"self_attn.{name}_proj", name) for name in "qkvo")
_QKV_BIAS = tuple(_layer(f"self_attn.{name}_proj.bias", f"{name}_bias") for name in "qkv")
_QK_NORM = tuple(_layer(f"self_attn.{name}_norm.weight", f"{name}_norm") for name in "qk")
_MLP = tuple(_kernel(f"mlp.{name}_proj", name) for name in ("gate", "up", "down"))
_FUSED = (
    _kernel("self_attn.qkv_proj", "q", "k", "v"),
    _kernel("self_attn.o_proj", "o"),
    _kernel("mlp.gate_up_proj", "gate", "up"),
    _kernel("mlp.down_proj", "down"),
)
_PRE_NORMS = (
    _layer("input_layernorm.weight", "attention_norm"),
    _layer("post_attention_layernorm.weight", "mlp_norm"),
)
_POST_NORMS = (
    _layer("post_attention_layernorm.weight", "post_attention_norm"),
    _layer("post_feedforward_layernorm.weight", "post_mlp_norm"),
)
_SANDWICH_NORMS = _POST_NORMS + (
    _layer("input_layernorm.weight", "attention_norm"),
    _layer("pre_feedforward_layernorm.weight", "mlp_norm"),
)


def _by_layer_types(hf: Mapping[str, Any], sliding: Callable[[int], bool]) -> list[int]:
    """Windows from `layer_types`, or where that is absent from the family's older rule `sliding(layer)`."""
    types = hf.get("layer_types") or [
        "sliding_attention" if sliding(i) else "full_attention" for i in range(hf["num_hidden_layers"])
    ]
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown:
        raise ValueError(f"layer_types has {min(unknown)!r}; allowed: sliding_attention, full_attention")
    if "sliding_attention" in types and not hf.get("sliding_window"):
        raise ValueError(f"sliding_window is {hf.get('sliding_window')!r} but layer_types has sliding_attention")
    return [hf["sliding_window"] if type_ == "sliding_attention" else 0 for type_ in types]


def _every_layer(hf: Mapping[str, Any]) -> list[int]:
    return [hf.get("sliding_window") or 0] * hf["num_hidden_layers"]


def _upper_layers(hf: Mapping[str, Any]) -> list[int]:
    used = hf.get("use_sliding_window") and hf.get("sliding_window")
    if not used and "sliding_attention" in (hf.get("layer_types") or ()):
        raise ValueError("use_sliding_window is false but layer_types has sliding_attention")
    return _by_layer_types(hf, lambda i: bool(used) and i >= hf["max_window_layers"])


def _no_rope_layers(hf: Mapping[str, Any]) -> list[int]:
    if not (hf.get("use_sliding_window") and hf.get("sliding_window")):
        if "sliding_attention" in (hf.get("layer_types") or ()):
            raise ValueError("use_sliding_window is false but layer_types has sliding_attention")
        return [0] * hf["num_hidden_layers"]
    ropes = hf.get("no_rope_layers")
    interval = hf["no_rope_layer_interval"]
    return _by_layer_types(hf, lambda i: not (ropes[i] if ropes else (i + 1) % interval))


def _local_then_global(default_period: int) -> Windows:
    def windows(hf: Mapping[str, Any]) -> list[int]:
        period = hf.get("sliding_window_pattern") or default_period
        return _by_layer_types(hf, lambda i: bool((i + 1) % period))

    return windows


_DEFAULTS = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1e4, "tie_word_embeddings": False}
_GEMMA_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_QWEN_DEFAULTS = {**_DEFAULTS, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        # Llama 2 and 3, SmolLM2 and everything else that is stored as a Llama.
        "llama": Family("LlamaForCausalLM", _ENDS + _ATTENTION + _MLP + _PRE_NORMS, _DEFAULTS),
        "smollm3": Family(
            "SmolLM3ForCausalLM",
            _ENDS + _ATTENTION + _MLP + _PRE_NORMS,
            {**_DEFAULTS, "rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
            fields=("num_key_value_heads",),
            windows=_no_rope_layers,
            no_rope=True,
        ),
        "mistral": Family(
            "MistralForCausalLM",
            _ENDS + _ATTENTION + _MLP + _PRE_NORMS,
            {**_DEFAULTS, "sliding_window": 4096},
            fields=("num_key_value_heads",),
            windows=_every_layer,
        ),
        "qwen2": Family(
            "Qwen2ForCausalLM",
            _ENDS + _ATTENTION + _QKV_BIAS + _MLP + _PRE_NORMS,
            _QWEN_DEFAULTS,
            fields=("num_key_value_heads",),
            windows=_upper_layers,
            qkv_bias=True,
        ),
        "qwen3": Family(
            "Qwen3ForCausalLM",
            _ENDS + _ATTENTION + _QK_NORM + _MLP + _PRE_NORMS,
            _QWEN_DEFAULTS,
            fields=("num_key_value_heads", "head_dim"),
            windows=_upper_layers,
            qk_norm="head",
        ),
        # Phi-3, Phi-3.5 and Phi-4 (mini).
        "phi3": Family(
            "Phi3ForCausalLM",
            _ENDS + _FUSED + _PRE_NORMS,
            {**_DEFAULTS, "rms_norm_eps": 1e-5},
            windows=_every_layer,
            partial_rotary=True,
            rope_aliases={"su": "longrope", "yarn": "longrope"},
        ),
        "gemma2": Family(
            "Gemma2ForCausalLM",
            _ENDS + _ATTENTION + _MLP + _SANDWICH_NORMS,
            {**_GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            fields=("num_key_value_heads", "head_dim"),
            activation_field="hidden_activation",
            windows=_local_then_global(2),
            post_norm=True,
            norm_offset=True,
            embed_scale=True,
            attention_scalar="query_pre_attn_scalar",
            attention_softcap=True,
            final_softcap=True,
        ),
        "gemma3_text": Family(
            "Gemma3ForCausalLM",
            _ENDS + _ATTENTION + _QK_NORM + _MLP + _SANDWICH_NORMS,
            {**_GEMMA_DEFAULTS, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
            fields=("num_key_value_heads", "head_dim"),
            activation_field="hidden_activation",
            windows=_local_then_global(6),
            post_norm=True,
            norm_offset=True,
            qk_norm="head",
            embed_scale=True,
            attention_scalar="query_pre_attn_scalar",
            final_softcap=True,
            local_rope=True,
        ),
        "olmo2": Family(
            "Olmo2ForCausalLM",
            _ENDS + _ATTENTION + _QK_NORM + _MLP + _POST_NORMS,
            {**_DEFAULTS, "rms_norm_eps": 1e-5},
            pre_norm=False,
            post_norm=True,
            qk_norm="full",
        ),
    }
)
