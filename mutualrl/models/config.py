"""ModelConfig: the numbers of one decoder, read from an HF config.json and never typed by hand."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mutualrl.models.families import FAMILIES, Family
from mutualrl.models.rope import Rope

ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu_new", "gelu")
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

# Fields that change the maths of some model in this list of families or near it, with the values under which they do
# not. Anything else is refused: a config field must not be ignored in silence.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (False,),
    "use_bidirectional_attention": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (),
    "clip_qkv": (),
    "num_local_experts": (0, 1),
    "num_experts": (0, 1),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "logits_scaling": (1, 1.0),
    "logit_scale": (1, 1.0),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything the decoder needs to know; frozen and hashable, so it can be static under `jax.jit`.

    Attributes:
      model_type: HF model type, a key of `FAMILIES`.
      vocab_size: V. hidden_size: D. intermediate_size: F. num_layers: Y. num_heads: H. num_kv_heads: J. head_dim: C.
      windows: attention window of each layer, the query's own token included; 0 means all earlier tokens.
      ropes: the distinct rotary embeddings. layer_ropes: index into `ropes` for each layer.
      norm_eps: epsilon of every RMS norm.
      activation: one of `ACTIVATIONS`.
      tie_embeddings: the output head is the embedding table.
      attention_scale: factor on attention scores.
      attention_softcap, final_softcap: tanh caps of scores and of logits; 0 means none.
      init_std: standard deviation of random initial kernels.
      max_length: longest sequence the model was made for.
      eos_ids: stop ids the model config names, possibly none. pad_id: the first pad id it names, or None.
      hf: the HF config as JSON text, written back on export.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    ropes: tuple[Rope, ...]
    layer_ropes: tuple[int, ...]
    norm_eps: float
    activation: str
    tie_embeddings: bool
    attention_scale: float
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    init_std: float = 0.02
    max_length: int = 0
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    hf: str = dataclasses.field(default="{}", repr=False)

    @property
    def family(self) -> Family:
        """The family's record of flags and weight rules."""
        return FAMILIES[self.model_type]

    @staticmethod
    def from_hf(source: str | os.PathLike | Mapping[str, Any]) -> ModelConfig:
        """Reads an HF config.

        Args:
          source: a config.json, the folder it lies in, or the dict itself.

        Raises:
          ValueError: a field is missing, unknown to us or unsupported; one line names field, value and allowed values.
        """
        if isinstance(source, Mapping):
            original = dict(source)
        else:
            path = Path(source)
            original = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        model_type = original.get("model_type")
        if model_type not in FAMILIES:
            raise ValueError(f"model_type {model_type!r} is not supported; allowed: {', '.join(FAMILIES)}")
        family = FAMILIES[model_type]
        for field in _SIZES + family.fields:
            if original.get(field) is None:
                raise ValueError(f"{field} is missing from the config of model_type {model_type!r}")
        hf = {**family.defaults, **original}
        _refuse_unsupported(hf, family)

        D, H, Y = hf["hidden_size"], hf["num_attention_heads"], hf["num_hidden_layers"]
        J = hf.get("num_key_value_heads") or H
        if H % J:
            raise ValueError(
                f"num_key_value_heads {J} is not supported; allowed: divisors of {H} (num_attention_heads)"
            )
        if not hf.get("head_dim") and D % H:
            raise ValueError(f"head_dim is missing and hidden_size {D} is no multiple of num_attention_heads {H}")
        C = hf.get("head_dim") or D // H
        activation = hf.get(family.activation_field) or family.defaults[family.activation_field]
        activation = "silu" if activation == "swish" else activation
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"{family.activation_field} {activation!r} is not supported; allowed: {', '.join(ACTIVATIONS)}"
            )
        windows = tuple(family.windows(hf)) if family.windows else (0,) * Y
        if len(windows) != Y:
            raise ValueError(f"layer_types has {len(windows)} entries; num_hidden_layers is {Y}")
        ropes, layer_ropes = _ropes(hf, family, C, windows)
        scalar = hf[family.attention_scalar] if family.attention_scalar else C
        eos, pad = _ids(hf.get("eos_token_id")), _ids(hf.get("pad_token_id"))
        return ModelConfig(
            model_type=model_type,
            vocab_size=hf["vocab_size"],
            hidden_size=D,
            intermediate_size=hf["intermediate_size"],
            num_layers=Y,
            num_heads=H,
            num_kv_heads=J,
            head_dim=C,
            windows=windows,
            ropes=ropes,
            layer_ropes=layer_ropes,
            norm_eps=float(hf["rms_norm_eps"]),
            activation=activation,
            tie_embeddings=bool(hf["tie_word_embeddings"]),
            attention_scale=float(scalar) ** -0.5,
            attention_softcap=float((family.attention_softcap and hf.get("attn_logit_softcapping")) or 0.0),
            final_softcap=float((family.final_softcap and hf.get("final_logit_softcapping")) or 0.0),
            init_std=float(hf.get("initializer_range") or 0.02),
            max_length=int(hf.get("max_position_embeddings") or 0),
            eos_ids=eos,
            pad_id=pad[0] if pad else None,
            hf=json.dumps(original, sort_keys=True),
        )

    def for_length(self, length: int) -> ModelConfig:
        """This model set up for sequences of up to `length` tokens.

        Only longrope depends on it: its long factors are used if `length` exceeds the original context. The choice is
        made once, for all rows and steps; chosen by the tokens seen so far, cached keys and a later full forward would
        disagree, and a row would depend on its neighbours in the batch.
        """
        ropes = tuple(
            dataclasses.replace(rope, long=length > rope.original_length) if rope.type == "longrope" else rope
            for rope in self.ropes
        )
        return dataclasses.replace(self, ropes=ropes)


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Id fields of HF configs may be absent, one id or a list."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _refuse_unsupported(hf: Mapping[str, Any], family: Family) -> None:
    neutral = dict(_NEUTRAL)
    if family.windows is None:
        neutral["sliding_window"] = ()
        neutral["use_sliding_window"] = (False,)
    if not family.attention_softcap:
        neutral["attn_logit_softcapping"] = ()
    if not family.final_softcap:
        neutral["final_logit_softcapping"] = ()
    if not family.partial_rotary:
        neutral["partial_rotary_factor"] = (1, 1.0)
    if not family.no_rope:
        neutral["no_rope_layers"] = ()
    for field, allowed in neutral.items():
        value = hf.get(field)
        if value is not None and value not in allowed:
            names = ", ".join(repr(item) for item in (*allowed, None))
            raise ValueError(
                f"{field} {value!r} is not supported for model_type {hf['model_type']!r}; allowed: {names}"
            )
    types = set(hf.get("layer_types") or ())
    if family.windows is None and types - {"full_attention"}:
        other = min(types - {"full_attention"})
        raise ValueError(f"layer_types has {other!r}, not supported for {hf['model_type']!r}; allowed: full_attention")


