"""Where a tokenizer comes from: a Hugging Face folder or hub id, a SentencePiece model, or a GGUF file."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from mutualrl.tokenizers.pieces import read_sentencepiece

# Names that an end-of-text token goes by, for a bare `tokenizer.json` that says nothing about it.
USUAL_EOS = ("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "[SEP]")
FILES = ("*.json", "*.jinja", "*.model", "*.txt")


@dataclasses.dataclass(frozen=True)
class Source:
    """What all kinds of sources are reduced to.

    Attributes:
      name: folder, file or hub name.
      backend: the tokenizer as its authors meant it to be used for prompts.
      special: special tokens by their Hugging Face names (`bos_token`, `eos_token`, `pad_token`, `unk_token`, ...).
      adds_bos: its default encoding starts with the BOS.
      stop_ids: ids that some configuration file names as an end of generation.
      pad_id: the pad id that a configuration file names, or None.
      chat_template: Jinja source, or None.
    """

    name: str
    backend: tokenizers.Tokenizer
    special: dict[str, str]
    adds_bos: bool
    stop_ids: tuple[int, ...]
    pad_id: int | None
    chat_template: str | None


def open_source(source: str | Path) -> Source:
    """Reads a folder, a hub id (HF_HUB_OFFLINE is honoured), a `.gguf` or a SentencePiece `.model` file.

    Raises:
      ValueError: the source holds no tokenizer that can be read; FileNotFoundError: no such file or folder.
    """
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        from mutualrl.tokenizers.from_gguf import read_gguf

        return read_gguf(path)
    if path.is_file() and path.suffix == ".model":
        return _bare_sentencepiece(path)
    if path.is_dir():
        return _folder(path, path.resolve().name)
    if path.suffix or path.is_absolute() or str(source).startswith(".") or len(path.parts) > 2:
        raise FileNotFoundError(f"no tokenizer at {source}")
    from huggingface_hub import snapshot_download

    return _folder(Path(snapshot_download(str(source), allow_patterns=list(FILES))), str(source))


def ids_of(value: Any) -> list[int]:
    """A configuration's id field, which may be missing, one id or a list of them."""
    if value is None:
        return []
    return [int(v) for v in (value if isinstance(value, (list, tuple)) else [value]) if v is not None and int(v) >= 0]


def adds_bos(backend: tokenizers.Tokenizer, bos: str | None) -> bool:
    """Whether the default encoding of a text starts with the BOS."""
    ids = backend.encode("a").ids
    return bos is not None and len(ids) > 0 and ids[0] == backend.token_to_id(bos)


def _json(path: Path) -> dict:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object but a {type(value).__name__}")
    return value


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns whatever a library raises on a broken tokenizer into a ValueError of one line that names `path`."""
    try:
        yield
    except Exception as error:  # the `tokenizers` library raises bare Exceptions
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} holds no tokenizer that can be read: {reason}") from error


def _folder(folder: Path, name: str) -> Source:
    config = _json(folder / "tokenizer_config.json")
    special = _special_tokens(_json(folder / "special_tokens_map.json") | config)
    if (folder / "tokenizer.json").exists():
        with readable(folder / "tokenizer.json"):
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    elif not config and (models := sorted(folder.glob("*.model"))):
        return dataclasses.replace(_bare_sentencepiece(models[0]), name=name)
    else:
        # Older formats (vocab.txt, vocab.json + merges.txt, SentencePiece with a class of its own).
        from transformers import AutoTokenizer

        with readable(folder):
            tokenizer = AutoTokenizer.from_pretrained(str(folder))
            backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        special = {**{k: str(v) for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}, **special}
    model, generation = _json(folder / "config.json"), _json(folder / "generation_config.json")
    configs = [generation, model, model.get("text_config") or {}]
    if not config and not special:
        _name_by_config(special, backend, configs)
    default = adds_bos(backend, special.get("bos_token"))
    if isinstance(config.get("add_bos_token"), bool):
        default = config["add_bos_token"] and "bos_token" in special
    pads = [i for c in configs for i in ids_of(c.get("pad_token_id"))[:1]]
    return Source(
        name=name,
        backend=backend,
        special=special,
        adds_bos=default,
        stop_ids=tuple(i for c in configs for i in ids_of(c.get("eos_token_id"))),
        pad_id=pads[0] if pads else None,
        chat_template=_chat_template(folder, config),
    )


def _special_tokens(config: dict) -> dict[str, str]:
    """The `*_token` entries, each a string or a described token."""
    special = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            special[key] = text
    return special


def _name_by_config(special: dict[str, str], backend: tokenizers.Tokenizer, configs: list[dict]) -> None:
    """Fills in BOS and EOS of a bare tokenizer.json: by the model's configuration, else by the usual names."""
    for key in ("bos_token", "eos_token"):
        ids = [i for c in configs for i in ids_of(c.get(f"{key}_id")) if backend.id_to_token(i) is not None]
        if ids:
            special[key] = backend.id_to_token(ids[0])
    if "eos_token" not in special:
        found = [token for token in USUAL_EOS if backend.token_to_id(token) is not None]
        special.update({"eos_token": found[0]} if found else {})


def _chat_template(folder: Path, config: dict) -> str | None:
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default") or next(iter(template.values()), None)
    return template


def _bare_sentencepiece(path: Path) -> Source:
    with readable(path):
        backend, special = read_sentencepiece(path)
    name = path.parent.name or path.stem
    return Source(name, backend, special, adds_bos(backend, special.get("bos_token")), (), None, None)
