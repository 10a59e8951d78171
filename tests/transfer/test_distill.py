"""On-policy distillation: advantages by token, what teaches nothing, several teachers, where it is GRPO; settings."""

import dataclasses
import types as std_types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from material import Text, assert_equal, build, material, row_logp, scored

from mutualrl import types
from mutualrl.config import add_policy, base_config, read, use_transfer
from mutualrl.settings import ConfigError, ExchangeConfig, PolicyConfig
from mutualrl.transfer import distill, none

NAN = np.nan
OWN = [[0.0, 1.0], [0.0, 0.0]]


def text(target_ends, source_ends, source_logp, eos=NAN):
    raw = "".join("ab cd "[i % 6] for i in range(target_ends[-1]))
    return Text(raw, tuple(source_ends), tuple(source_logp), tuple(target_ends), eos)


ONE_TO_ONE = text([1, 2, 4], [1, 2, 4], [-0.5, -0.25, -2.0], -0.75)
MIXED = text([2, 3, 6], [1, 3, 5, 6], [-0.5, -0.25, -2.0, -1.0], -0.125)
CUT = text([2, 5], [5], [-3.0])
TEXTS = [[ONE_TO_ONE, MIXED], [CUT, MIXED]]


def make(own_texts=TEXTS, teachers=(TEXTS,), reward=OWN, options=(), lost=0, **others):
    """`lost` bytes of the last token of a text that did not end by a stop id were taken away."""
    m = material(
        reward, (), distill.Options(**dict(options)), own_texts=own_texts, teachers=teachers, **{"longest": 6, **others}
    )
    width = {}
    for p, group in enumerate(own_texts):
        for g, t in enumerate(group):
            n = len(t.target_ends)
            last = t.target_ends[-1] - (t.target_ends[-2] if n > 1 else 0)
            width[int(m.own.tokens[p, g, n - 1])] = last + lost
    tokenizer = std_types.SimpleNamespace(bytes_of=lambda ids: b"x" * sum(width[i] for i in ids))
    return dataclasses.replace(m, tokenizer=tokenizer)


def advantages(m, logp=None):
    """f32[B, T] of the only update, and what the learner says of its own tokens."""
    m = scored(m, distill, logp)
    (batch,), _ = distill.build(m)
    return batch.adv, m.scored


# ---- Where it is GRPO


@pytest.mark.parametrize("teachers", [(), ([[None, None]] * 2,), ([[None, None]] * 2, [[None, None]] * 2)])
@pytest.mark.parametrize("task_coef", (0.0, 0.5))
def test_without_a_teacher_it_is_none(teachers, task_coef):
    m = make(
        teachers=teachers, options=dict(task_coef=task_coef), updates_per_step=2, kl_coef=0.1, drop_zero_variance=True
    )
    assert distill.to_score(m) is None
    assert_equal(build(m, distill)[0], none.build(m)[0])


def test_own_rows_are_scored():
    m = make()
    assert_equal([distill.to_score(m)], [none.build(m)[0][0]], but=("adv", "surr_weight"))


# ---- Advantages


def test_equal_tokens():
    """Teacher's minus learner's log-prob, the end of turn included."""
    for split in ("prior", "even"):
        for granularity in ("finest", "word"):
            m = make([[ONE_TO_ONE]], ([[ONE_TO_ONE]],), [[0.0]], dict(split=split, granularity=granularity, coef=0.5))
            adv, old = advantages(m)
            want = 0.5 * (np.array([-0.5, -0.25, -2.0, -0.75]) - old[0, :4])
            np.testing.assert_allclose(adv[0], [*want, 0, 0], rtol=1e-5)


def test_form_of_the_rows():
    m = make(options=dict(clip_high=1.5), kl_coef=0.1)
    (batch,), metrics = build(m, distill)
    assert (batch.kind == types.SCORE).all() and batch.denom_self.all()
    np.testing.assert_allclose(batch.clip, [[0, 1.5]] * 4)
    np.testing.assert_allclose(batch.surr_weight, 1 / batch.surr_mask.sum())
    np.testing.assert_allclose(batch.kl_weight, 0.1 * batch.surr_weight)
    assert metrics["transfer/taught"] == 1 and {"thl/bound", "thl/group_tokens", "thl/one_to_one"} <= set(metrics)


def test_by_hand_across_tokenizers():
    """MIXED: learner 2 3 6, teacher 1 3 5 6 in bytes; common ends 3 and 6."""
    learner = np.array([[-1.0, -3.0, -0.5, -0.25, 0, 0]])
    teacher_sums, own_sums = np.array([-0.75, -3.0]), np.array([-4.0, -0.5])
    for split, want in (
        ("prior", [*(teacher_sums - own_sums)[0] * np.array([0.25, 0.75]), -2.5]),
        ("even", [-0.375 + 1.0, -0.375 + 3.0, -2.5]),
    ):
        adv, _ = advantages(make([[MIXED]], ([[MIXED]],), [[0.0]], dict(split=split)), learner)
        np.testing.assert_allclose(adv[0], [*want, -0.125 + 0.25, 0, 0], rtol=1e-5)


