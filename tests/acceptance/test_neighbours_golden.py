"""The golden numbers of the methods specification for GRAFT, HACPO, LUFFY, AMPO and on-policy distillation, from
Material to batches and loss: ids graft.*, hacpo.*, luffy.*, ampo.*, opd.*, loss.kind.*."""

import dataclasses
import json
import pathlib
import sys
import types as std_types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mutualrl import assembly, batches, experience, losses, types
from mutualrl.exchange import Exchange
from mutualrl.losses import LossSettings
from mutualrl.transfer import ampo, distill, graft, hacpo, luffy

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "transfer"))
from material import Peer, Text, build, material, rows_of, scored  # noqa: E402

PATH = pathlib.Path(__file__).parents[3] / "shared" / "design" / "methods_golden.json"
if not PATH.is_file():
    pytest.skip(f"no golden numbers at {PATH}", allow_module_level=True)
ALL = {c["id"]: c for c in json.loads(PATH.read_text())["cases"]}
PREFIXES = ("graft.", "hacpo.", "luffy.", "ampo.", "opd.", "loss.kind.")
SEQUENCE = dict(ratio_level="sequence", aggregation="seq_mean_token_mean", clip_low=3e-4, clip_high=4e-4)


@pytest.mark.parametrize("name", [name for name in ALL if name.startswith(PREFIXES)])
def test_golden(name):
    """A case added to the file fails here until it is checked below."""
    case = ALL[name]
    near = lambda x: pytest.approx(np.asarray(x, float), abs=case["tolerance"], rel=0)
    CHECKS[name](case["inputs"], case["expected"], near)


def text_of(tokens, logp, eos=np.nan):
    """A text of so many one-byte tokens, the same for both sides, of one log-prob."""
    return Text("a" * tokens, tuple(range(1, tokens + 1)), (logp,) * tokens, tuple(range(1, tokens + 1)), eos)


def value_and_grad(logp, rows, regime, options):
    """Loss of rows alone and its gradient by log-prob, at a snapshot of these log-probs."""
    settings = LossSettings(**regime.forms(options), correction="none")
    return jax.value_and_grad(lambda x: losses.loss(x, jnp.zeros_like(x), rows, settings)[0])(
        jnp.asarray(logp, jnp.float32)
    )


def cats():
    """The worked example: a text as its source scored it, and the learner's log-probs of it, the stop id last."""
    x = ALL["thl.worked.the_17_cats"]["inputs"]
    text = Text(x["text"], x["source_ends"], x["source_logp"], x["target_ends"], x["source_eos_logp"])
    return text, np.array([*x["learner_old_logp"], x["learner_old_eos_logp"]])


# ---- GRAFT


def graft_select(x, expected, near):
    groups = lambda ks: [[1] * k + [0] * (x["n"] - k) for k in ks]
    for learner, peer, chosen, possible in (("B", "A", "A_to_B", "A_to_B"), ("A", "B", "B_to_A", "B_to_A")):
        if chosen not in expected:
            continue
        m = material(groups(x[f"k_{learner}"]), [Peer(groups(x[f"k_{peer}"]))], graft.Options())
        candidate, _, _ = graft.candidates(m)
        if "m" in expected:
            assert np.flatnonzero(candidate).tolist() == expected[f"candidates_{possible}"]
            assert graft.selected(m)[0].sum() == expected["m"]
        assert np.flatnonzero(graft.selected(m)[0]).tolist() == expected[chosen]
        _, metrics = build(m, graft)
        assert metrics["transfer/replaced"] == len(expected[chosen])


def graft_weight(x, expected, near):
    peer = Peer([[1, 0, 0]], texts=[[text_of(4, s) for s in x["source_mean_logp"]]], finish=[[types.LENGTH] * 3])
    m = material([[0, 0]], [peer], graft.Options(floor=x["delta"], balance=False), lengths=[[4, 4]], advantage_eps=0)
    spread = np.array([0.1, -0.1, 0.25, -0.25])
    m = scored(m, graft, np.array(x["receiver_mean_logp"])[:, None] + spread)
    assert graft.compatibility(m, graft.taken_over(m)[1]) == near(expected["s"])
    rows = rows_of(graft.build(m)[0], 1)
    kept = np.array(expected["kept"])
    assert rows.sample.tolist() == np.flatnonzero(kept).tolist()
    alone = np.array([2.0, -1.0, -1.0]) / np.sqrt(3)  # advantages of 1, 0, 0
    assert rows.adv[:, 0] / alone[kept] == near(np.array(expected["w"])[kept])


