"""Two real models from GGUF files: launch/fetch_small_models.sh FOLDER, then MUTUALRL_SMALL_MODELS=FOLDER."""

import os
import pathlib

import numpy as np
import pytest

from mutualrl.models.gguf import GGUFSource
from mutualrl.tokenizers.from_gguf import PRE_TOKENIZERS
from mutualrl.tokenizers.tokenizer import Tokenizer

FOLDER = pathlib.Path(os.environ.get("MUTUALRL_SMALL_MODELS") or "models")
SHARED = pathlib.Path(__file__).resolve().parents[2].parent / "shared"
SMOLLM2, GEMMA3 = "smollm2-135m-instruct", "gemma3-270m"
PARAGRAPH = (
    "The lighthouse keeper climbed the stairs every evening before sunset. He carried a small lamp in one hand and a "
    "book in the other, because the nights were long and there was little else to do. When the storm came in from the "
    "west, the waves broke over the rocks and the windows shook, but the light did not go out. In the morning the "
    "fishermen came back to the harbour and thanked him, and he went home to sleep."
)
TEXTS = (
    PARAGRAPH, "", " ", "  two  spaces   three\n\n\n\tx\r\n", "🙂👩‍👩‍👧‍👦 你好 e\u0301 x²", "▁a▁ <0x41>",
    "<b>bold</b> <unused7> <think>so</think>", "What is 12 + 345?", "\x00\u2028\u200b",
    "<|im_end|><s><start_of_turn>",
)  # fmt: skip

needs_models = pytest.mark.skipif(
    not (FOLDER / f"{GEMMA3}.gguf").exists(), reason="no small models: see launch/fetch_small_models.sh"
)
needs_shared = pytest.mark.skipif(not (SHARED / "tokenizers").is_dir(), reason="no ../shared/tokenizers")


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA3])
def model(request):
    """(name, tokenizer, source)"""
    path = FOLDER / f"{request.param}.gguf"
    return request.param, Tokenizer.load(path), GGUFSource(path)


@needs_models
def test_tokenizer(model):
    name, tokenizer, source = model
    assert tokenizer.lossless and not tokenizer.loss_reason
    assert tokenizer.size == source.config["vocab_size"]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.bytes_of(ids) == text.encode(), text
        assert not tokenizer.control_ids.intersection(ids)
    if name == SMOLLM2:
        assert (tokenizer.stop_ids, tokenizer.eot_id, tokenizer.has_chat_template) == ((2,), 2, True)
        assert tokenizer.prompt("hi")[-4:] == [1, 520, 9531, 198]
    else:
        assert (tokenizer.bos_id, tokenizer.stop_ids, tokenizer.has_chat_template) == (2, (1, 106), False)
        assert tokenizer.prompt("Hello   world") == [2, 9259, 139, 12392]


@needs_models
@needs_shared
def test_smollm2_equals_its_own_tokenizer_json():
    file, folder = Tokenizer.load(FOLDER / f"{SMOLLM2}.gguf"), Tokenizer.load(SHARED / "tokenizers" / "smollm2")
    assert file.token_bytes == folder.token_bytes
    assert (file.bos_id, file.pad_id, file.stop_ids) == (folder.bos_id, folder.pad_id, folder.stop_ids)
    for text in TEXTS:
        assert file.encode(text) == folder.encode(text)


@needs_shared
@pytest.mark.parametrize(
    "pre, name", [("smollm", "smollm2"), ("qwen2", "qwen2.5"), ("gpt-2", "gpt2"), ("dbrx", "olmo2-dolma2-cl100k")]
)
def test_pre_tokenizers_cut_as_the_real_ones(pre, name):
    import tokenizers

    real = tokenizers.Tokenizer.from_file(str(SHARED / "tokenizers" / name / "tokenizer.json")).pre_tokenizer
    for text in [*TEXTS, "I'LL don't 12345 x_1's\n  fooBar()\n\n\n  #!?/\n"]:
        assert PRE_TOKENIZERS[pre]().pre_tokenize_str(text) == real.pre_tokenize_str(text)


@needs_models
def test_model_speaks_english(model):
    """Perplexity of plain English is that of a small language model, and a greedy continuation is words."""
    import jax
    import jax.numpy as jnp

    from mutualrl.models.config import ModelConfig
    from mutualrl.models.decoder import Decoder
    from mutualrl.models.weights import load_params

    name, tokenizer, source = model
    config = ModelConfig.from_hf(source.config)
    decoder, params = Decoder(config), {"params": load_params(source, config)}

    @jax.jit
    def logits_of(params, tokens_BL):
        positions = jnp.broadcast_to(jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)
        hidden, _ = decoder.apply(params, tokens_BL, positions)
        return decoder.apply(params, hidden, method="head").astype(jnp.float32)

    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = jnp.array([start + tokenizer.encode(PARAGRAPH)])
    logprobs = jax.nn.log_softmax(logits_of(params, ids)[0, :-1])
    nll = -jnp.take_along_axis(logprobs, ids[0, 1:, None], -1)
    perplexity = float(jnp.exp(nll[1:].mean()))
    print(name, "perplexity", perplexity)
    assert perplexity < 60

    length, steps = 40, 14
    ids = start + tokenizer.encode("The capital of France is the city of")
    for _ in range(steps):
        row = jnp.array([ids + [tokenizer.pad_id] * (length - len(ids))])
        ids.append(int(np.argmax(logits_of(params, row)[0, len(ids) - 1])))
    text = tokenizer.decode(ids)
    print(name, repr(text))
    assert "Paris" in text
