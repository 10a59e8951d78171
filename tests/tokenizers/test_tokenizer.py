import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import sentencepiece
import tokenizers

from mutualrl.tokenizers.byte_table import byte_level_alphabet
from mutualrl.tokenizers.tokenizer import Tokenizer

TEXTS = (
    "", " ", "  ", "\n", "a", " a", "a ", "a  b   c", "\t\tx\r\ny\n\n",
    "🙂👩‍👩‍👧‍👦", "你好，世界", "é e\u0301", "x² ① ﬁ",
    "the word 'social'", "hello !", "<|im_end|><|im_start|>user", "<s>a</s><unk><pad>", "▁a▁ ▁▁b",
    "<0x41><0x0A>", "<think>so</think>",
    "\x00\x7f\u200b\u2028", "What is 12 + 34? The answer is 46.",
)  # fmt: skip
EXACT = ("chatml", "spm_bpe", "spm_unigram")


@pytest.fixture
def load(request):
    return lambda name, **options: Tokenizer.load(request.getfixturevalue(name), **options)


@pytest.mark.parametrize("name", EXACT)
def test_bytes_round_trip(load, name):
    tokenizer = load(name)
    assert (tokenizer.lossless, tokenizer.loss_reason) == (True, "")
    assert len(tokenizer.token_bytes) == tokenizer.size
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert b"".join(tokenizer.token_bytes[i] for i in ids) == tokenizer.bytes_of(ids) == text.encode()
        assert tokenizer.decode(ids) == text
        assert not tokenizer.control_ids.intersection(ids)


@pytest.mark.parametrize("name", EXACT)
def test_bytes_of_random_ids_come_back(load, name):
    tokenizer, rng = load(name), random.Random(1)
    done = 0
    for _ in range(300):
        data = tokenizer.bytes_of(rng.randrange(tokenizer.size) for _ in range(rng.randint(1, 12)))
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        assert tokenizer.bytes_of(tokenizer.encode(text)) == data
        done += 1
    assert done > 20


@pytest.mark.parametrize("name", ["spm_bpe", "spm_unigram"])
def test_sentencepiece_agrees_with_its_own_library(load, request, name):
    """The prompt side has the dummy prefix and the ids of the library; the plain text side has no prefix."""
    tokenizer = load(name)
    file = request.getfixturevalue(name) / "tokenizer.model"
    reference = sentencepiece.SentencePieceProcessor(model_file=str(file))
    for text in ("the quick brown fox", "What is 12 + 34?", "café 🙂 unseen: ß", "a  b"):
        assert tokenizer.prompt(text) == [reference.bos_id(), *reference.encode(text)]
    assert tokenizer.token_bytes[tokenizer.encode("the")[0]][:1] == b"t"
    assert Tokenizer.load(file).encode(TEXTS[-1]) == tokenizer.encode(TEXTS[-1])


@pytest.mark.parametrize("name, word", [("word_piece", "case"), ("spm_nmt", "NFKC")])
def test_lossy_ones_say_so(load, name, word):
    tokenizer = load(name)
    assert not tokenizer.lossless
    assert word in tokenizer.loss_reason


def test_restrictions_that_are_no_losses(load):
    assert (load("nfc").lossless, load("nfc").loss_reason) == (True, "exact for NFC text")
    chars = load("char_level")
    assert (chars.lossless, chars.loss_reason) == (True, "exact for text over its own alphabet")
    assert chars.decode(chars.encode("ab 12=3\n")) == "ab 12=3\n"
    assert chars.stop_ids == (0,) and chars.pad_id == 1 and chars.size == 45


def test_byte_level_alphabet():
    alphabet = byte_level_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert set(alphabet) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["A"]) == (0x20, 0x0A, 0x41)


def test_split_character(load):
    """Decoding token by token would give replacement characters."""
    tokenizer = load("chatml")
    ids = [tokenizer.token_bytes.index(bytes([b])) for b in "😀".encode()]
    assert tokenizer.decode(ids) == "😀"
    assert tokenizer.decode(ids[:2]) == "\ufffd"
    assert tokenizer.bytes_of(ids[:2]) == "😀".encode()[:2]


def test_ids_outside_the_vocabulary_have_no_text(load):
    tokenizer = load("chatml")
    ids = tokenizer.encode("ok")
    assert tokenizer.decode([*ids, tokenizer.size, 10**6, -1]) == "ok"


def test_think_tags_stay_and_turn_markers_go(load):
    tokenizer = load("chatml")
    ids = tokenizer._prompts.encode("<|im_start|><think>so</think>yes<|im_end|><|endoftext|>").ids
    assert tokenizer.decode(ids) == "<think>so</think>yes"
    # A peer's think tag becomes this model's own; its turn markers stay text.
    (tag,) = tokenizer.encode("<think>")
    assert tokenizer.token_bytes[tag] == b"<think>"
    assert len(tokenizer.encode("<|im_end|>")) > 1


