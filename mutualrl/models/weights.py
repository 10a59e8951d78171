"""Weights in and out: HF safetensors folders (or any reader of HF tensors) to our tree, and back to an HF folder.

Both directions run the family's rules, strictly: a tensor that is unknown, missing, double or misshapen is an error
with its name. Reading goes slice by slice, so that no host holds more than what it asks for.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from mutualrl.models.config import ModelConfig
from mutualrl.models.decoder import param_shapes
from mutualrl.models.families import EMBED, HEAD, Rule, rules_for

Index = tuple[slice, ...]
Read = Callable[[Index], np.ndarray]
Put = Callable[[tuple[str, ...], tuple[int, ...], Read], Any]

_FLOATS = ("F32", "F16", "BF16", "F64")
_INDEX = "model.safetensors.index.json"
_COMPARE_ROWS = 4096
# What makes a tokenizer work, next to the weights in an HF folder.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


class TensorSource(Protocol):
    """Anything that gives HF tensors by HF name."""

    def names(self) -> Iterable[str]:
        """HF tensor names."""

    def get(self, name: str) -> np.ndarray:
        """One tensor, any float dtype."""


def resolve(path_or_id: str | os.PathLike) -> Path:
    """The local folder of a model: the folder itself, or a hub repository downloaded (or cached, offline).

    Raises:
      ValueError: neither a local folder nor a hub id that can be reached.
    """
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download  # only needed for hub ids

    try:
        return Path(
            snapshot_download(
                str(path_or_id), allow_patterns=["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
            )
        )
    except Exception as error:  # the hub client raises many unrelated types
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{str(path_or_id)!r} is no local folder and not reachable as a hub id: {reason}") from error


def load_params(source: str | os.PathLike | TensorSource, config: ModelConfig, put: Put | None = None) -> dict:
    """Reads a checkpoint into the tree that `mutualrl.models.decoder` documents.

    Args:
      source: HF folder (model.safetensors, or shards with their index), or a `TensorSource`.
      config: the model.
      put: makes one parameter from (path, shape, read); `read(index)` gives float32 for a tuple of slices of that
        shape and touches only the tensors and rows it needs, so it can serve `jax.make_array_from_callback`.
        The default reads everything into numpy.

    Raises:
      ValueError: a tensor is unknown, missing, double or misshapen; a tied model's redundant head differs.
    """
    put = put or (lambda path, shape, read: read(tuple(slice(None) for _ in shape)))
    reader = _Whole(source) if hasattr(source, "get") else _Folder(Path(source))
    reader = _Renamed(reader, _ignorable(config))
    shapes = _flat(param_shapes(config))
    wanted = _tensors(config, shapes)

    spare_head = config.tie_embeddings and HEAD.name in reader.actual
    for name in reader.actual:
        if name not in wanted and not (spare_head and name == HEAD.name):
            raise ValueError(f"tensor {reader.actual[name]!r} has no place in this {config.model_type} model")
    if HEAD.name in wanted and HEAD.name not in reader.actual:
        raise ValueError(
            f"tensor {HEAD.name!r} is missing and tie_word_embeddings is false; set it to true if the head is tied"
        )
    for name, shape in wanted.items():
        if name not in reader.actual:
            raise ValueError(f"tensor {name!r} of shape {shape} is missing from the checkpoint")
        reader.check(name, shape)
    if spare_head:
        _check_spare_head(reader, wanted[EMBED.name])

    params: dict = {}
    for rule in rules_for(config.family, config.tie_embeddings):
        start = 0
        for path in rule.paths:
            shape = shapes[path]
            read = _reader(reader, rule, shape, start, wanted)
            parts = tuple(path.split("/"))
            _nest(params, parts, put(parts, shape, read))
            start += shape[-1]
    return params


def export_hf(
    params: Mapping[str, Any],
    config: ModelConfig,
    folder: str | os.PathLike,
    tokenizer_folder: str | os.PathLike | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes an HF folder that transformers loads: config.json and float32 safetensors.

    Args:
      params: our tree, numpy or addressable JAX arrays.
      config: the model.
      folder: created if need be; earlier weights in it are removed.
      tokenizer_folder: tokenizer files and generation config are copied from here.
      shard_bytes: a weight file grows no larger than this unless one tensor does.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Files of an earlier export with another number of shards would be read with the new ones.
    for stale in [*folder.glob("model*.safetensors"), folder / _INDEX]:
        stale.unlink(missing_ok=True)

    leaves = _flat(params, lambda leaf: leaf)
    shapes = _flat(param_shapes(config))
    for path in sorted(shapes.keys() | leaves.keys()):
        given = tuple(leaves[path].shape) if path in leaves else None
        if given != shapes.get(path):
            raise ValueError(f"parameter {path!r} has shape {given}; the model needs {shapes.get(path)}")

    shards: list[list[tuple[str, Rule]]] = [[]]
    sizes = [0]
    for name, (rule, shape) in _placed(config, shapes).items():
        size = 4 * int(np.prod(shape))
        if shards[-1] and sizes[-1] + size > shard_bytes:
            shards.append([])
            sizes.append(0)
        shards[-1].append((name, rule))
        sizes[-1] += size
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _hf_tensor(leaves, rule, _layer_of(name, rule)) for name, rule in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update({name: file for name in tensors})
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2))

    (folder / "config.json").write_text(json.dumps(_exported_config(config), indent=2) + "\n")
    if tokenizer_folder is not None:
        for file in _TOKENIZER_FILES:
            if (Path(tokenizer_folder) / file).is_file() and Path(tokenizer_folder).resolve() != folder.resolve():
                shutil.copyfile(Path(tokenizer_folder) / file, folder / file)


def _exported_config(config: ModelConfig) -> dict:
    hf = json.loads(config.hf)
    hf.pop("auto_map", None)  # names Python files that an export does not carry
    hf.pop("_name_or_path", None)
    hf.update(
        architectures=[config.family.architecture],
        model_type=config.model_type,
        tie_word_embeddings=config.tie_embeddings,
        torch_dtype="float32",
    )
    if "dtype" in hf:  # the newer spelling, which would win
        hf["dtype"] = "float32"
    return hf


# --- rules against shapes ---------------------------------------------------------------------------------------------


def _placed(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Rule, tuple[int, ...]]]:
    """HF tensor name -> (its rule, its HF shape), for every tensor of the model."""
    placed = {}
    for rule in rules_for(config.family, config.tie_embeddings):
        layered = "{}" in rule.name
        parts = [shapes[path][1:] if layered else shapes[path] for path in rule.paths]
        parts = [part[::-1] if rule.transpose else part for part in parts]
        shape = (sum(part[0] for part in parts), *parts[0][1:])
        for layer in range(config.num_layers) if layered else (0,):
            placed[rule.name.format(layer)] = rule, shape
    return placed


def _tensors(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, (_, shape) in _placed(config, shapes).items()}


def _layer_of(name: str, rule: Rule) -> int | None:
    match = re.fullmatch(re.escape(rule.name).replace(r"\{\}", r"(\d+)"), name)
    return int(match[1]) if match and match.groups() else None


def _hf_tensor(leaves: Mapping[str, Any], rule: Rule, layer: int | None) -> np.ndarray:
    parts = [np.asarray(leaves[path] if layer is None else leaves[path][layer], np.float32) for path in rule.paths]
    parts = [part.T if rule.transpose else part for part in parts]
    return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts, 0))


def _reader(
    reader: _Renamed, rule: Rule, shape: tuple[int, ...], start: int, hf_shapes: Mapping[str, tuple[int, ...]]
) -> Read:
    """`read(index)` of one of our parameters; `start` is its first row in a fused HF tensor."""
    layered = "{}" in rule.name

    def one(name: str, bounds: list[tuple[int, int]]) -> np.ndarray:
        bounds = bounds[::-1] if rule.transpose else bounds
        if len(rule.paths) > 1:
            bounds = [(bounds[0][0] + start, bounds[0][1] + start), *bounds[1:]]
        tensor = reader.read(name, tuple(slice(*bound) for bound in bounds), hf_shapes[name])
        return tensor.T if rule.transpose else tensor

    def read(index: Index) -> np.ndarray:
        index = (*index, *(slice(None) for _ in range(len(shape) - len(index))))
        steps = [part.indices(size) for part, size in zip(index, shape)]
        if any(step != 1 for _, _, step in steps):
            raise ValueError(f"parameter {'/'.join(rule.paths)}: only slices of step 1 can be read, not {index}")
        bounds = [(low, max(low, high)) for low, high, _ in steps]
        if not layered:
            return np.ascontiguousarray(one(rule.name, bounds), np.float32)
        out = np.empty([high - low for low, high in bounds], np.float32)
        for row, layer in enumerate(range(*bounds[0])):
            out[row] = one(rule.name.format(layer), bounds[1:])
        return out

    return read


def _check_spare_head(reader: _Renamed, shape: tuple[int, ...]) -> None:
    reader.check(HEAD.name, shape)
    for low in range(0, shape[0], _COMPARE_ROWS):
        rows = (slice(low, min(low + _COMPARE_ROWS, shape[0])), slice(0, shape[1]))
        if not np.array_equal(reader.read(HEAD.name, rows, shape), reader.read(EMBED.name, rows, shape)):
            raise ValueError(
                f"tensor {HEAD.name!r} differs from {EMBED.name!r} although tie_word_embeddings is true; "
                "set it to false to use the head"
            )


def _ignorable(config: ModelConfig) -> re.Pattern:
    patterns = (re.escape(name).replace(r"\{\}", r"\d+") for name in config.family.ignored)
    return re.compile("|".join(patterns))


# --- sources ----------------------------------------------------------------------------------------------------------


class _Folder:
    """Safetensors of an HF folder, read by slices."""

    def __init__(self, folder: Path):
        index, single = folder / _INDEX, folder / "model.safetensors"
        if index.is_file():
            weight_map = json.loads(index.read_text())["weight_map"]
            files = sorted(set(weight_map.values()))
        elif single.is_file():
            weight_map, files = None, [single.name]
        else:
            raise ValueError(f"no model.safetensors and no {_INDEX} in {str(folder)!r}")
        self._handles: dict[str, Any] = {}
        for file in files:
            if not (folder / file).is_file():
                raise ValueError(f"weight file {file!r} named by {_INDEX} is missing in {str(folder)!r}")
            handle = safe_open(folder / file, "np")
            for name in sorted(handle.keys()):
                if name in self._handles:
                    raise ValueError(f"tensor {name!r} is in two weight files of {str(folder)!r}")
                self._handles[name] = handle
        absent = (weight_map or {}).keys() - self._handles.keys()
        if absent:
            raise ValueError(f"tensor {min(absent)!r} is missing from the weight file that {_INDEX} names")

    def names(self) -> Iterable[str]:
        return self._handles

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        lazy = self._handles[name].get_slice(name)
        if lazy.get_dtype() not in _FLOATS:
            raise ValueError(f"tensor {name!r} has dtype {lazy.get_dtype()}; allowed: {', '.join(_FLOATS)}")
        _check_shape(name, lazy.get_shape(), shape)

    def read(self, name: str, index: Index, shape: tuple[int, ...]) -> np.ndarray:
        return self._handles[name].get_slice(name)[index]


@dataclasses.dataclass
class _Whole:
    """A `TensorSource`, which knows whole tensors only; shapes are checked as they are read."""

    source: TensorSource

    def names(self) -> Iterable[str]:
        return self.source.names()

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Nothing is known before the tensor is read."""

    def read(self, name: str, index: Index, shape: tuple[int, ...]) -> np.ndarray:
        tensor = self.source.get(name)
        _check_shape(name, tensor.shape, shape)
        return tensor[index]


