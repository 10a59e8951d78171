"""The golden numbers of the methods specification for PRP, XGRPO and SGT, from Material to batches and loss: ids prp.*,
xgrpo.*, sgt.* and their identities."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mutualrl import losses
from mutualrl.losses import LossSettings
from mutualrl.transfer import prp, sgt, xgrpo

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "transfer"))
from material import Peer, Text, build, material, rows_of, scored  # noqa: E402

PATH = pathlib.Path(__file__).parents[3] / "shared" / "design" / "methods_golden.json"
if not PATH.is_file():
    pytest.skip(f"no golden numbers at {PATH}", allow_module_level=True)
ALL = {c["id"]: c for c in json.loads(PATH.read_text())["cases"]}
IDENTITIES = ("identity.prp_self_peer", "identity.xgrpo_mean_offset", "identity.sgt_all_fail")
CASES = [name for name in ALL if name.split(".")[0] in ("prp", "xgrpo", "sgt") or name in IDENTITIES]


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    """A case added to the file fails here until it is checked below."""
    case = ALL[name]
    near = lambda x: pytest.approx(np.asarray(x, float), abs=case["tolerance"], rel=0)
    CHECKS[name](case["inputs"], case["expected"], near)


def test_every_identity_is_in_the_file():
    assert set(IDENTITIES) <= set(ALL)


def adv_of(batches):
    """f32[B] advantages of rows, which are the same on every token."""
    adv = np.concatenate([b.adv for b in batches])
    assert (adv == adv[:, :1]).all()
    return adv[:, 0]


# ---- PRP


def pool_advantage(x, expected, near):
    for variant in ("prp_snapshot", "prp_thl", "prp_seq"):
        out, _ = build(material([x["own"]], [Peer([x["peer"]])], prp.Options(variant=variant)), prp)
        assert adv_of(out) == near(expected["adv"])
    pool = np.array(x["own"] + x["peer"])
    assert pool.mean() == near(expected["mean"]) and pool.std(ddof=1) == near(expected["std_ddof1"])


def cats():
    """The worked example as a text of a peer, and the learner's snapshot of it, the stop id last."""
    x = ALL["thl.worked.the_17_cats"]["inputs"]
    text = Text(x["text"], x["source_ends"], x["source_logp"], x["target_ends"], x["source_eos_logp"])
    return text, np.array([*x["learner_old_logp"], x["learner_old_eos_logp"]])


def token_ratio(granularity, split):
    def check(x, expected, near):
        text, now = cats()
        options = prp.Options(variant="prp_thl", granularity=granularity, split=split)
        peer = Peer([[1, 1, 1, 0]], texts=[[text] * 4])
        settings = {k: x[k] for k in ("clip_low", "clip_high", "dual_clip")}
        m = material([[1, 0, 0, 0]], [peer], options, lengths=[[8] * 4], **settings)
        out, _ = prp.build(scored(m, prp, [now] * 4))
        rows = rows_of(out, 1)
        loss = LossSettings(**prp.forms(options), dual_clip=x["dual_clip"])
        j = lambda p: losses.surrogate(p, losses.log_ratios(p, rows.denom_logp, rows, loss.levels), rows, loss)
        logp = jnp.asarray(np.tile(now, (4, 1)), jnp.float32)
        value, grad = np.asarray(j(logp)), np.asarray(jax.grad(lambda p: j(p).sum())(logp))
        assert rows.surr_mask.all() and not rows.denom_self.any()
        assert rows.adv[:, 0] == near(x["adv"] * np.array([1, 1, 1, -1]))
        for i in range(4):
            assert rows.denom_logp[i] == near(expected["aligned"])
            assert np.exp(now - rows.denom_logp[i]) == near(expected["ratio"])
            sign = "neg" if i == 3 else "pos"
            assert value[i].mean() == near(expected[f"mean_objective_{sign}"])
            assert (grad[i] != 0).tolist() == expected[f"grad_live_{sign}"]

    return check


def filter_kl(x, expected, near):
    """A negative row of 7 tokens; and one as far from the learner as the threshold does not allow."""
    assert prp.Options().filter_kl_threshold == x["threshold"]
    n = x["target_len"]
    ends = tuple(range(1, n + 1))
    text = Text("a" * n, (3, n), (x["source_sum"] / 2,) * 2, ends, np.nan)
    peer = Peer([[1, 0]], texts=[[text] * 2], finish=[[1, 1]])
    for old, kl_hat, kept in (
        (x["learner_old_sum"], expected["kl_hat"], expected["kept"]),
        (x["source_sum"] - 1.01 * n * x["threshold"], 1.01 * x["threshold"], False),
    ):
        options = prp.Options(variant="prp_snapshot", negatives="filter_kl")
        m = material([[1, 0]], [peer], options, lengths=[[n, n]])
        out, metrics = prp.build(scored(m, prp, np.full((2, n), old / n)))
        assert metrics["transfer/pool_kl_hat"] == near(kl_hat)
        assert ((rows_of(out, 1).surr_weight > 0) == [True, kept]).all()