@st.composite
def tables(draw):
    u = draw(st.integers(1, 5))
    ends = lambda: (*sorted(draw(st.sets(st.integers(1, u), max_size=u)) - {u}), u)
    source = ends()
    logp = draw(st.lists(st.floats(-4, -0.01), min_size=len(source), max_size=len(source)))
    return text(ends(), source, logp, draw(st.sampled_from([-0.5, NAN])))


@hypothesis_settings(max_examples=100, deadline=None)
@given(tables(), st.sampled_from(["prior", "even"]), st.sampled_from(["finest", "word"]), st.floats(0.1, 2))
def test_a_row_sums_to_the_log_ratio(one, split, granularity, coef):
    options = dict(split=split, granularity=granularity, coef=coef, max_advantage=1e9)
    m = make([[one]], ([[one]],), [[0.0]], options)
    adv, old = advantages(m)
    teacher = sum(one.source_logp) + np.nan_to_num(one.eos_logp)
    assert adv.sum() == pytest.approx(coef * (teacher - old.sum()), rel=1e-4, abs=1e-4)
    assert not adv[~m.own.mask[0]].any()


# ---- What teaches nothing


@pytest.mark.parametrize("own, teacher", [(7, 1), (1, 7), (7, 7)])
def test_long_groups(own, teacher):
    """More than 6 tokens on either side; here the two texts share no end but the last."""
    ends = lambda n, shift: [*(2 * i + 1 + shift for i in range(n - 1)), 20]
    one = text(ends(own, 0), ends(teacher, 1), [-0.5] * teacher, -0.25)
    for limit, taught in ((6, False), (7, True)):
        m = make([[one]], ([[one]],), [[0.0]], dict(max_group_tokens=limit), longest=9)
        adv, _ = advantages(m)
        assert (adv[0, :own] != 0).all() == taught and adv[0, :own].any() == taught
        assert adv[0, own] != 0  # the end of turn is no group
        assert build(m, distill)[1]["transfer/long_groups"] == pytest.approx(0 if taught else own / (own + 1))


def test_limit():
    far = text([1, 2], [1, 2], [-50.0, -0.01])
    adv, _ = advantages(make([[far]], ([[far]],), [[0.0]]), [[-0.5, -30.0, 0, 0, 0, 0]])
    np.testing.assert_allclose(adv[0, :2], [-10, 10])
    adv, _ = advantages(make([[far]], ([[far]],), [[0.0]], dict(max_advantage=3.0)), [[-0.5, -30.0, 0, 0, 0, 0]])
    np.testing.assert_allclose(adv[0, :2], [-3, 3])


def test_tokens_beyond_the_text():
    """Sampled tokens that the text has lost have no advantage, nor has the group of one that lost some bytes."""
    m = make([[CUT]], ([[CUT]],), [[0.0]])
    mask = m.own.mask.copy()
    mask[0, 0, 2:4] = True
    m = dataclasses.replace(m, own=dataclasses.replace(m.own, mask=mask))
    adv, _ = advantages(m)
    assert (adv[0, :2] != 0).all() and not adv[0, 2:].any()
    (batch,), _ = build(m, distill)
    np.testing.assert_allclose(batch.surr_weight, 1 / 4)  # they stay in the denominators

    both = text([2, 3, 5], [2, 5], [-3.0, -1.0])
    adv, _ = advantages(make([[both]], ([[both]],), [[0.0]], lost=1))
    assert adv[0, 0] != 0 and not adv[0, 1:].any()
    # At a stop text the teacher may have a log-prob for its own stop id: the learner's token there is another one.
    stopped = dataclasses.replace(both, eos_logp=-0.5)
    m = make([[both]], ([[stopped]],), [[0.0]])
    finish = np.full_like(m.own.finish, types.STOP_TEXT)
    mask = m.own.mask.copy()
    mask[0, 0, 3] = True
    adv, _ = advantages(dataclasses.replace(m, own=dataclasses.replace(m.own, mask=mask, finish=finish)))
    assert (adv[0, :3] != 0).all() and adv[0, 3] == 0


# ---- Rows and teachers


