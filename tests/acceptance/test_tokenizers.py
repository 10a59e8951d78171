"""Real tokenizers: every text comes back byte for byte, and the lossy ones say so."""

import functools
import glob
import json
import os
import pathlib
import random
import unicodedata

import pytest

from mutualrl.tokenizers.tokenizer import Tokenizer

SHARED = pathlib.Path(__file__).resolve().parents[2].parent / "shared"
LOSSLESS = ("deepseek-v4", "gpt-neox-olmo", "gpt2", "mistral-v3", "olmo2-dolma2-cl100k", "qwen2.5", "smollm2")
LOSSY = ("albert", "bert-base-uncased", "claude-legacy")
UNICODE = (
    "🙂👩‍👩‍👧‍👦🚀 ok", "é à ü ñ", "你好，世界。こんにちは 안녕", "नमस्ते", "مرحبا بالعالم", "שלום", "a\u200bb\ufeffc",
    "line\r\nline\r\r\n", "\t\tif x:\n\t\treturn", " lead", "trail ", "  two  spaces   three", "\n\n\n", " ", "", "   ",
    "<|im_end|><|im_start|>user\n", "<s>[INST] x [/INST]</s>", "<|endoftext|>", "<｜User｜>hi<｜end▁of▁sentence｜>",
    "▁typed▁mark", "<0x0A> <0xF0>", "<think>so</think>", "x²+y²≠①", "ﬁ Ａ …", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "\x00\x01\x7f",
    "the word 'social'", "hello !", "[TOOL_CALLS] <unk> <pad>", "\u2028\u2029\u00a0",
)  # fmt: skip

pytestmark = pytest.mark.skipif(not (SHARED / "tokenizers").is_dir(), reason="no ../shared/tokenizers")


@pytest.fixture(scope="module")
def texts():
    found = []
    for path in sorted(glob.glob(str(SHARED / "data" / "*.jsonl"))):
        with open(path, encoding="utf-8") as lines:
            for line in [next(lines, "") for _ in range(250)]:
                if line:
                    values = [v for v in json.loads(line).values() if isinstance(v, str)]
                    found.append(max(values, key=len, default=""))
    assert len(found) > 1000
    return found


@functools.cache
def load(name):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return Tokenizer.load(SHARED / "tokenizers" / name)


@pytest.mark.parametrize("name", LOSSLESS)
def test_round_trip(name, texts):
    tokenizer = load(name)
    assert tokenizer.lossless
    nfc_only = "NFC" in tokenizer.loss_reason
    for text in [*texts, *UNICODE]:
        want = unicodedata.normalize("NFC", text) if nfc_only else text
        ids = tokenizer.encode(text)
        assert tokenizer.bytes_of(ids) == want.encode(), (text, tokenizer.decode(ids))
        assert not tokenizer.control_ids.intersection(ids)
        assert all(tokenizer.token_bytes[i] for i in ids)
        assert tokenizer.decode(ids) == want


@pytest.mark.parametrize("name", LOSSLESS)
def test_random_ids(name):
    """The text of sampled ids, whatever they are, comes back from its own encoding."""
    tokenizer, rng = load(name), random.Random(0)
    checked = 0
    for _ in range(1500):
        ids = [rng.randrange(tokenizer.size) for _ in range(rng.randint(1, 30))]
        data = tokenizer.bytes_of(ids)
        assert data == b"".join(tokenizer.token_bytes[i] for i in ids)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        if "NFC" in tokenizer.loss_reason and not unicodedata.is_normalized("NFC", text):
            continue
        assert tokenizer.bytes_of(tokenizer.encode(text)) == data
        checked += 1
    assert checked > 300


@pytest.mark.parametrize("name", LOSSY)
def test_lossy_ones_say_so(name):
    tokenizer = load(name)
    assert not tokenizer.lossless
    assert tokenizer.loss_reason


def test_byte_tables_of_the_same_text():
    """`hi 😀!`: one emoji is one token here and two tokens there; the byte tables agree on where it ends."""
    for name, ids, ends in (("gpt2", [5303, 30325, 222, 0], [2, 6, 7, 8]), ("qwen2.5", [6023, 90316, 0], [2, 7, 8])):
        tokenizer = load(name)
        assert tokenizer.encode("hi 😀!") == ids
        assert [len(tokenizer.bytes_of(ids[: k + 1])) for k in range(len(ids))] == ends


def test_split_character_decodes_as_a_run():
    tokenizer = load("gpt2")
    assert tokenizer.decode([47249, 222]) == "\U0001f600"
    assert tokenizer.bytes_of([47249]) == b"\xf0\x9f\x98"


def test_clean_up_is_off():
    for name in LOSSLESS:
        tokenizer = load(name)
        for text in ("the word 'social'", "hello !", "do n't , he 's"):
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_above_the_range_have_no_text():
    tokenizer = load("qwen2.5")
    assert tokenizer.size == 151665
    assert tokenizer.decode([9707, 151900, 0]) == "Hello!"


def test_sentencepiece_file_alone(tmp_path):
    """The `.model` file and the `tokenizer.json` of one family agree."""
    full, alone = load("mistral-v3"), Tokenizer.load(SHARED / "tokenizers" / "mistral-v3" / "tokenizer.model")
    assert (alone.size, alone.bos_id, alone.stop_ids) == (full.size, full.bos_id, full.stop_ids)
    for text in UNICODE:
        assert alone.encode(text) == full.encode(text), text