def test_stop_ids_are_the_union(load):
    llama3 = load("llama3")
    assert llama3.stop_ids == (128001, 128008, 128009)
    assert llama3.eot_id == 128009
    assert llama3.pad_id == 128004  # A list; the first.
    chatml = load("chatml")
    names = [chatml._prompts.token_to_id(t) for t in ("<|endoftext|>", "<|im_end|>")]
    assert chatml.stop_ids == tuple(sorted(names))
    assert chatml.eot_id == names[1]


def test_ids_may_be_lists(chatml):
    (chatml / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    (chatml / "config.json").write_text(json.dumps({"pad_token_id": [7], "text_config": {"eos_token_id": [5, 6]}}))
    tokenizer = Tokenizer.load(chatml)
    assert tokenizer.pad_id == 7
    assert {5, 6} < set(tokenizer.stop_ids)


def test_no_stop_id_is_an_error(tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="no stop id"):
        Tokenizer.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        Tokenizer.load(tmp_path / "absent")


def test_one_bos(load):
    want = [128000, 128006, 882, 128007, 271, 1985, 128009, 128006, 78191, 128007, 271]
    assert load("llama3").prompt("test") == want


def test_plain_prompt_has_the_default_bos(load):
    assert load("llama3", template="{question}").prompt("test") == [128000, 1985]
    chatml = load("chatml", template="Q: {question}\nA:")
    assert chatml.decode(chatml.prompt("\\boxed{1}")) == "Q: \\boxed{1}\nA:"
    assert not chatml.has_chat_template and chatml.bos_id is None
    assert chatml.decode(chatml.prompt("x", system="Be brief.")) == "Be brief.\n\nQ: x\nA:"
    assert chatml.decode(load("chatml", template="{question}", system="S").prompt("x")) == "S\n\nx"
    with pytest.raises(ValueError, match="{question}"):
        load("chatml", template="no place")


def with_template(folder, template):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return Tokenizer.load(folder)


REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
DROPS = "{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}"


@pytest.mark.parametrize("head", [REFUSES, DROPS])
def test_system_turn_is_folded_into_the_user_turn(load, chatml, head):
    body = json.loads((chatml / "tokenizer_config.json").read_text())["chat_template"]
    keeps, folds = load("chatml"), with_template(chatml, head + body)
    assert keeps.decode(keeps.prompt("q", "sys"), control=True) == (
        "<|im_start|>system\nsys<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    )
    assert folds.decode(folds.prompt("q", "sys"), control=True) == (
        "<|im_start|>user\nsys\n\nq<|im_end|>\n<|im_start|>assistant\n"
    )


def test_turns_that_are_rewritten_later(load, chatml):
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>so</think>yes"},
        {"role": "user", "content": "r"},
    ]
    assert load("chatml").rewritten_turn(turns) is None
    template = (
        "{% for m in messages %}{% set c = m.content %}"
        "{% if m.role == 'assistant' and not loop.last %}{% set c = c.split('</think>')[-1] %}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = with_template(chatml, template)
    assert tokenizer.rewritten_turn(turns) == 1
    assert tokenizer.rewritten_turn(turns[:2]) is None


def test_chat_without_a_template(load):
    tokenizer = load("chatml", template="Q: {question}\nA:")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b"}, {"role": "user", "content": "c"}]
    ids = tokenizer.chat(turns)
    assert ids.count(tokenizer.eot_id) == 1
    assert tokenizer.decode(ids) == "Q: a\nA: bQ: c\nA:"
    assert tokenizer.rewritten_turn(turns) is None


def test_ids_containing(load):
    tokenizer = load("chatml")
    found = tokenizer.ids_containing("\n")
    assert found.dtype == bool and found.shape == (tokenizer.size,)
    assert list(np.flatnonzero(found)) == [i for i, b in enumerate(tokenizer.token_bytes) if b"\n" in b]
    assert found.sum() > 1


def test_threads_give_the_results_of_one(load):
    tokenizer = load("chatml")
    texts = [text * k for text in TEXTS for k in range(1, 6)]

    def work(text):
        ids = tokenizer.encode(text)
        return ids, tokenizer.decode(ids), tokenizer.prompt(text)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, texts * 3)) == [work(text) for text in texts] * 3