def graft_token_mean(x, expected, near):
    """A fourth row that cannot be trained on makes the advantages those of the case: 1.5 and -.5."""
    rows = x["rows"]
    s = [row["w"] if not row.get("dropped") else 0.5 for row in rows]
    texts = [[*(text_of(row["len"], -0.5) for row in rows), None]]
    peer = Peer([[1, 0, 0, 0]], texts=texts, finish=[[types.LENGTH] * 4], usable=[[1, 1, 1, 0]])
    m = material([[0, 0]], [peer], graft.Options(balance=False), lengths=[[4, 4]], advantage_eps=0)
    m = scored(m, graft, np.tile(-0.5 + np.log(s)[:, None], (1, 4)))
    (batch,), _ = graft.build(m)
    kept = [row for row in rows if not row.get("dropped")]
    got = rows_of([batch], 1)
    assert got.surr_mask.sum(1).tolist() == [row["len"] for row in kept]
    assert got.adv[:, 0] == near([row["w"] * row["adv"] for row in kept])
    assert 1 / got.surr_weight == near([expected["denominator"]] * len(kept))
    loss, _ = value_and_grad(np.full(batch.mask.shape, -0.5), batch, graft, m.options)
    assert float(loss) == near(expected["loss"])


# ---- HACPO


def hacpo_of(own, peer, capability, **options):
    m = material([own], [Peer([peer])], hacpo.Options(**options), capability=capability, **SEQUENCE)
    (batch,), metrics = build(m, hacpo)
    return batch.adv[:, 0], metrics, m


def hacpo_advantage(x, expected, near):
    capability = x["capability_learner"], x["capability_source"]
    adv, metrics, m = hacpo_of(x["own"], x["peer"], capability)
    right, wrong = expected["adv_correct"], expected["adv_wrong"]
    factor = expected["loss_capability_peer"]
    assert adv == near([*np.where(x["own"], right, wrong), *(factor * np.where(x["peer"], right, wrong))])
    assert metrics["transfer/capability_ratio"] == near(factor)
    to_learner, _ = hacpo.capability_ratios(m)
    assert to_learner == near([expected["reward_weight_peer"]] * 4)
    pool = np.array([*x["own"], *x["peer"]])
    assert 1 - adv[0] * (pool.std(ddof=1) + 1e-6) == near(expected["baseline"])


def hacpo_guard(x, expected, near):
    low, high = x["ratio_bounds"]
    capability = x["capability_learner"], x["capability_source"]
    bounds = dict(capability_floor=low, capability_ceiling=high)
    adv, metrics, m = hacpo_of(x["own"], x["peer"], capability, **bounds)
    pool = np.array([*x["own"], *x["peer"]])
    assert metrics["transfer/own_baseline"] == 1
    assert 1 - adv[0] * (pool.std(ddof=1) + 1e-6) == near(expected["baseline"])
    omega = hacpo.capability_ratios(m)[0]
    assert (sum(x["own"]) + (omega * x["peer"]).sum()) / len(pool) == near(expected["raw_baseline"])


def hacpo_uniform(x, expected, near):
    adv, _, _ = hacpo_of(x["own"], x["peer"], (x["capability_learner"], x["capability_source"]))
    assert adv == near(expected["adv"])