def _check_shape(name: str, found: Iterable[int], shape: tuple[int, ...]) -> None:
    if tuple(found) != shape:
        raise ValueError(f"tensor {name!r} has shape {tuple(found)}; the model needs {shape}")


class _Renamed:
    """A source under the names of the causal language model, without ignorable buffers.

    Base-model checkpoints lack the `model.` prefix; text parts of vision models have a `language_model.` one.
    """

    def __init__(self, source: _Folder | _Whole, ignorable: re.Pattern):
        self.source = source
        self.actual: dict[str, str] = {}
        for actual in source.names():
            name = actual.replace("language_model.", "", 1)
            if not name.startswith(("model.", "lm_head.")):
                name = f"model.{name}"
            if ignorable.fullmatch(name):
                continue
            if name in self.actual:
                raise ValueError(f"tensor {name!r} is there twice: as {self.actual[name]!r} and {actual!r}")
            self.actual[name] = actual

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        self.source.check(self.actual[name], shape)

    def read(self, name: str, index: Index, shape: tuple[int, ...]) -> np.ndarray:
        return self.source.read(self.actual[name], index, shape).astype(np.float32)


# --- nested dicts -----------------------------------------------------------------------------------------------------


def _flat(
    tree: Mapping[str, Any], value: Callable = lambda leaf: tuple(leaf.shape), prefix: str = ""
) -> dict[str, Any]:
    flat = {}
    for key, item in tree.items():
        if isinstance(item, Mapping):
            flat.update(_flat(item, value, f"{prefix}{key}/"))
        else:
            flat[prefix + key] = value(item)
    return flat


def _nest(tree: dict, path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
