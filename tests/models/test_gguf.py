import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from mutualrl.models.config import ModelConfig
from mutualrl.models.gguf import ARCHITECTURES, GGUFSource, llama3_scaling, read_header

D, F, V, H, J, C = 64, 96, 40, 4, 2, 16


def write(path, arch, tensors, quant=Q.F32, **keys):
    """A GGUF file; `tensors` in [out, in], matrices in `quant`."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(F)
    writer.add_block_count(1)
    writer.add_context_length(2048)
    writer.add_head_count(H)
    writer.add_head_count_kv(J)
    writer.add_key_length(C)
    writer.add_layer_norm_rms_eps(1e-6)
    for key, value in keys.items():
        name = key.replace("__", ".")
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add.get(type(value), writer.add_array)(name, value)
    for name, value in tensors.items():
        if value.ndim == 1 or quant == Q.F32:
            writer.add_tensor(name, value.astype(np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(value, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_tensors(arch, rng, tied=True):
    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    found = {
        "token_embd.weight": normal(V, D),
        "output_norm.weight": normal(D),
        "blk.0.attn_output.weight": normal(D, H * C),
    }
    if ARCHITECTURES[arch].fused:
        found |= {"blk.0.attn_qkv.weight": normal((H + 2 * J) * C, D), "blk.0.ffn_up.weight": normal(2 * F, D)}
    else:
        found |= {f"blk.0.attn_{k}.weight": normal(n * C, D) for k, n in (("q", H), ("k", J), ("v", J))}
        found |= {"blk.0.ffn_gate.weight": normal(F, D), "blk.0.ffn_up.weight": normal(F, D)}
    found["blk.0.ffn_down.weight"] = normal(D, F)
    norms = {"olmo2": []}.get(arch, ["attn_norm", "ffn_norm"])
    norms += ["post_attention_norm", "post_ffw_norm"] if arch in ("olmo2", "gemma2", "gemma3") else []
    found |= {f"blk.0.{n}.weight": normal(D) for n in norms}
    if arch in ("qwen3", "gemma3"):
        found |= {f"blk.0.attn_{k}_norm.weight": normal(C) for k in "qk"}
    if arch == "olmo2":
        found |= {"blk.0.attn_q_norm.weight": normal(H * C), "blk.0.attn_k_norm.weight": normal(J * C)}
    if arch == "qwen2":
        found |= {f"blk.0.attn_{k}.bias": normal(n * C) for k, n in (("q", H), ("k", J), ("v", J))}
    return found if tied else found | {"output.weight": normal(V, D)}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_architecture_loads_as_its_family(tmp_path, arch, tied):
    """The config is accepted by ModelConfig, and names and shapes are exactly those of the family's weight rules."""
    from mutualrl.models.weights import load_params

    window = {f"{arch}__attention__sliding_window": 8} if ARCHITECTURES[arch].window else {}
    rng = np.random.default_rng(0)
    tensors = random_tensors(arch, rng, tied)
    source = GGUFSource(write(tmp_path / "m.gguf", arch, tensors, **window))
    config = ModelConfig.from_hf(source.config)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (D, F, V)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (1, H, J, C)
    assert (config.tie_embeddings, config.norm_eps, config.max_length) == (tied, 1e-6, 2048)
    assert source.config["rms_norm_eps"] == 1e-6
    params = load_params(source, config)
    np.testing.assert_array_equal(np.asarray(params["embed"]), tensors["token_embd.weight"])


@pytest.mark.parametrize("quant", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1])
def test_simple_quants(tmp_path, quant):
    rng = np.random.default_rng(1)
    tensors = {"token_embd.weight": rng.normal(size=(V, D)), "blk.0.ffn_up.weight": rng.normal(size=(F, D))}
    tensors = {k: v.astype(np.float32) for k, v in tensors.items()}
    source = GGUFSource(write(tmp_path / "m.gguf", "qwen2", tensors, quant))
    got = source.get("model.layers.0.mlp.up_proj.weight")
    assert got.dtype == np.float32 and got.shape == (F, D)
    want = tensors["blk.0.ffn_up.weight"]
    # Half a step of a block of 32 values that span about 5; the float types are rounded relatively.
    bits = {Q.Q8_0: 8, Q.Q4_0: 4, Q.Q4_1: 4, Q.Q5_0: 5, Q.Q5_1: 5}.get(quant)
    np.testing.assert_allclose(got, want, atol=8 / 2**bits if bits else 0, rtol=0 if bits else 2.0**-8)
    assert (quant == Q.F32) == np.array_equal(got, want)


def half(raw, at):
    return float(np.frombuffer(raw[at : at + 2], np.float16)[0])


def scale_min(raw, k):
    """6-bit scales and minima packed in 12 bytes, as in Q4_K and Q5_K."""
    if k < 4:
        return raw[k] & 63, raw[k + 4] & 63
    return (raw[k + 4] & 15) | (raw[k - 4] >> 6 << 4), (raw[k + 4] >> 4) | (raw[k] >> 6 << 4)