def _ropes(
    hf: Mapping[str, Any], family: Family, head_dim: int, windows: tuple[int, ...]
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """The distinct ropes and each layer's index among them, from any of the layouts HF has used."""

    def rope(params: Mapping[str, Any], theta: float) -> Rope:
        params = dict(params)
        type_ = params.get("rope_type", params.get("type"))
        params["rope_type"] = family.rope_aliases.get(type_, type_)
        fraction = params.get("partial_rotary_factor", hf.get("partial_rotary_factor")) or 1.0
        if fraction != 1.0 and not family.partial_rotary:
            raise ValueError(
                f"partial_rotary_factor {fraction!r} is not supported for {hf['model_type']!r}; allowed: 1.0"
            )
        length = hf.get("max_position_embeddings")
        before = hf.get("original_max_position_embeddings") or params.get("original_max_position_embeddings") or length
        return Rope.from_hf(params, int(head_dim * fraction), theta, before, length)

    params = hf.get("rope_parameters") or {}
    nested = any(isinstance(value, Mapping) for value in params.values())
    if family.local_rope:
        if params and not nested:
            raise ValueError("rope_parameters must be one dict for full_attention and one for sliding_attention")
        scaled = {**(params.get("full_attention") or {}), **(hf.get("rope_scaling") or {})}
        local = params.get("sliding_attention") or {}
        ropes = rope(scaled, hf["rope_theta"]), rope(local, hf["rope_local_base_freq"])
        return ropes, tuple(int(window > 0) for window in windows)
    if nested:
        raise ValueError(f"rope_parameters by layer type are not supported for model_type {hf['model_type']!r}")
    only = rope(hf.get("rope_scaling") or params, params.get("rope_theta", hf["rope_theta"]))
    if not family.no_rope:
        return (only,), (0,) * len(windows)
    has_rope = hf.get("no_rope_layers")
    if has_rope is None:
        has_rope = [(i + 1) % hf["no_rope_layer_interval"] != 0 for i in range(len(windows))]
    if len(has_rope) != len(windows):
        raise ValueError(f"no_rope_layers has {len(has_rope)} entries; num_hidden_layers is {len(windows)}")
    # Frequency 0 turns nothing, so a no-rope layer runs the same code.
    return (only, Rope("none", only.dim)), tuple(int(not flag) for flag in has_rope)
