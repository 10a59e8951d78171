"""Tokenizers written into GGUF files and read back."""

import json

import gguf
import pytest
import sentencepiece

from mutualrl.tokenizers.from_gguf import PRE_TOKENIZERS
from mutualrl.tokenizers.tokenizer import Tokenizer

TEXTS = (
    "", "the quick brown fox", "What is 12 + 34? It is 46.", "  a   b\n\n\tc\r\n", "🙂 你好 e\u0301 ß",
    "<|im_end|> <s> ▁ <0x41>", "<think>so</think>",
)  # fmt: skip


def write(path, **meta):
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in meta.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        add.get(type(value), writer.add_array)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_meta(folder):
    spec = json.loads((folder / "tokenizer.json").read_text())
    ids = {i: t for t, i in spec["model"]["vocab"].items()} | {a["id"]: a["content"] for a in spec["added_tokens"]}
    tags = {a["id"] for a in spec["added_tokens"] if "think" in a["content"]}
    special = {a["id"] for a in spec["added_tokens"]} - tags
    tokens = [ids[i] for i in range(len(ids))]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3 if i in special else 4 if i in tags else 1 for i in range(len(tokens))],
        "merges": [" ".join(pair) for pair in spec["model"]["merges"]],
        "eos_token_id": tokens.index("<|im_end|>"),
        "padding_token_id": tokens.index("<|endoftext|>"),
        "chat_template": json.loads((folder / "tokenizer_config.json").read_text())["chat_template"],
    }


def test_byte_level(chatml, tmp_path):
    """The same tokenizer as the folder it was made from, stop ids and template included."""
    folder, file = Tokenizer.load(chatml), Tokenizer.load(write(tmp_path / "m.gguf", **byte_level_meta(chatml)))
    for field in ("size", "bos_id", "pad_id", "stop_ids", "eot_id", "control_ids", "lossless", "token_bytes"):
        assert getattr(folder, field) == getattr(file, field), field
    for text in TEXTS:
        assert folder.encode(text) == file.encode(text)
        assert folder.prompt(text) == file.prompt(text)
    file.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").token_bytes == file.token_bytes


def test_rows_that_pad_the_embedding_are_no_ids(chatml, tmp_path):
    meta = byte_level_meta(chatml)
    size = len(meta["tokens"])
    meta["tokens"] += ["[PAD1]", "[PAD2]"]
    meta["token_type"] += [5, 5]
    assert Tokenizer.load(write(tmp_path / "m.gguf", **meta)).size == size


def test_bos_setting(chatml, tmp_path):
    meta = byte_level_meta(chatml)
    del meta["chat_template"]
    bos = meta["bos_token_id"] = meta["tokens"].index("<|endoftext|>")
    without = Tokenizer.load(write(tmp_path / "a.gguf", **meta)).prompt("a")
    assert Tokenizer.load(write(tmp_path / "b.gguf", add_bos_token=True, **meta)).prompt("a") == [bos, *without]
    meta["pre"] = "llama-bpe"
    assert Tokenizer.load(write(tmp_path / "c.gguf", **meta)).prompt("a")[0] == bos


def test_sentencepiece(spm_bpe, tmp_path):
    """Merges rebuilt from tokens and scores give the library's ids."""
    reference = sentencepiece.SentencePieceProcessor(model_file=str(spm_bpe / "tokenizer.model"))
    ids = range(reference.vocab_size())

    def kind(i):
        return 2 if reference.is_unknown(i) else 3 if reference.is_control(i) else 6 if reference.is_byte(i) else 1

    meta = {
        "model": "llama",
        "pre": "default",
        "tokens": [reference.id_to_piece(i) for i in ids],
        "scores": [float(reference.get_score(i)) for i in ids],
        "token_type": [kind(i) for i in ids],
        "bos_token_id": reference.bos_id(),
        "eos_token_id": reference.eos_id(),
        "unknown_token_id": reference.unk_id(),
    }
    folder = Tokenizer.load(spm_bpe)
    prefixed = Tokenizer.load(write(tmp_path / "a.gguf", **meta))
    bare = Tokenizer.load(write(tmp_path / "b.gguf", add_space_prefix=False, add_bos_token=False, **meta))
    for text in TEXTS:
        assert prefixed.encode(text) == bare.encode(text) == folder.encode(text)
        assert prefixed.decode(prefixed.encode(text)) == text
    for text in TEXTS[1:3]:
        assert prefixed.prompt(text) == [reference.bos_id(), *reference.encode(text)]
        assert bare.prompt(text) == bare.encode(text)


def test_user_defined_pieces_come_before_merges(tmp_path):
    """Runs of spaces are taken out of the text first, whatever score they have."""
    tokens = ["<unk>", "<s>", "</s>", "a", "▁", "▁a", "  ", *(f"<0x{b:02X}>" for b in range(256))]
    kinds = [2, 3, 3, 1, 1, 1, 4, *[6] * 256]
    scores = [0.0, 0.0, 0.0, -9.0, -9.0, -1.0, -1000.0, *[0.0] * 256]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    meta = dict(model="llama", tokens=tokens, scores=scores, token_type=kinds, **ids)
    tokenizer = Tokenizer.load(write(tmp_path / "m.gguf", **meta))
    assert tokenizer.encode("a  a a") == [3, 6, 3, 5]
    assert tokenizer.token_bytes[6] == b"  "


def test_what_is_not_understood_is_refused_by_name(chatml, tmp_path):
    meta = byte_level_meta(chatml)
    with pytest.raises(ValueError, match="tokenizer.ggml.pre 'tekken' is not supported; allowed: gpt-2"):
        Tokenizer.load(write(tmp_path / "a.gguf", **{**meta, "pre": "tekken"}))
    with pytest.raises(ValueError, match="tokenizer.ggml.model 'bert' is not supported"):
        Tokenizer.load(write(tmp_path / "b.gguf", **{**meta, "model": "bert"}))
    with pytest.raises(ValueError, match="holds no tokenizer"):
        Tokenizer.load(write(tmp_path / "c.gguf", model="gpt2"))
    for name, broken in (("d", {"merges": ["no such"]}), ("e", {"model": "llama"})):
        with pytest.raises(ValueError, match=f"{name}.gguf holds no tokenizer that can be read") as e:
            Tokenizer.load(write(tmp_path / f"{name}.gguf", **{**meta, **broken}))
        assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_pre_tokenizers_lose_nothing(name):
    text = "I'LL say: 12345 x_1's\n\n  fooBar ÄÖ 你好!?/\n\t ok  "
    parts = [text[a:b] for _, (a, b) in PRE_TOKENIZERS[name]().pre_tokenize_str(text)]
    assert "".join(parts) == text
    digits = [part for part in parts if part.strip().isdigit()]
    assert digits == {
        "smollm": ["1", "2", "3", "4", "5", "1"], "qwen2": ["1", "2", "3", "4", "5", "1"],
        "llama-bpe": ["123", "45", "1"], "gpt-4o": ["123", "45", "1"], "gpt-2": [" 12345", "1"],
    }.get(name, digits)  # fmt: skip