def hacpo_cross(x, expected, near):
    options = hacpo.Options(alpha=x["alpha"], delta=x["delta"], delta_step=x["step"])
    assert options == hacpo.Options()
    texts = [[text_of(4, -0.5) for _ in range(4)]]
    peer = Peer([[1, 1, 1, 0]], texts=texts, finish=[[types.LENGTH] * 4])
    m = material(
        [[1, 0, 0, 0]], [peer], options, capability=(0.25, 0.25 * x["capability_ratio"]), lengths=[[4] * 4], **SEQUENCE
    )  # fmt: skip
    (batch,), _ = build(m, hacpo)
    rows = rows_of([batch], 1)
    # The pool's baseline is that of hacpo.advantage, so these rows have the advantage of this case.
    assert rows.adv[:3] == near(np.full((3, 4), x["capability_ratio"] * x["adv"]))
    rows = dataclasses.replace(rows, surr_weight=np.full(4, 0.25, np.float32))
    for s, objective, grad in zip(x["seq_ratio"], expected["objective"], expected["grad_wrt_log_ratio"]):
        logp = np.full((4, 4), -0.5 + np.log(s)) + np.array([0.1, -0.1, 0.2, -0.2])
        settings = LossSettings(**hacpo.forms(options))
        rho = losses.log_ratios(jnp.asarray(logp, jnp.float32), rows.denom_logp, rows, settings.levels)
        j = losses.surrogate(jnp.asarray(logp, jnp.float32), rho, rows, settings)
        assert np.asarray(j)[0] == pytest.approx([objective] * 4, abs=3e-6)  # float32
        _, got = value_and_grad(logp, rows, hacpo, options)
        assert -np.asarray(got)[0].sum() == pytest.approx(grad, abs=3e-6)  # all tokens together move the log-ratio by 1

    bounds = expected["lower_bound_by_inner_index"]
    p = len(bounds)
    m = material([[1, 0]] * p, [Peer([[1, 0]] * p)], options, capability=(1, 1), updates_per_step=p, **SEQUENCE)
    out, _ = build(m, hacpo)
    assert [b.clip[b.source == 1].tolist() for b in out] == [[pytest.approx([low, 1.0])] * 2 for low in bounds]
    assert out[x["inner_index"]].clip[-1, 0] == near(bounds[0])


def hacpo_capability_window(x, expected, near):
    """Rates of completed steps, as the exchange keeps them and as they are sent."""
    assert experience.WINDOW == x["window"]
    kept = std_types.SimpleNamespace(rates={"a": []})
    for rate in x["positive_rates"]:
        Exchange.note_rewards(kept, "a", np.arange(10).reshape(2, 5) < 10 * rate - 0.5)
    assert np.mean(kept.rates["a"]) == near(expected["capability"])
    for rates in (kept.rates["a"], x["positive_rates"]):
        assert np.nanmean(experience.capability_record(None, rates).window) == near(expected["capability"])


def hacpo_ratio_convention(x, expected, near):
    """Means over each side's own tokens. HACPO itself leaves the end of turn out; GRAFT's score has it."""
    text, now = cats()
    peer = Peer([[1, 0]], texts=[[text, text]])
    m = material([[0, 0]], [peer], graft.Options(balance=False), lengths=[[8, 8]])
    m = scored(m, graft, [now, now])
    assert graft.compatibility(m, graft.taken_over(m)[1]) == near([expected["ratio"]] * 2)
    assert now.mean() == near(x["target_mean_logp"])

    m = material([[1, 0]], [peer], hacpo.Options(), lengths=[[8, 8]], capability=(1, 1), **SEQUENCE)
    rows = rows_of(build(m, hacpo)[0], 1)
    ratio = lambda rows: np.asarray(
        losses.log_ratios(jnp.asarray([now, now], jnp.float32), rows.denom_logp, rows, (types.SEQUENCE,))
    )
    without = ALL["thl.sequence_ratio"]["expected"]["own_each_no_eos"]
    assert ratio(rows) == near(np.full((2, 8), without))
    tokens = np.full(2, 8, np.float32)
    both = dataclasses.replace(rows, surr_mask=rows.mask, seq_norm=tokens, seq_denom=tokens * x["source_mean_logp"])
    assert ratio(both) == near(np.full((2, 8), expected["ratio"]))


# ---- LUFFY, AMPO


def luffy_advantage(x, expected, near):
    m = material(
        [x["own"]], [Peer([x["external"]])], luffy.Options(), estimator="dr_grpo", aggregation="dr_grpo", longest=9
    )
    (batch,), _ = build(m, luffy)
    own = np.where(x["own"], expected["adv_own_correct"], expected["adv_own_wrong"])
    assert batch.adv[:, 0] == near([*own, expected["adv_external"]])
    assert x["external"][0] - batch.adv[-1, 0] == near(expected["baseline"])
    assert luffy.PUBLISHED["group_size"] == len(x["own"])


