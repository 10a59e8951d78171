"""Step metrics: what is counted, what is left out, and the lines on disk."""

import dataclasses
import json
import math

import numpy as np
import pytest

from mutualrl import metrics, types
from mutualrl.assembly import no_peers
from mutualrl.types import Batch, GroupStats, Rollouts, Verdicts


def rollouts(lengths, finish, t=8):
    lengths = np.array(lengths)
    mask = np.arange(t) < lengths[..., None]
    p, g = lengths.shape
    return Rollouts(
        policy="a",
        version=0,
        step=0,
        problems=(),
        prompt=np.zeros((p, 2), np.int32),
        prompt_positions=np.zeros((p, 2), np.int32),
        tokens=np.zeros((p, g, t), np.int32),
        mask=mask,
        logprobs=np.zeros((p, g, t), np.float32),
        finish=np.array(finish, np.int8),
        text=(("",) * g,) * p,
        temperature=1.0,
    )


def test_of_rollouts():
    own = rollouts([[2, 4], [8, 8], [1, 3]], [[0, 2], [1, 1], [0, 0]])
    verdicts = Verdicts(np.array([[1, 0], [0, 0], [np.nan, 1]]), np.array([[1, 0], [0, 0], [-1, 1]], np.int8))
    m = metrics.of_rollouts(own, verdicts)
    assert m["reward/mean"] == pytest.approx(2 / 5) and m["reward/invalid"] == 1
    assert m["success/mean"] == pytest.approx(2 / 5)
    assert m["rescue/all_fail"] == pytest.approx(1 / 3) and m["success/all_right"] == 0
    assert m["length/mean"] == pytest.approx(26 / 6) and m["length/max"] == 8 and m["tokens/generated"] == 26
    assert m["truncated_frac"] == pytest.approx(1 / 3)
    assert "reward/group_std" not in m

    none = Verdicts(np.full((3, 2), np.nan), np.full((3, 2), -1, np.int8))
    m = metrics.of_rollouts(own, none)
    assert "reward/mean" not in m and "success/mean" not in m and all(math.isfinite(v) for v in m.values())


def update(**given):
    keys = ["entropy", "tokens/own", "tokens/surrogate", "tokens/surrogate_peer", "tokens/trained", "tokens/kl",
            "mismatch/sum_abs", "mismatch/kl", "mismatch/abs/max", "kl/ref", "kl/old", "kl/clamped", "clip/low",
            "clip/high", "clip/dual", "clip/peer_low", "clip/peer_high", "clip/peer_dual", "skipped", "loss",
            "loss/surrogate", "loss/nll", "loss/kl", "grad_norm", "lr"]  # fmt: skip
    return {**dict.fromkeys(keys, 0.0), **{k.replace("__", "/"): v for k, v in given.items()}}


def test_of_updates_divides_sums_by_counts_of_the_whole_step():
    a = update(entropy=1.0, tokens__own=1.0, tokens__surrogate=1.0, clip__low=1.0, mismatch__abs__max=0.3, loss=1.0)
    b = update(entropy=0.0, tokens__own=9.0, tokens__surrogate=3.0, mismatch__abs__max=0.1, loss=3.0, skipped=1.0)
    m = metrics.of_updates([a, b])
    assert m["entropy"] == pytest.approx(0.1) and m["clip/low"] == pytest.approx(0.25)
    assert m["mismatch/max_abs"] == 0.3 and m["loss"] == 2.0 and m["skipped_updates"] == 1.0
    assert "kl/ref" not in m  # no token has a KL


def peer_batch(rows):
    """Rows of (source, group, tokens, surrogate tokens, surr_weight, nll_weight, source_logp, source_tokens)."""
    source, group, n, surr, w, nll, logp, count = (np.array(x) for x in zip(*rows))
    values = dict.fromkeys(f.name for f in dataclasses.fields(Batch))
    values |= dict(
        source=source, group=group, mask=np.arange(6) < n[:, None], surr_mask=np.arange(6) < surr[:, None],
        surr_weight=w, nll_weight=nll, source_logp=logp.astype(np.float32), source_tokens=count.astype(np.float32),
    )  # fmt: skip
    return Batch(**values)


# Five problems: the first, second and fourth have no own success, the last has none that is known of.
SOLVED = Verdicts(np.zeros((5, 2)), np.array([[0, 0], [0, 0], [1, 0], [0, -1], [-1, 1]], np.int8))


def heard(success, heard=None):
    r = no_peers(5, 6)
    success = np.array(success, np.int8)
    return dataclasses.replace(r, success=success, heard=np.ones_like(success, bool) if heard is None else heard)