def test_teachers_are_averaged_over_those_that_scored_a_row():
    other = dataclasses.replace(ONE_TO_ONE, source_logp=(-1.5, -1.25, -1.0), eos_logp=-0.25)
    own = [[ONE_TO_ONE] * 4]
    first, second = [[ONE_TO_ONE, ONE_TO_ONE, None, None]], [[other, None, other, None]]
    m = make(own, (first, second), [[0.0, 1.0, 0.0, 0.0]])
    (batch,), metrics = build(m, distill)
    old = row_logp(m.own.tokens[0])[:, :4]
    a, b = np.array([-0.5, -0.25, -2.0, -0.75]), np.array([-1.5, -1.25, -1.0, -0.25])
    np.testing.assert_allclose(batch.adv[:3, :4], np.array([(a + b) / 2, a, b]) - old[:3], rtol=1e-5)
    assert (batch.surr_weight > 0).tolist() == [True, True, True, False] and not batch.adv[3].any()
    np.testing.assert_allclose(batch.surr_weight[:3], 1 / 12, rtol=1e-6)
    gaps = [np.mean(a - old[:2]), np.mean(b - old[[0, 2]])]
    assert metrics["transfer/taught"] == 0.75
    assert metrics["transfer/teacher_gap"] == pytest.approx(np.mean(gaps), rel=1e-5)


def test_with_the_tasks_own_advantages():
    teachers = ([[ONE_TO_ONE, None], [CUT, MIXED]],)
    plain, _ = advantages(make(teachers=teachers))
    m = make(teachers=teachers, options=dict(task_coef=0.5), reward=[[0, 1], [NAN, 0]])
    (batch,), _ = build(m, distill)
    task = none.build(m)[0][0].adv
    np.testing.assert_allclose(batch.adv, plain + 0.5 * task, rtol=1e-5, atol=1e-7)
    # The row without a teacher has the task; the row without a reward has the teacher.
    assert task[0].any() and not task[2].any() and (batch.surr_weight > 0).all()
    (batch,), _ = build(make(teachers=teachers, reward=[[0, 1], [NAN, 0]]), distill)
    assert (batch.surr_weight > 0).tolist() == [True, False, True, True]


def test_an_own_row_without_a_trace_is_not_taught():
    m = make()
    valid = np.array([[True, True], [False, True]])
    m = dataclasses.replace(m, own_trace=dataclasses.replace(m.own_trace, valid=valid))
    (batch,), _ = build(m, distill)
    assert (batch.surr_weight > 0).tolist() == [True, True, False, True] and not batch.adv[2].any()


def test_updates_and_order():
    m = make(updates_per_step=2, mask_truncated=True)
    out, _ = build(m, distill)
    assert [b.group.tolist() for b in out] == [[0, 0], [1, 1]] and out[1].surr_weight[0] == 0  # CUT
    for b in out:
        np.testing.assert_allclose((b.surr_weight * b.surr_mask.sum(1)).sum(), 1, rtol=1e-6)
    moved = make(TEXTS[::-1], (TEXTS[::-1],), OWN[::-1], ids=["q1", "q0"], updates_per_step=2, mask_truncated=True)
    for a, b in zip(out, build(moved, distill)[0][::-1]):
        assert_equal([a], [b], tolerance=1e-6, but=("group",))


# ---- Settings


def run_of(**settings):
    policies = {"a": PolicyConfig(model="m", **settings), "b": PolicyConfig(model="m", frozen=True)}
    return std_types.SimpleNamespace(policies=policies, exchange=ExchangeConfig())


@pytest.mark.parametrize(
    "others, settings, message",
    [
        (dict(split="middle"), {}, "transfer.distill.split='middle': allowed are even, prior"),
        (dict(granularity="line"), {}, "transfer.distill.granularity='line'"),
        (dict(coef=0.0), {}, "transfer.distill.coef=0"),
        (dict(max_advantage=0.0), {}, "transfer.distill.max_advantage=0"),
        (dict(clip_high=-1.0), {}, "transfer.distill.clip_high=-1"),
        (dict(max_group_tokens=0), {}, "transfer.distill.max_group_tokens=0"),
        (dict(task_coef=-0.1), {}, "transfer.distill.task_coef=-0.1"),
        ({}, dict(ratio_level="sequence"), "policies.a.ratio_level='sequence'"),
    ],
)
def test_refused(others, settings, message):
    distill.check(distill.Options(), run_of(kl_in_reward=True))
    with pytest.raises(ConfigError, match=message):
        distill.check(distill.Options(**others), run_of(**settings))


def test_a_log_cannot_teach():
    config = base_config()
    for name in ("a", "b"):
        add_policy(config, name, model="x")
    use_transfer(config, "distill")
    read(config)
    config.exchange.logs = {"before": {"folder": "x", "policy": "a"}}
    with pytest.raises(ConfigError, match="exchange.logs=before: must be empty with transfer 'distill'"):
        read(config)