def ampo_replace(x, expected, near):
    options = ampo.Options()
    assert options.replace == x["k_replace"]
    m = material([x["own"]], [Peer([x["teacher_success"]])], options, longest=12)
    problems = tuple(dataclasses.replace(problem, answer="42") for problem in m.own.problems)
    table = [bytes([i]) for i in range(256)]
    tokenizer = std_types.SimpleNamespace(encode=lambda text: list(text.encode()), token_bytes=table)
    m = dataclasses.replace(m, own=dataclasses.replace(m.own, problems=problems), tokenizer=tokenizer)
    _, _, mask, answer = ampo.answers(m)
    assert answer.sum(1).tolist() == [2] * 4
    likelihood = np.array(x["receiver_loglik_of_reference"])[:, None]
    m = scored(m, ampo, np.where(answer, likelihood, -10.0 * np.arange(1, 5)[:, None]))
    (batch,), _ = ampo.build(m)
    live = batch.surr_weight > 0
    assert batch.sample[live & (batch.source == 1)].tolist() == expected["picked"]
    assert batch.sample[live & (batch.source == 0)].tolist() == list(range(6))
    assert batch.adv[live, 0] == near(expected["adv"])
    assert (batch.source[live] == 1).astype(int).tolist() == expected["rewards_after"]


# ---- On-policy distillation


def opd(split):
    def check(x, expected, near):
        text, student = cats()
        assert student.tolist() == x["student_logp"]
        options = distill.Options(coef=x["coef"], split=split)
        m = material([[0.0, 0.0]], (), options, own_texts=[[text, text]], teachers=[[[text, text]]])
        m = scored(m, distill, [student, student])
        (batch,), metrics = distill.build(m)
        assert batch.adv == near([expected["adv"]] * 2) and batch.adv.sum(1) == near([expected["sum"]] * 2)
        # The gradient of the score term at the snapshot is the advantage of each token.
        _, grad = value_and_grad([student, student], batch, distill, options)
        assert -np.asarray(grad) / batch.surr_weight[:, None] == near([expected["adv"]] * 2)
        assert metrics["transfer/teacher_gap"] * 8 == near(expected["sum"])

    return check


# ---- Surrogate forms


def row(logp, denom, adv, kind, clip=(0.2, 0.2)):
    """One row with these log-probs and denominators, and its weight 1."""
    m = material([[0, 1]], (), lengths=[[len(logp)] * 2])
    batch = batches.take(assembly.own_rows(m), np.arange(1))
    return dataclasses.replace(
        batch, kind=np.array([kind], np.int8), clip=np.array([clip], np.float32), adv=np.full_like(batch.adv, adv),
        denom_logp=np.array([denom], np.float32), denom_self=np.zeros(1, bool), surr_weight=np.ones(1, np.float32),
        sampler_logp=np.full_like(batch.adv, np.nan),
    )  # fmt: skip


def kind_score(x, expected, near):
    logp = np.array([x["logp"]])
    rows = row(x["logp"], logp[0] - np.log(x["ratio"]), x["adv"], types.SCORE, x["clip"])
    loss, grad = value_and_grad(logp, rows, distill, distill.Options())
    assert -np.asarray(grad)[0] == near(expected["grad_objective_wrt_logp"])
    assert float(loss) == near(-(np.array(expected["weight"]) * x["adv"] * logp[0]).sum())


def kind_shape(x, expected, near):
    logp = np.log([x["prob"]])
    options = luffy.Options()
    assert options.gamma == ampo.Options().gamma == x["gamma"]
    loss, grad = value_and_grad(logp, row(logp[0], logp[0], x["adv"], types.SHAPE), luffy, options)
    assert float(loss) == near(-np.sum(expected["value"]))
    assert -np.asarray(grad)[0] == near(expected["grad_objective_wrt_logp"])


CHECKS = {
    "graft.select": graft_select,
    "graft.select_ties": graft_select,
    "graft.weight": graft_weight,
    "graft.token_mean": graft_token_mean,
    "hacpo.advantage": hacpo_advantage,
    "hacpo.baseline_guard": hacpo_guard,
    "hacpo.uniform_group": hacpo_uniform,
    "hacpo.cross": hacpo_cross,
    "hacpo.capability_window": hacpo_capability_window,
    "hacpo.ratio_convention": hacpo_ratio_convention,
    "luffy.advantage": luffy_advantage,
    "ampo.replace": ampo_replace,
    "opd.dense_advantage": opd("prior"),
    "opd.dense_advantage_even": opd("even"),
    "loss.kind.score": kind_score,
    "loss.kind.shape": kind_shape,
}