def test_of_peers_against_numbers_worked_out_by_hand():
    """Ratios w = 1, 1, 2 of methods 6.2: effective sample size 2.666667 of 3."""
    nan = np.nan
    first = peer_batch(
        [
            (0, 0, 4, 4, 0.5, 0.0, nan, nan),  # own
            (1, 1, 2, 2, 0.5, 0.0, -3.0, 3),  # w = exp((-3 - -3)/2) = 1
            (2, 2, 4, 4, 0.1, 0.2, -2.0, 2),  # w = 1
            (1, 0, 5, 5, 0.0, 0.0, -1.0, 1),  # without weight: not trained on
        ]
    )
    second = peer_batch(
        [
            (1, 2, 6, 5, 0.3, 0.0, -8.0, 4),  # w = exp((-8 + 5 log 2 + 8)/5) = 2; an end of turn without a ratio
            (2, 4, 3, 3, 0.0, 0.7, -5.0, 5),  # certificate: no ratio
            (1, 4, 3, 3, 0.4, 0.0, nan, nan),  # no log-prob was sent, or the row was cut
        ]
    )
    updates = [
        {"row_logp": np.array([-9.0, -3.0, -2.0, -7.0])},
        {"row_logp": np.array([-8 + 5 * math.log(2), -6.0, -1.5])},
    ]
    received = heard([[1, 0], [1, 0], [1, 1], [0, 0], [0, 0]], np.array([[1, 1], [0, 1], [1, 1], [1, 1], [1, 1]]) > 0)
    m = metrics.of_peers(SOLVED, received, (), [first, second], updates, 0)
    assert m["peer_rows"] == 5 and m["peer_tokens"] == 2 + 4 + 6 + 3 + 3
    assert m["rescue/available"] == pytest.approx(1 / 3)  # of 0, 1 and 3; what 1 could have had was not heard
    assert m["rescue/used"] == pytest.approx(1 / 3)  # only 1
    assert m["ratio/ess_frac"] == pytest.approx(2.666667 / 3, abs=1e-6)
    log2 = math.log(2)
    assert m["ratio/log_mean"] == pytest.approx(log2 / 3) and m["kl_hat"] == pytest.approx(-log2 / 3)
    assert m["ratio/log_std"] == pytest.approx(log2 * math.sqrt(2) / 3) and m["ratio/log_max"] == pytest.approx(log2)
    own_each = [-3 / 2 + 3 / 3, -2 / 4 + 2 / 2, (-8 + 5 * log2) / 5 + 8 / 4]
    assert m["ratio/own_each"] == pytest.approx(sum(own_each) / 3)
    assert all(type(v) is float for v in m.values())


def test_of_peers_where_nothing_came_or_nothing_was_wanted():
    own = peer_batch([(1, 0, 4, 4, 0.5, 0.0, np.nan, np.nan)])
    m = metrics.of_peers(SOLVED, no_peers(5, 6), (), [own], [{"row_logp": np.array([-1.0])}], 1)
    assert m == {"peer_rows": 0, "peer_tokens": 0}
    all_right = Verdicts(np.ones((5, 2)), np.ones((5, 2), np.int8))
    assert "rescue/available" not in metrics.of_peers(all_right, heard(np.ones((5, 3))), (), [], [], 0)


def test_group_sums_tell_of_successes_too():
    n, right = np.array([2, 2, 2, 0, 2]), np.array([0, 1, 2, 0, 0])
    sums = GroupStats(n=n, sum=right, sumsq=right, min=right * 0, max=right > 0, n_success=right)
    stuck = ~(SOLVED.success == 1).any(1) & (SOLVED.success == 0).any(1)
    m = metrics.of_peers(SOLVED, no_peers(5, 6), (sums,), [], [], 0)
    assert stuck.any() and m["rescue/available"] == pytest.approx(np.mean(right[stuck] > 0)) and m["rescue/used"] == 0


def test_of_peers_of_a_row_without_a_token_of_its_source():
    """An empty text behind a stop text: no token on either side has a log-prob."""
    rows = peer_batch([(1, 0, 1, 0, 0.5, 0.0, 0.0, 0), (1, 0, 2, 2, 0.5, 0.0, -1.0, 1)])
    m = metrics.of_peers(SOLVED, heard(np.zeros((5, 2))), (), [rows], [{"row_logp": np.array([0.0, -1.0])}], 0)
    assert m["ratio/own_each"] == 0.5 and m["ratio/log_mean"] == 0 and m["peer_rows"] == 2


def test_masked_mean_and_effective_sample_size():
    x = np.array([1.0, 2.0, np.nan, 4.0])
    assert metrics.masked_mean(x, [1, 0, 0, 1]) == 2.5
    assert math.isnan(metrics.masked_mean(x, [0, 0, 1, 1])) and math.isnan(metrics.masked_mean(x, [0] * 4))
    assert metrics.effective_sample_size(np.full(7, 0.3)) == pytest.approx(7)
    assert metrics.effective_sample_size(np.array([1.0, 0.0])) == pytest.approx(1)


def test_truncated_is_the_finish_reason_and_not_the_length():
    m = metrics.of_rollouts(
        rollouts([[8, 8]], [[types.STOP, types.LENGTH]]), Verdicts(np.ones((1, 2)), np.ones((1, 2)))
    )
    assert m["truncated_frac"] == 0.5


def test_writer_takes_up_where_a_run_was_stopped(tmp_path):
    """Lines up to the checkpoint stay, an evaluation at it included; later and half-written ones go."""
    writer = metrics.MetricWriter(tmp_path, tensorboard=False)
    for step in (0, 1, 2, 2, 3, 4):
        writer.write(step, {"a/loss": step / 2})
    writer.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 2, "a/lo')  # killed in mid-write
    writer = metrics.MetricWriter(tmp_path, tensorboard=False, keep_to=2)
    writer.write(3, {"a/loss": 7.0})
    writer.close()
    lines = [json.loads(x) for x in path.read_text().splitlines()]
    assert [x["step"] for x in lines] == [0, 1, 2, 2, 3] and lines[-1]["a/loss"] == 7.0
    metrics.MetricWriter(tmp_path, tensorboard=False).close()
    assert path.read_text() == ""
