"""GGUF files as a source of Hugging Face configs and tensors.

The header is parsed here (the library's reader makes an array view of every string of the vocabulary, seconds for a
large one); blocks are dequantised by the `gguf` library.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
QUANTS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")

# ---------------------------------------------------------------------------------------------------------------------
# The file.


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. `shape` is numpy's order ([out, in]); `start` is the offset in the file in bytes."""

    shape: tuple[int, ...]
    type: int
    start: int


def read_header(path: str | Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """The metadata (arrays of numbers as numpy arrays, of strings as lists) and the tensors by GGUF name.

    Raises:
      ValueError: not a little-endian GGUF file of version 2 or 3, or one that is cut short or damaged.
    """
    with open(path, "rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise ValueError(f"{path} is empty, not a GGUF file") from error
    with data:
        if data[:4] != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it starts with {data[:4]!r}")
        cursor = _Cursor(data, 4)
        try:
            version = cursor.number("I")
            if version in (2, 3):
                return _read_header(cursor)
        except (struct.error, EOFError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            raise ValueError(
                f"{path} is cut short or damaged: its header cannot be read at byte {cursor.at}"
            ) from error
        raise ValueError(f"{path} is GGUF version {version}; allowed: 2 and 3, little-endian")


def _read_header(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    tensors, keys = cursor.number("Q"), cursor.number("Q")
    metadata = {}
    for _ in range(keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    found = {}
    for _ in range(tensors):
        name, dims = cursor.string(), cursor.number("I")
        shape = tuple(cursor.number("Q") for _ in range(dims))[::-1]
        found[name] = TensorInfo(shape, cursor.number("I"), cursor.number("Q"))
    align = int(metadata.get("general.alignment", 32))
    base = -(-cursor.at // align) * align
    return metadata, {name: dataclasses.replace(t, start=base + t.start) for name, t in found.items()}


class _Cursor:
    def __init__(self, data: mmap.mmap, at: int):
        self.data, self.at = data, at

    def take(self, length: int) -> bytes:
        if length > len(self.data) - self.at:
            raise EOFError
        self.at += length
        return self.data[self.at - length : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        kind, count = self.number("I"), self.number("Q")
        if kind not in _SCALARS:
            return [self.value(kind) for _ in range(count)]
        dtype = np.dtype("<" + _SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)


# ---------------------------------------------------------------------------------------------------------------------
# The architectures.


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture maps to a Hugging Face family.

    Attributes:
      model_type: the family.
      ffn_norm: HF name of the norm before the MLP ("" where there is none).
      permuted: q and k were reordered for interleaved rotary embeddings.
      norm_plus_one: 1 was added to the norm weights.
      fused: q, k, v are one tensor and so are gate and up.
      window: config fields by GGUF key for families with attention windows; None where a window must not be.
      fields: further config fields by GGUF key.
      constants: config fields that the file does not hold.
      wide_layers: layer count of the one size whose attention scale comes from hidden size / heads (0: none).
    """

    model_type: str
    ffn_norm: str = "post_attention_layernorm"
    permuted: bool = False
    norm_plus_one: bool = False
    fused: bool = False
    window: Mapping[str, str] | None = None
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    wide_layers: int = 0


_WINDOW = {"attention.sliding_window": "sliding_window"}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_BEFORE_MLP = "pre_feedforward_layernorm"

ARCHITECTURES: Mapping[str, Architecture] = {
    # Mistral and SmolLM2 are stored as llama.
    "llama": Architecture("llama", permuted=True, constants={"hidden_act": "silu"}),
    "smollm3": Architecture("smollm3", permuted=True, constants={"hidden_act": "silu", "no_rope_layer_interval": 4}),
    "qwen2": Architecture("qwen2", constants={"hidden_act": "silu", "use_sliding_window": False}),
    "qwen3": Architecture("qwen3", constants={"hidden_act": "silu", "use_sliding_window": False}),
    "phi3": Architecture("phi3", fused=True, window=_WINDOW, constants={"hidden_act": "silu"}),
    "olmo2": Architecture("olmo2", ffn_norm="", constants={"hidden_act": "silu"}),
    "gemma2": Architecture(
        "gemma2", _BEFORE_MLP, norm_plus_one=True, window=_WINDOW, fields=_CAPS, constants=_GEMMA, wide_layers=46
    ),
    "gemma3": Architecture(
        "gemma3_text",
        _BEFORE_MLP,
        norm_plus_one=True,
        window=_WINDOW,
        fields={**_CAPS, "rope.freq_base_swa": "rope_local_base_freq"},
        constants={**_GEMMA, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6},
        wide_layers=62,
    ),
}

# The same in all architectures: GGUF key → config field.
_FIELDS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "context_length": "max_position_embeddings",
}
_NEEDED = ("embedding_length", "block_count", "attention.head_count")
_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Tensors that describe the rotary embedding; they go into the config.
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class GGUFSource:
    """A GGUF file read as a Hugging Face checkpoint.

    Attributes:
      config: what the config.json of that model would say; `tie_word_embeddings` is true where the file holds no head.
      metadata: the file's own metadata.
    """

    def __init__(self, path: str | Path):
        """Reads the header only.

        Raises:
          ValueError: unreadable or cut short, or an unknown architecture, tensor or rotary scaling.
        """
        self._path = Path(path)
        self.metadata, self._tensors = read_header(path)
        name = self.metadata.get("general.architecture")
        if name not in ARCHITECTURES:
            raise ValueError(f"{path}: architecture {name!r} is not supported; allowed: {', '.join(ARCHITECTURES)}")
        self._prefix, self._arch = name, ARCHITECTURES[name]
        if "token_embd.weight" not in self._tensors:
            raise ValueError(f"{path} holds no token_embd.weight; only whole models can be read, not parts of one")
        for key in _NEEDED:
            if f"{name}.{key}" not in self.metadata:
                raise ValueError(f"{path} holds no {name}.{key}")
        self._names = {self._hf_name(t): t for t in self._tensors if t not in _ROPE_TENSORS}
        length = self._path.stat().st_size
        for stored, info in self._tensors.items():
            if info.start + _stored_bytes(info) > length:
                raise ValueError(f"{path} is cut short: tensor {stored} goes beyond its {length} bytes")
        self.config = self._config()

    def names(self) -> list[str]:
        """Hugging Face names of the tensors, in file order."""
        return list(self._names)

    def get(self, name: str) -> np.ndarray:
        """One tensor by its Hugging Face name, float32, [out, in] as in a Hugging Face checkpoint.

        Raises:
          KeyError: no such tensor; ValueError: it is stored in a type that is not supported.
        """
        stored = self._names[name]
        value = self._read(stored)
        part = stored.split(".")[2] if stored.startswith("blk.") else ""
        if self._arch.permuted and part in ("attn_q", "attn_k"):
            heads = self.config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
            value = _unpermuted(value, heads)
        if self._arch.norm_plus_one and stored.endswith("norm.weight"):
            value = value - np.float32(1)
        return value

    def _read(self, stored: str) -> np.ndarray:
        info = self._tensors[stored]
        try:
            kind = gguf.GGMLQuantizationType(info.type)
            kind_name = kind.name
        except ValueError:
            kind_name = f"number {info.type}"
        if kind_name not in QUANTS:
            raise ValueError(f"tensor {stored} is stored as {kind_name}; allowed: {', '.join(QUANTS)}")
        block, size = gguf.GGML_QUANT_SIZES[kind]
        shape = (*info.shape[:-1], info.shape[-1] // block * size)
        raw = np.memmap(self._path, np.uint8, "r", info.start, shape)
        if kind_name in ("F32", "F16"):
            raw = raw.view("<f4" if kind_name == "F32" else "<f2")
        return np.array(gguf.quants.dequantize(raw, kind), np.float32).reshape(info.shape)

    def _hf_name(self, stored: str) -> str:
        inner = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", stored)
        if inner:
            layer, part, kind = inner.groups()
            names = {**_INNER, **({"ffn_norm": self._arch.ffn_norm} if self._arch.ffn_norm else {})}
            if self._arch.fused:
                names["ffn_up"] = "mlp.gate_up_proj"
            if part in names:
                return f"model.layers.{layer}.{names[part]}.{kind}"
        outer = re.fullmatch(r"(\w+)\.(weight|bias)", stored)
        if outer and outer[1] in _OUTER:
            return f"{_OUTER[outer[1]]}.{outer[2]}"
        raise ValueError(f"tensor {stored} is not known for architecture {self._prefix}")

    def _key(self, key: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self._prefix}.{key}", default)
        if isinstance(value, np.ndarray):
            if len(set(value.tolist())) != 1:
                raise ValueError(f"{self._prefix}.{key} differs between layers: {value.tolist()}; allowed: one value")
            value = value.tolist()[0]
        return value

    def _config(self) -> dict[str, Any]:
        arch, config = self._arch, {"model_type": self._arch.model_type, **self._arch.constants}
        pattern = self.metadata.get(f"{self._prefix}.attention.sliding_window_pattern")
        for key, field in {**_FIELDS, **arch.fields, **(arch.window or {})}.items():
            value = self._key(key)
            if value is not None:
                # Stored as float32; the shortest decimal is the number that was meant (1e-06, not 9.99999997e-07).
                config[field] = float(str(np.float32(value))) if isinstance(value, float) else value
        window = self._key("attention.sliding_window")
        if arch.window is None and window:
            raise ValueError(f"attention.sliding_window {window} is not supported for architecture {self._prefix}")
        if config.get("sliding_window") == 0:
            config["sliding_window"] = None
        if arch.window is not None and isinstance(pattern, np.ndarray):
            config["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
        elif arch.window is not None and pattern is not None:
            config["sliding_window_pattern"] = int(pattern)
        heads, width = config["num_attention_heads"], config["hidden_size"]
        config.setdefault("num_key_value_heads", heads)
        config.setdefault("head_dim", width // heads)
        if arch.wide_layers:
            wide = config["num_hidden_layers"] == arch.wide_layers
            config["query_pre_attn_scalar"] = width // heads if wide else config["head_dim"]
        config["vocab_size"] = self._tensors["token_embd.weight"].shape[0]
        config["tie_word_embeddings"] = "output.weight" not in self._tensors
        for key, field in _IDS.items():
            value = self.metadata.get(f"tokenizer.ggml.{key}")
            config.update({field: int(value)} if value is not None else {})
        turned = self._key("rope.dimension_count", config["head_dim"])
        if turned != config["head_dim"]:
            config["partial_rotary_factor"] = turned / config["head_dim"]
        scaling = self._rope_scaling(config)
        return config | ({"rope_scaling": scaling} if scaling else {})

    def _rope_scaling(self, config: dict[str, Any]) -> dict[str, Any] | None:
        kind = self._key("rope.scaling.type", "none")
        original = self._key("rope.scaling.original_context_length")
        if "rope_freqs.weight" in self._tensors:
            dim = int(config["head_dim"] * config.get("partial_rotary_factor", 1.0))
            return llama3_scaling(self._read("rope_freqs.weight"), config["rope_theta"], dim)
        if "rope_factors_long.weight" in self._tensors:
            if original:
                config["original_max_position_embeddings"] = original
            factors = {k: self._read(f"rope_factors_{k}.weight").tolist() for k in ("long", "short")}
            return {"type": "longrope", "rope_type": "longrope", **{f"{k}_factor": v for k, v in factors.items()}}
        if kind == "none":
            return None
        scaling = {"type": kind, "rope_type": kind, "factor": float(self._key("rope.scaling.factor", 1.0))}
        if kind == "yarn" and original:
            scaling["original_max_position_embeddings"] = original
        if kind not in ("linear", "yarn"):
            raise ValueError(f"rope.scaling.type {kind!r} is not supported; allowed: none, linear, yarn, longrope")
        return scaling


def _stored_bytes(info: TensorInfo) -> int:
    """Bytes of a tensor in the file; 0 for a type that the library does not know."""
    if info.type not in list(gguf.GGMLQuantizationType):
        return 0
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(info.type)]
    return math.prod(info.shape) // block * size


def _unpermuted(value: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the reordering of q and k: rows (pair, half) of each head back to (half, pair)."""
    return value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def llama3_scaling(factors: np.ndarray, theta: float, dim: int) -> dict[str, Any] | None:
    """Llama-3's `rope_scaling` from the per-frequency divisors that GGUF stores instead of it.

    Only original length / low factor and original length / high factor enter the formula, so the original length can
    be set to Llama-3's 8192 without loss.

    Args:
      factors: f32[dim / 2] divisors of the frequencies.

    Raises:
      ValueError: the divisors do not follow Llama-3's formula.
    """
    factors = np.asarray(factors, np.float64)
    factor, inverse = float(factors.max()), theta ** (-np.arange(0, dim, 2) / dim) / (2 * np.pi)
    if np.all(factors == 1):
        return None
    original = 8192
    # In between, 1/divisor is linear in the inverse wavelength.
    share = (1 / factors - 1 / factor) / (1 - 1 / factor)
    middle = (share > 1e-4) & (share < 1 - 1e-4)
    if middle.sum() >= 2:
        slope, offset = np.polyfit(inverse[middle], share[middle], 1)
        spread = original / slope
        low, high = round(-offset * spread, 3), round((1 - offset) * spread, 3)
        smooth = np.clip((original * inverse - low) / (high - low), 0, 1)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": round(factor, 4),
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise ValueError("rope_freqs.weight does not follow Llama-3's rotary scaling; no other one is supported")
