"""Small tokenizers of every kind, trained on the spot."""

import json

import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog and then some more words follow",
    "What is 12 + 34? The answer is 46, of course. What is 7 * 8? It is 56.",
    "def f(x):\n    return x ** 2\n\nprint(f(3))\n",
    "Ünïcödé café naïve — 你好 世界 🙂🚀 привет мир",
] * 20
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write(folder, tokenizer, tokenizer_config, **files):
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def byte_bpe(specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>"), tags=("<think>", "</think>")):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([*specials, *tags])
    return tokenizer


@pytest.fixture
def chatml(tmp_path):
    """Byte-level BPE with a ChatML template; every id file names another stop id; all tags are special."""
    tokenizer = byte_bpe()
    text, end = (tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|im_end|>"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML}
    return write(
        tmp_path / "chatml", tokenizer, config, config={"eos_token_id": text}, generation_config={"eos_token_id": [end]}
    )


@pytest.fixture
def char_level(tmp_path):
    """One id per character of a closed alphabet, as a small demonstration policy has it."""
    vocab = {
        c: i for i, c in enumerate(["<eos>", "<pad>", "<unk>", *"0123456789+-*=\n ", *"abcdefghijklmnopqrstuvwxyz"])
    }
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.add_special_tokens(["<eos>", "<pad>", "<unk>"])
    config = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return write(tmp_path / "chars", tokenizer, config)


@pytest.fixture
def nfc(tmp_path):
    tokenizer = byte_bpe()
    tokenizer.normalizer = normalizers.NFC()
    return write(tmp_path / "nfc", tokenizer, {"eos_token": "<|im_end|>"})


@pytest.fixture
def word_piece(tmp_path):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[SEP]", "[PAD]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return write(tmp_path / "wordpiece", tokenizer, {"sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"})


def sentencepiece_model(folder, kind, **options):
    folder.mkdir(exist_ok=True)
    (folder / "corpus.txt").write_text("\n".join(line for text in CORPUS for line in text.splitlines()))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        model_type=kind,
        minloglevel=2,
        **{
            "vocab_size": 400,
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            "hard_vocab_limit": False,
            **options,
        },
    )
    (folder / "corpus.txt").unlink()
    (folder / "tokenizer.vocab").unlink()
    return folder


@pytest.fixture
def spm_bpe(tmp_path):
    return sentencepiece_model(tmp_path / "spm-bpe", "bpe")


@pytest.fixture
def spm_unigram(tmp_path):
    return sentencepiece_model(tmp_path / "spm-unigram", "unigram")


@pytest.fixture
def spm_nmt(tmp_path):
    """SentencePiece's defaults: NFKC, spaces squeezed, no byte pieces."""
    options = dict(normalization_rule_name="nmt_nfkc", remove_extra_whitespaces=True, byte_fallback=False)
    return sentencepiece_model(tmp_path / "spm-nmt", "unigram", vocab_size=120, **options)


@pytest.fixture
def llama3(tmp_path):
    """The part of Llama-3 that one prompt needs, with its real ids: template and post-processor both write a BOS."""
    vocab = {"user": 882, "assistant": 78191, "ĊĊ": 271, "test": 1985}
    marks = {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|start_header_id|>": 128006}
    marks |= {"<|end_header_id|>": 128007, "<|eom_id|>": 128008, "<|eot_id|>": 128009}
    tokenizer = Tokenizer(models.BPE(vocab | marks, [], ignore_merges=True))
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\s*[\r\n]+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(m, special=True) for m in marks])
    bos = "<|begin_of_text|>"
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 128000)])
    template = (
        "{% set loop_messages = messages %}{% for message in loop_messages %}"
        "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim"
        " + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    )
    config = {"bos_token": bos, "eos_token": "<|eot_id|>", "chat_template": template}
    return write(
        tmp_path / "llama3",
        tokenizer,
        config,
        config={"eos_token_id": [128001, 128008, 128009], "pad_token_id": [128004]},
        generation_config={"eos_token_id": [128001, 128009]},
    )