def test_files_that_cut_and_pad(chatml):
    """A tokenizer.json may carry cutting and padding from its training."""
    backend = tokenizers.Tokenizer.from_file(str(chatml / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(chatml / "tokenizer.json"))
    tokenizer = Tokenizer.load(chatml)
    assert tokenizer.decode(tokenizer.encode(TEXTS[-1])) == TEXTS[-1]
    assert len(tokenizer.encode("a")) == 1
    assert tokenizer.decode(tokenizer.prompt(TEXTS[-1])) == f"user\n{TEXTS[-1]}\nassistant\n"


@pytest.mark.parametrize("name", [*EXACT, "llama3", "char_level"])
def test_saved_folder_is_the_same_tokenizer(load, tmp_path, name):
    from transformers import AutoTokenizer

    first = load(name)
    first.save(tmp_path / "saved")
    second = Tokenizer.load(tmp_path / "saved")
    for field in ("size", "bos_id", "pad_id", "stop_ids", "eot_id", "control_ids", "lossless", "token_bytes"):
        assert getattr(first, field) == getattr(second, field), field
    for text in TEXTS:
        assert first.encode(text) == second.encode(text)
        assert first.prompt(text) == second.prompt(text)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (
        theirs.encode("the test", add_special_tokens=False)
        == first._prompts.encode("the test", add_special_tokens=False).ids
    )


def test_imports_neither_jax_nor_torch():
    code = (
        "import sys, mutualrl.tokenizers.tokenizer, mutualrl.tokenizers.from_gguf;"
        "print({'jax', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("template", [None, "Question: {question}\nAnswer:"])
def test_control_tokens_spelt_in_a_question_are_text(chatml, template):
    tokenizer = Tokenizer.load(chatml, template=template)
    plain, odd = (tokenizer.prompt(q) for q in ("2 + 2?", "2 <|im_end|> + <|endoftext|> 2?"))
    assert tokenizer.decode(odd).count("2 <|im_end|> + <|endoftext|> 2?") == 1  # its bytes are there, as text
    count = lambda ids: [ids.count(i) for i in sorted(tokenizer.control_ids)]
    assert count(odd) == count(plain)  # and no control token more than the template's own


def test_only_the_stretch_with_a_spelt_control_token_is_encoded_apart(chatml):
    """The template's own tokens stay; so does every stretch between them, white space of the template included."""
    tokenizer = Tokenizer.load(chatml)
    start, end = (tokenizer._prompts.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>"))
    odd = "say <|im_end|> \ue000 \ue0000\ue001 <think>"
    turns = [("system", "s"), ("user", odd), ("assistant", f"{odd}</think>"), ("user", "r")]
    ids = tokenizer.chat([{"role": role, "content": content} for role, content in turns])
    break_ = tokenizer.encode("\n")
    want = [i for turn in turns for i in (start, *tokenizer.encode("\n".join(turn)), end, *break_)]
    assert ids == [*want, start, *tokenizer.encode("assistant\n")]
    # The prompt's own encoding, in one piece, wherever nothing is spelt out.
    ordinary = "<think> 2  +\n2?</think> 🙂 \ue000"
    assert (
        tokenizer.prompt(ordinary)
        == tokenizer._prompts.encode(
            f"<|im_start|>user\n{ordinary}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
        ).ids
    )
    plain = Tokenizer.load(chatml, template="<|im_start|>{question}<|im_end|>")
    assert plain.prompt(odd, system="<|im_end|>") == [
        *tokenizer.encode("<|im_end|>\n\n"), start, *tokenizer.encode(odd), end
    ]  # fmt: skip


def with_special(folder, token):
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([token])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder, template="{question}"), backend.token_to_id(token)


def test_special_tokens_that_control_nothing_are_text_in_a_question(chatml):
    tokenizer, hole = with_special(chatml, "<|fim_prefix|>")
    assert hole not in tokenizer.control_ids
    assert tokenizer.prompt("a <|fim_prefix|>") == tokenizer.encode("a <|fim_prefix|>")
    assert hole not in tokenizer.prompt("a <|fim_prefix|>")


def test_ids_beyond_the_vocabulary_are_counted(chatml):
    """Tokenizers of text models may carry tokens that only their multimodal relatives have rows for."""
    tokenizer, image = with_special(chatml, "<image_soft_token>")
    assert tokenizer.size == len(tokenizer.token_bytes) == image + 1


@pytest.mark.parametrize(
    "file, text, told",
    [
        ("tokenizer.json", "{", "tokenizer.json holds no tokenizer that can be read"),
        ("tokenizer.json", '{"model": 5}', "tokenizer.json holds no tokenizer that can be read"),
        ("tokenizer_config.json", "{'a': 1}", "tokenizer_config.json is no JSON"),
        ("config.json", "[]", "config.json holds no JSON object but a list"),
        (
            "chat_template.jinja",
            "{% for m in messages %}{{ m.content }}",
            "the chat template of chatml fails: .*endfor",
        ),
        ("chat_template.jinja", "{{ messages[7].content + 1 }}", "the chat template of chatml fails"),
        ("chat_template.jinja", "{{ raise_exception('no users') }}", "the chat template of chatml fails: no users"),
    ],
)
def test_files_that_cannot_be_read_are_refused_in_one_line(chatml, file, text, told):
    (chatml / file).write_text(text)
    with pytest.raises(ValueError, match=told) as e:
        Tokenizer.load(chatml)
    assert "\n" not in str(e.value)


def test_a_broken_sentencepiece_model_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="tokenizer.model holds no tokenizer that can be read"):
        Tokenizer.load(tmp_path / "tokenizer.model")


def test_a_dropped_system_turn_is_noticed_though_the_question_repeats_it(chatml):
    body = "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
    template = "{% for message in messages if message['role'] != 'system' %}" + body + "{% endfor %}"
    with_template(chatml, template)
    text = Tokenizer.load(chatml).decode(Tokenizer.load(chatml).prompt("Think hard: what?", system="Think"))
    assert "Think\n\nThink hard: what?" in text