def prp_self_peer(x, expected, near):
    for variant in ("prp_snapshot", "prp_thl"):
        options = prp.Options(variant=variant)
        m = material([x["own"]], [Peer([x["peer_is_self"]], same_tokens=True)], options)
        out, _ = build(m, prp)
        assert adv_of(out) == near(expected["adv"])
        rows = rows_of(out, 1)
        now = np.where(rows.denom_self[:, None], 0, rows.denom_logp)  # the peer is the learner
        source = np.concatenate([m.received.trace.logp[0], m.received.trace.eos_logp[0][:, None]], 1)
        said = np.sort(source[source != 0])
        assert variant == "prp_snapshot" or np.sort(now[rows.surr_mask]) == near(said)


# ---- XGRPO


def pooled(**options):
    def check(x, expected, near):
        rho = {"rho": x["rho"]} if "rho" in x else {}
        peers = [Peer([r]) for r in x["peers"]]
        m = material([x["own"]], peers, xgrpo.Options(**options, **rho))
        if "moments" in x:
            for i, sums in enumerate(m.stats, 1):
                assert [sums.n[0], sums.sum[0], sums.sumsq[0]] == [x["moments"][k][i] for k in ("n", "sum", "sumsq")]
        assert adv_of(build(m, xgrpo)[0]) == near(expected["adv"])

    return check


def xgrpo_mean_offset(x, expected, near):
    adv = adv_of(build(material([x["own"]], [Peer([x["peer"]])], xgrpo.Options()), xgrpo)[0])
    pool = np.array(x["own"] + x["peer"])
    assert adv.mean() == near(expected["mean_adv"])
    assert (np.mean(x["own"]) - pool.mean()) / (pool.std(ddof=1) + 1e-6) == near(expected["formula"])


# ---- SGT


def counted(k, g):
    """[P, G] rewards with k right ones in each group."""
    return [[float(i < n) for i in range(g)] for n in k]


def gate(x, expected, near):
    m = material(counted(x["k_own"], x["G"]), [Peer(counted(x["k_peer"], x["G"]))], sgt.Options())
    (batch,), _ = build(m, sgt)
    assert sgt.gate(m).tolist() == [bool(g) for g in expected["gate"]]
    assert np.bincount(batch.group[batch.source == 1], minlength=4).tolist() == expected["gate"]


def coef(x, expected, near):
    """Two of four problems rescued, by certificates of 10 and 40 tokens, beside a surrogate of 1000 tokens."""
    own = counted([0, 0] + [1] * (x["num_prompts"] - x["num_rescued"]), 4)
    lengths = np.full((4, 4), x["surrogate_tokens"] // 16)
    lengths[0, 0] += x["surrogate_tokens"] - lengths.sum()
    peer = Peer([[1.0], [1.0], [1.0], [1.0]], lengths=[[n] for n in x["cert_len"]] + [[5], [5]])
    for norm, want in expected.items():
        options = sgt.Options(nll_coef=x["lam"], nll_norm=norm)
        out, _ = build(material(own, [peer], options, lengths=lengths, longest=64), sgt)
        assert rows_of(out, 1).nll_weight == near(want)
        assert not rows_of(out, 0).nll_weight.any()


def warmup(x, expected, near):
    options = sgt.Options(nll_coef=x["lam"], warmup_steps=x["warmup_steps"], start_step=x["start_step"])
    for step, want in zip(x["steps"], expected["lam_k"], strict=True):
        out, _ = build(material([[0, 0]], [Peer([[1]], lengths=[[1]])], options, step=step), sgt)
        assert rows_of(out, 1).nll_weight.sum() == near(want)


def sgt_all_fail(x, expected, near):
    n = len(x["cert_logp"])
    options = sgt.Options(nll_coef=x["lam"])
    peer = Peer([[1.0]], lengths=[[n]])
    (batch,), _ = build(material([x["own_rewards"]] * x["num_prompts"], [peer], options, longest=8), sgt)
    assert adv_of([batch])[:4] == near(expected["own_adv"])
    logp = np.full(batch.mask.shape, -0.7)
    logp[-1, :n] = x["cert_logp"]
    loss = lambda p: losses.loss(p, jnp.zeros_like(p), batch, LossSettings(**sgt.forms(options)))[0]
    value, grad = jax.value_and_grad(loss)(jnp.asarray(logp, jnp.float32))
    assert float(value) == near(expected["loss"])
    assert grad[-1, :n] == near(expected["grad_cert"])
    assert not grad[:-1].any() and not grad[-1, n:].any()


CHECKS = {
    "prp.pool_advantage": pool_advantage,
    "prp.token_ratio.word_even": token_ratio("word", "even"),
    "prp.token_ratio.word_prior": token_ratio("word", "prior"),
    "prp.token_ratio.finest_even": token_ratio("finest", "even"),
    "prp.token_ratio.finest_prior": token_ratio("finest", "prior"),
    "prp.filter_kl": filter_kl,
    "identity.prp_self_peer": prp_self_peer,
    "xgrpo.default": pooled(),
    "xgrpo.all_fail": pooled(),
    "xgrpo.own_mean_pool_std": pooled(mean="own"),
    "xgrpo.pool_mean_own_std": pooled(std="own"),
    "xgrpo.shrink_half": pooled(mean="shrink"),
    "xgrpo.no_peer": pooled(),
    "identity.xgrpo_mean_offset": xgrpo_mean_offset,
    "sgt.gate": gate,
    "sgt.coef": coef,
    "sgt.warmup": warmup,
    "identity.sgt_all_fail": sgt_all_fail,
}
