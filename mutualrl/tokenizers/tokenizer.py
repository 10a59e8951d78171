"""One tokenizer of a policy: text to ids, ids to bytes, prompts, stop ids.

What is encoded here is plain text: control tokens are never parsed out of it, nothing is cleaned up, no prefix space
is added. Only `prompt` and `chat`, which write the policy's own template, recognise control tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers

from mutualrl.tokenizers import byte_table, chat
from mutualrl.tokenizers.byte_table import BYTE_PIECE, MARKER, SENTENCEPIECE, SPACE_MARK, TAG
from mutualrl.tokenizers.losses import losses_of
from mutualrl.tokenizers.sources import Source, open_source

PLAIN = "{question}"
CONTROL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token")


class Tokenizer:
    """A tokenizer with an exact id → bytes table. Safe to use from several threads: nothing is changed after loading.

    Attributes:
      name: folder, file or hub name.
      size: number of real ids; a model's head may be padded to more, and ids >= size must never be sampled.
      bos_id: id of the BOS, or None.
      pad_id: id to pad with; may equal a stop id (masks never come from ids).
      stop_ids: sorted union of the ids that generation_config.json, config.json and the tokenizer call an end.
      eot_id: the stop id that ends an assistant turn; appended to re-encoded peer text.
      control_ids: BOS, EOS, stop, pad, unknown and turn markers: ids without bytes. Other special tokens stand for
        text (`<think>`) and have their literal bytes.
      lossless: no text is altered by encoding it, except as `loss_reason` says. Two restrictions leave a tokenizer
        lossless, because they can be seen on the text itself and a round trip check catches them: an NFC normaliser
        (exact for NFC text), and a closed alphabet (exact for text over it). Case folding, dropped accents or spaces
        and compatibility normalisation do not: they alter ordinary text.
      loss_reason: what is altered or restricted; empty if nothing is.
      token_bytes: the bytes of every id, list of length size; b"" for control ids and for ids that name no token.
      has_chat_template: `prompt` writes a chat template (and not a plain one).
    """

    def __init__(self, source: Source, *, template: str | None = None, system: str | None = None):
        """Use `Tokenizer.load`.

        Raises:
          ValueError: no stop id, a `template` without {question}, or a chat template that cannot write a user's and an
            assistant's turn.
        """
        if template is not None and PLAIN not in template:
            raise ValueError(f"the plain template of {source.name} has no {PLAIN}: {template!r}")
        self.name = source.name
        self._system, self._template = system, template
        self._chat_template, self._special, self._adds_bos = source.chat_template, source.special, source.adds_bos
        self._prompts = source.backend
        self._prompts.no_padding()
        self._prompts.no_truncation()
        self._spec = spec = json.loads(self._prompts.to_str())
        ids = {key: self._prompts.token_to_id(token) for key, token in source.special.items()}
        self.bos_id: int | None = ids.get("bos_token")
        self.size = max([*byte_table.vocabulary(spec), *byte_table.added(spec)], default=-1) + 1
        # A BERT-like tokenizer has no EOS; its separator ends a text.
        own_eos = ids.get("eos_token", ids.get("sep_token"))
        stops = {*source.stop_ids, *([] if own_eos is None else [own_eos])}
        self.stop_ids = tuple(sorted(i for i in stops if 0 <= i < self.size))
        if not self.stop_ids:
            raise ValueError(f"{self.name} names no stop id: set eos_token in tokenizer_config.json")
        pad = ids.get("pad_token") if ids.get("pad_token") is not None else source.pad_id
        self.pad_id = pad if pad is not None and pad < self.size else self.stop_ids[0]
        named = {i for key, i in ids.items() if key in CONTROL_NAMES and i is not None}
        self.control_ids = frozenset({*named, *self.stop_ids, self.pad_id, *self._markers()})
        self.eot_id = self._turn_end(own_eos)
        self.token_bytes = byte_table.bytes_table(spec, self.control_ids)
        plain = byte_table.plain_text_spec(spec, self.control_ids)
        self._text = tokenizers.Tokenizer.from_str(json.dumps(plain))
        self._text.encode_special_tokens = True
        spelt_out = {entry["content"] for entry in byte_table.added(plain).values() if entry["special"]} - {""}
        self._control = re.compile("|".join(map(re.escape, sorted(spelt_out, key=len, reverse=True))) or "(?!)")
        self._by_bytes, self._breaks = self._awkward_strings()
        self.lossless, self.loss_reason = losses_of(self)

    @classmethod
    def load(cls, source: str | Path, *, template: str | None = None, system: str | None = None) -> Tokenizer:
        """Loads a Hugging Face folder, a hub id, a `.gguf` file, or a SentencePiece `.model` file (or its folder).

        Args:
          source: path or hub id; with HF_HUB_OFFLINE=1 only the local hub cache is asked.
          template: plain prompt with {question} in it (e.g. few-shot); replaces the chat template.
          system: system text of every prompt that is not given another one.

        Raises:
          ValueError: the source is no tokenizer that can be read; FileNotFoundError: there is nothing.
        """
        return cls(open_source(source), template=template, system=system)

    @property
    def has_chat_template(self) -> bool:
        return self._template is None and self._chat_template is not None

    # ---- text <-> ids

    def encode(self, text: str) -> list[int]:
        """The ids of a plain text; their bytes concatenate to the text's UTF-8 bytes (see `lossless`)."""
        if self._breaks is not None:
            parts = self._breaks.split(text)
            if len(parts) > 1:
                return [i for part in parts for i in (self._by_bytes.get(part) or self._text_ids(part))]
        return self._text_ids(text)

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """The bytes of a run of ids. Control ids and ids outside the vocabulary have none."""
        table, size = self.token_bytes, self.size
        return b"".join([table[i] for i in ids if 0 <= i < size])

    def decode(self, ids: Iterable[int], control: bool = False) -> str:
        """The text of a run of ids as a whole; broken UTF-8 (a run cut inside a character) becomes U+FFFD.

        With `control`, control ids are shown by their names: for logs, never for graders or peers.
        """
        if control:
            names = {i: (self._prompts.id_to_token(i) or "").encode() for i in self.control_ids}
            data = b"".join(names.get(i) or self.bytes_of([i]) for i in ids)
        else:
            data = self.bytes_of(ids)
        return data.decode("utf-8", errors="replace")

    def ids_containing(self, text: str) -> np.ndarray:
        """bool[size]: the ids whose bytes contain `text`, e.g. the tokens with a line break in them."""
        part = text.encode()
        return np.array([part in b for b in self.token_bytes], dtype=bool)

    # ---- prompts

    def prompt(self, question: str, system: str | None = None) -> list[int]:
        """The ids of a prompt that asks `question`, up to where the completion starts. Never cut to a length.

        With a chat template: a user turn (after a system turn if there is a system text) and the generation prompt.
        Otherwise the plain template, the system text in front of it. A prompt starts with exactly one BOS if the
        template writes one or if the tokenizer's default encoding of a text adds one, and with none otherwise.
        """
        system = self._system if system is None else system
        messages = [{"role": "system", "content": system}] if system else []
        return self.chat([*messages, {"role": "user", "content": question}])

    def chat(self, messages: Sequence[chat.Message]) -> list[int]:
        """The ids of a conversation of {'role', 'content'} turns; the assistant's turn is opened unless it was last.

        Without a chat template every user turn is written with the plain template and every assistant turn as its
        text followed by `eot_id`. BOS as in `prompt`. Control tokens belong to the template: spelt in a message they
        are ordinary text.
        """
        messages, hidden = self._hide_control(messages)
        opened = not messages or messages[-1]["role"] != "assistant"
        if self.has_chat_template:
            text = chat.render(self._chat_template, messages, self._special, opened)
            return self._one_bos(self._prompt_ids(text, hidden))
        ids: list[int] = []
        lead = ""
        for message in messages:
            if message["role"] == "assistant":
                ids += [*self.encode(message["content"].translate(hidden)), self.eot_id]
            elif message["role"] == "system":
                lead = message["content"] + "\n\n"
            else:
                text = lead + (self._template or PLAIN).replace(PLAIN, message["content"])
                ids += self._prompt_ids(text, hidden)
                lead = ""
        return self._one_bos(ids)

    def rewritten_turn(self, messages: Sequence[chat.Message]) -> int | None:
        """Index of the first assistant turn whose ids a later turn changes, or None.

        Some templates drop the reasoning of earlier replies. Then turn n is no prefix of turn n + 1, and the
        conversation cannot be trained on as one row.
        """
        ends = [k for k, m in enumerate(messages) if m["role"] == "assistant"]
        runs = [self.chat(messages[: k + 1]) for k in ends] + [self.chat(messages)]
        for k, shorter, longer in zip(ends, runs, runs[1:]):
            if longer[: len(shorter)] != shorter:
                return k
        return None

    def save(self, folder: str | Path) -> None:
        """Writes a Hugging Face folder: tokenizer.json, tokenizer_config.json, the chat template and the stop ids.

        The stop ids go into generation_config.json; what else that file holds is kept.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "add_bos_token": self._adds_bos,
            **self._special,
        }
        config.setdefault("pad_token", self._prompts.id_to_token(self.pad_id))
        _write_json(folder / "tokenizer.json", self._spec)
        _write_json(folder / "tokenizer_config.json", config)
        if self._chat_template is not None:
            (folder / "chat_template.jinja").write_text(self._chat_template, encoding="utf-8")
        path = folder / "generation_config.json"
        generation = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        ids = {"bos_token_id": self.bos_id, "eos_token_id": list(self.stop_ids), "pad_token_id": self.pad_id}
        _write_json(path, generation | ids)

    # ---- inside

    def _hide_control(self, messages: Sequence[chat.Message]) -> tuple[list[chat.Message], dict[int, str]]:
        """The messages with each control token spelt in them as one private-use character, and what those stand for."""
        texts = [m["content"] for m in messages]
        found = sorted({token for text in texts for token in self._control.findall(text)})
        free = (c for c in range(0xE000, 0xF900) if not any(chr(c) in text for text in texts)) if found else ()
        hidden = dict(zip(free, found))
        marks = {token: chr(c) for c, token in hidden.items()}
        hide = lambda text: self._control.sub(lambda m: marks[m.group()], text)
        return [{**m, "content": hide(text)} for m, text in zip(messages, texts)], hidden

    def _prompt_ids(self, text: str, hidden: dict[int, str]) -> list[int]:
        """The ids of a written template.

        It is encoded in one piece, but for the stretches between control tokens that have something hidden in them:
        those are plain text.
        """
        ids: list[int] = []
        joint = ""
        for part in re.split(f"({self._control.pattern})", text) if hidden else [text]:
            plain = part.translate(hidden)
            if plain == part:
                joint += part
                continue
            ids += [*self._prompts.encode(joint, add_special_tokens=False).ids, *self.encode(plain)]
            joint = ""
        return ids + self._prompts.encode(joint, add_special_tokens=False).ids

    def _text_ids(self, text: str) -> list[int]:
        return self._text.encode(text, add_special_tokens=False).ids if text else []

    def _one_bos(self, ids: list[int]) -> list[int]:
        bos = self.bos_id
        if bos is None:
            return ids
        start = 0
        while start < len(ids) and ids[start] == bos:
            start += 1
        return [bos] * (start > 0 or self._adds_bos) + ids[start:]

    def _markers(self) -> set[int]:
        """Added tokens that mark turns: by the names of the published families, and by what the template writes."""
        added = byte_table.added(self._spec)
        # `<s>` is a BOS here and the HTML tag for struck text there; only the flag tells.
        marks = {
            i
            for i, entry in added.items()
            if MARKER.search(entry["content"]) and (entry["special"] or entry["content"] not in ("<s>", "</s>"))
        }
        if self._chat_template is not None:
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
            try:
                texts = [chat.render(self._chat_template, turns[:k], self._special, k == 1) for k in (1, 2)]
            except Exception as error:  # jinja2's, and whatever the expressions of a template raise
                raise ValueError(f"the chat template of {self.name} fails: {' '.join(str(error).split())}") from error
            for text in texts:
                for i in self._prompts.encode(text, add_special_tokens=False).ids:
                    if i in added and added[i]["special"] and not TAG.fullmatch(added[i]["content"]):
                        marks.add(i)
        return marks

    def _turn_end(self, own_eos: int | None) -> int:
        """The first stop id that the template writes after an assistant's text; else the tokenizer's own EOS."""
        if self.has_chat_template:
            turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "§"}]
            text = chat.render(self._chat_template, turns, self._special, False)
            for i in self._prompts.encode(text.rpartition("§")[2], add_special_tokens=False).ids:
                if i in self.stop_ids:
                    return i
        return own_eos if own_eos in self.stop_ids else self.stop_ids[0]

    def _awkward_strings(self) -> tuple[dict[str, list[int]], re.Pattern | None]:
        """Strings that a SentencePiece vocabulary would take for something else than their own bytes.

        The space mark typed as such is spelt in byte pieces. A unigram model would also find control and byte pieces
        in the text; breaking the text behind their first character prevents it.
        """
        if byte_table.writing(self._spec) != SENTENCEPIECE:
            return {}, None
        vocab = byte_table.vocabulary(self._spec)
        pieces = {int(m[1], 16): i for i, t in vocab.items() if (m := BYTE_PIECE.fullmatch(t))}
        mark = [pieces.get(b) for b in SPACE_MARK.encode()]
        spelt = {} if None in mark else {SPACE_MARK: mark}
        patterns = [f"({re.escape(SPACE_MARK)})"] if spelt else []
        if self._spec["model"]["type"] == "Unigram":
            names = [vocab[i] for i in self.control_ids | set(pieces.values()) if i in vocab and len(vocab[i]) > 1]
            patterns += [f"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in names]
        return spelt, re.compile("|".join(patterns)) if patterns else None


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