def q4_k(raw):
    d, dmin, scales, qs = half(raw, 0), half(raw, 2), raw[4:16], raw[16:144]
    return [
        d * scale_min(scales, i // 32)[0] * (qs[i // 64 * 32 + i % 32] >> (i // 32 % 2 * 4) & 15)
        - dmin * scale_min(scales, i // 32)[1]
        for i in range(256)
    ]


def q5_k(raw):
    d, dmin, scales, qh, qs = half(raw, 0), half(raw, 2), raw[4:16], raw[16:48], raw[48:176]
    return [
        d
        * scale_min(scales, i // 32)[0]
        * ((qs[i // 64 * 32 + i % 32] >> (i // 32 % 2 * 4) & 15) + 16 * (qh[i % 32] >> (i // 32) & 1))
        - dmin * scale_min(scales, i // 32)[1]
        for i in range(256)
    ]


def q6_k(raw):
    ql, qh, scales, d = raw[:128], raw[128:192], np.frombuffer(raw[192:208], np.int8), half(raw, 208)
    out = []
    for i in range(256):
        part, row, j = i // 128, i % 128 // 32, i % 32
        low = ql[part * 64 + row % 2 * 32 + j] >> (row // 2 * 4) & 15
        high = qh[part * 32 + j] >> (2 * row) & 3
        out.append(d * int(scales[i // 16]) * ((low | high << 4) - 32))
    return out


@pytest.mark.parametrize("quant, size, decode", [(Q.Q4_K, 144, q4_k), (Q.Q5_K, 176, q5_k), (Q.Q6_K, 210, q6_k)])
def test_super_block_quants(tmp_path, quant, size, decode):
    rng = np.random.default_rng(2)
    raw = rng.integers(0, 256, (3, 2 * size), dtype=np.uint8)
    for at in (0, 2) if quant != Q.Q6_K else (208,):
        for block in (0, size):
            scale = rng.uniform(0.001, 0.01, 3).astype(np.float16)
            raw[:, block + at : block + at + 2] = scale.view(np.uint8).reshape(3, 2)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    for key, value in {"embedding_length": 512, "block_count": 1, "attention.head_count": 4}.items():
        writer.add_uint32(f"qwen2.{key}", value)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = GGUFSource(path).get("model.embed_tokens.weight")
    want = [decode(bytes(row[:size])) + decode(bytes(row[size:])) for row in raw]
    assert got.shape == (3, 512) and got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_other_types_are_refused(tmp_path):
    path = write(tmp_path / "m.gguf", "qwen2", {"token_embd.weight": np.zeros((V, D), np.float32)})
    source = GGUFSource(path)
    info = source._tensors["token_embd.weight"]
    for type_, name in ((Q.IQ4_NL.value, "IQ4_NL"), (99, "number 99")):
        source._tensors["token_embd.weight"] = type(info)(info.shape, type_, info.start)
        with pytest.raises(ValueError, match=f"token_embd.weight is stored as {name}; allowed: F32, F16"):
            source.get("model.embed_tokens.weight")


def interleaved(x, angles):
    """Rotary embedding of neighbouring pairs, [heads, C]: what llama-type GGUF weights are made for."""
    a, b = x[:, 0::2], x[:, 1::2]
    return np.stack([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], -1).reshape(
        x.shape
    )


def halves(x, angles):
    """Rotary embedding of first and second half, [heads, C]: Hugging Face's."""
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)


def test_llama_query_and_key_order(tmp_path):
    """Attention scores of the file's weights under its own rotary layout equal those of ours under Hugging Face's."""
    rng = np.random.default_rng(3)
    tensors = random_tensors("llama", rng)
    source = GGUFSource(write(tmp_path / "m.gguf", "llama", tensors))
    x, y = rng.normal(size=(2, D))
    theta = 10000.0 ** (-np.arange(0, C, 2) / C)

    def scores(rotate, q, k):
        queries = rotate((q @ x).reshape(H, C), 5 * theta)
        keys = rotate((k @ y).reshape(J, C), 2 * theta)
        return np.einsum("hc,hc->h", queries, np.repeat(keys, H // J, 0))

    theirs = scores(interleaved, tensors["blk.0.attn_q.weight"], tensors["blk.0.attn_k.weight"])
    name = "model.layers.0.self_attn.{}_proj.weight"
    ours = scores(halves, source.get(name.format("q")), source.get(name.format("k")))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    np.testing.assert_array_equal(source.get(name.format("v")), tensors["blk.0.attn_v.weight"])


def test_gemma_norms(tmp_path):
    tensors = random_tensors("gemma3", np.random.default_rng(4))
    source = GGUFSource(write(tmp_path / "m.gguf", "gemma3", tensors, gemma3__attention__sliding_window=8))
    norms = [n for n in source.names() if "norm" in n]
    assert len(norms) == 7
    pairs = {"model.norm.weight": "output_norm", "model.layers.0.pre_feedforward_layernorm.weight": "blk.0.ffn_norm"}
    pairs |= {"model.layers.0.self_attn.q_norm.weight": "blk.0.attn_q_norm"}
    for hf, stored in pairs.items():
        np.testing.assert_array_equal(source.get(hf), tensors[f"{stored}.weight"] - np.float32(1))
    np.testing.assert_array_equal(source.get("model.embed_tokens.weight"), tensors["token_embd.weight"])


def test_gemma_config(tmp_path):
    tensors = random_tensors("gemma3", np.random.default_rng(5))
    keys = dict(
        gemma3__attention__sliding_window=8,
        gemma3__rope__freq_base=1e6,
        gemma3__rope__scaling__type="linear",
        gemma3__rope__scaling__factor=8.0,
        tokenizer__ggml__eos_token_id=1,
    )
    config = GGUFSource(write(tmp_path / "m.gguf", "gemma3", tensors, **keys)).config
    assert config["rope_scaling"] == {"type": "linear", "rope_type": "linear", "factor": 8.0}
    assert (config["rope_theta"], config["rope_local_base_freq"], config["eos_token_id"]) == (1e6, 1e4, 1)
    assert (config["query_pre_attn_scalar"], config["sliding_window"]) == (C, 8)


def test_phi3_longrope(tmp_path):
    tensors = random_tensors("phi3", np.random.default_rng(6))
    factors = {
        f"rope_factors_{k}.weight": np.linspace(1, n, C // 2, dtype=np.float32) for k, n in (("long", 9), ("short", 2))
    }
    keys = {"phi3__rope__scaling__original_context_length": 512, "phi3__attention__sliding_window": 0}
    source = GGUFSource(write(tmp_path / "m.gguf", "phi3", tensors | factors, **keys))
    assert not any("rope" in name for name in source.names())
    assert source.config["rope_scaling"]["long_factor"] == factors["rope_factors_long.weight"].tolist()
    assert source.config["original_max_position_embeddings"] == 512
    assert ModelConfig.from_hf(source.config).ropes[0].type == "longrope"


@pytest.mark.parametrize("factor, low, high, original", [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192)])
def test_llama3_scaling_is_recovered(factor, low, high, original):
    theta, dim = 500000.0, 64
    divisors = []
    for k in range(0, dim, 2):
        wavelength = 2 * np.pi * theta ** (k / dim)
        if wavelength < original / high:
            divisors.append(1)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    got = llama3_scaling(np.array(divisors, np.float32), theta, dim)
    assert got == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    assert llama3_scaling(np.ones(32), theta, dim) is None
    with pytest.raises(ValueError, match="rope_freqs"):
        llama3_scaling(np.linspace(1, 9, 32), theta, dim)


def test_what_is_not_understood_is_refused(tmp_path):
    embed = {"token_embd.weight": np.zeros((V, D), np.float32)}
    with pytest.raises(ValueError, match="architecture 'rwkv6' is not supported; allowed: llama"):
        GGUFSource(write(tmp_path / "a.gguf", "rwkv6", embed))
    with pytest.raises(ValueError, match="blk.0.ffn_gate_inp.weight is not known"):
        GGUFSource(write(tmp_path / "b.gguf", "llama", embed | {"blk.0.ffn_gate_inp.weight": np.zeros((4, D))}))
    with pytest.raises(ValueError, match="sliding_window 8 is not supported"):
        GGUFSource(write(tmp_path / "c.gguf", "llama", embed, llama__attention__sliding_window=8))
    (tmp_path / "d.gguf").write_bytes(b"PK\x03\x04 not it")
    with pytest.raises(ValueError, match="not a GGUF file"):
        GGUFSource(tmp_path / "d.gguf")


def test_files_cut_short_are_refused_in_one_line(tmp_path):
    path = write(
        tmp_path / "m.gguf", "llama", random_tensors("llama", np.random.default_rng(8)), some__words=["a", "b"]
    )
    data = path.read_bytes()
    _, tensors = read_header(path)
    header = min(t.start for t in tensors.values())
    for length in [*range(4, header - 32, 7), header, len(data) - 64]:
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match="m.gguf is cut short") as e:
            GGUFSource(path)
        assert "\n" not in str(e.value)
    path.write_bytes(data[:8] + b"\xff" * 16 + data[24:])  # counts beyond any file
    with pytest.raises(ValueError, match="header cannot be read"):
        GGUFSource(path)


def test_metadata_that_a_model_needs(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((V, D), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="holds no llama.embedding_length"):
        GGUFSource(tmp_path / "m.gguf")


def test_header_against_the_library(tmp_path):
    keys = dict(some__words=["a", "ü", ""], some__numbers=[1.5, -2.0], some__flag=True, some__count=7, some__text="x y")
    path = write(tmp_path / "m.gguf", "llama", random_tensors("llama", np.random.default_rng(7)), **keys)
    metadata, tensors = read_header(path)
    reader = gguf.GGUFReader(path)
    assert {t.name: t.data_offset for t in reader.tensors} == {name: info.start for name, info in tensors.items()}
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            value = metadata[key]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), key
