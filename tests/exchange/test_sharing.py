"""What crosses in a step: every regime's topics, from rollouts to Materials; the policies are but tokenizers."""

import collections
import dataclasses
import json
import types as std_types

import numpy as np
import pytest

from mutualrl import experience, types
from mutualrl.exchange import Exchange, in_process
from mutualrl.labelling import Labelling
from mutualrl.settings import ExchangeConfig, PolicyConfig, RunConfig
from mutualrl.sharing import Sharing
from mutualrl.tokenizers import train
from mutualrl.tokenizers.tokenizer import Tokenizer
from mutualrl.transfer import ampo, distill, graft, hacpo, luffy, none, prp, sft, sgt, xgrpo
from mutualrl.types import Batch, Problem, Rollouts, Verdicts

REGIMES = dict(
    ampo=ampo, distill=distill, graft=graft, hacpo=hacpo, luffy=luffy, prp=prp, sft=sft, sgt=sgt, xgrpo=xgrpo
)
SIZES = {"a": (3, 12), "b": (2, 10), "c": (2, 12)}  # rollouts a problem and longest completion of each policy
TEXTS = {
    "a": (("12", "so 3", ""), ("né", "7", "0123456789")),
    "b": (("12", "4"), ("abab", "")),
    "c": (("x", "yy"), ("0123456789", "z z")),
}
SUCCESS = {
    "a": np.array([[1, 0, 0], [0, 0, 0]], np.int8),
    "b": np.array([[1, 0], [1, -1]], np.int8),
    "c": np.zeros((2, 2), np.int8),
}
PROBLEMS = (Problem(id="p", question="?"), Problem(id="q", question="?"))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    out = {}
    for name, kind in (("a", "bytes"), ("b", "bpe"), ("c", "bytes")):
        folder = tmp_path_factory.mktemp(name)
        train.train(folder, kind, ["ab", "so 3", "0123456789"] * 9, size=280)
        out[name] = Tokenizer.load(folder)
    return out


class Fake:
    """A cohort of tokenizers with settings, its exchange and what its members sampled in a step."""

    def __init__(
        self, tokenizers, regime, names="abc", frozen="", folder=None, transport=in_process, exchange=(), **opt
    ):
        module = REGIMES.get(regime, none)
        options = module.Options(**opt)
        policies = {
            n: PolicyConfig(model="m", frozen=n in frozen, group_size=SIZES[n][0], max_new_tokens=SIZES[n][1])
            for n in names
        }
        self.run = RunConfig(
            policies=policies,
            data={"name": "procedural"},
            problems_per_step=2,
            transfer={"name": regime, **dataclasses.asdict(options)},
            exchange=ExchangeConfig(**dict(exchange)),
        )
        self.regime, self.tokenizers = module, tokenizers
        self.cohort = [
            std_types.SimpleNamespace(name=n, index=i, config=p, tokenizer=tokenizers[n], real_vocab=tokenizers[n].size)
            for i, (n, p) in enumerate(policies.items())
        ]
        topics = module.topics(options)
        self.exchange = Exchange(self.run, topics, run_id="run", folder=folder, transport=transport)
        labelling = Labelling(self.run, self.cohort, self.exchange, None)
        self.sharing = Sharing(self.run, self.cohort, labelling, self.exchange)
        self.asked = []

    def sampled(self, name, step=0, texts=None, problems=PROBLEMS):
        """Rollouts whose texts end by a stop id where there is room for one."""
        tok, t = self.tokenizers[name], SIZES[name][1]
        texts = TEXTS[name] if texts is None else texts
        p, g = len(texts), len(texts[0])
        tokens, mask = np.full((p, g, t), tok.pad_id, np.int32), np.zeros((p, g, t), bool)
        finish = np.zeros((p, g), np.int8)
        for i in range(p):
            for j in range(g):
                ids = [*tok.encode(texts[i][j]), tok.stop_ids[0]][:t]
                tokens[i, j, : len(ids)], mask[i, j, : len(ids)] = ids, True
                finish[i, j] = types.STOP if ids[-1] == tok.stop_ids[0] else types.LENGTH
        rng = np.random.default_rng(ord(name) + step)
        return Rollouts(
            policy=name, version=step, step=step, problems=problems, prompt=np.full((p, 1), 65, np.int32),
            prompt_positions=np.zeros((p, 1), np.int32), tokens=tokens, mask=mask,
            logprobs=np.where(mask, -rng.exponential(1, mask.shape), 0).astype(np.float32), finish=finish,
            text=texts, temperature=1.0,
        )  # fmt: skip

    def of(self, rows):
        """As `Scores.of`: a token's log-prob depends on its id and place; what was asked is kept."""
        self.asked.append({name: batch.mask.sum(-1).tolist() for name, batch in rows.items()})
        return {
            name: teacher_logp(batch.tokens[:, -batch.mask.shape[1] :]).astype(np.float32)
            for name, batch in rows.items()
        }

    def step(self, step=0, success=SUCCESS, rewards=None, **sampled):
        """(Materials, rollouts, verdicts) of a step."""
        rollouts = {p.name: self.sampled(p.name, step, **sampled.get(p.name, {})) for p in self.cohort}
        verdicts = {
            n: Verdicts(np.where(success[n] < 0, np.nan, success[n]).astype(np.float64), success[n]) for n in rollouts
        }
        rewards = rewards or {n: v.reward for n, v in verdicts.items()}
        self.sharing.begin_step()
        return self.sharing.share(step, rollouts, verdicts, rewards, self), rollouts, verdicts


def teacher_logp(tokens):
    return -0.01 * (1 + tokens % 50) - 0.1 * np.arange(tokens.shape[-1])


def texts_of(tok, r):
    """Texts of the usable rows by (source, problem, sample)."""
    return {
        (int(r.source[k]), int(p), int(r.sample[k])): tok.decode(r.tokens[p, k][r.mask[p, k]])
        for p, k in np.argwhere(r.usable)
    }


@pytest.mark.parametrize("regime", REGIMES)
def test_every_regime_has_its_material(tokenizers, regime):
    """From a step's rollouts to batches, for policies of other tokenizers, group sizes and lengths."""
    f = Fake(tokenizers, regime, frozen="c")
    materials, rollouts, verdicts = f.step()
    assert list(materials) == ["a", "b"]
    for name, m in materials.items():
        assert m.own is rollouts[name] and m.verdicts is verdicts[name] and m.index == "abc".index(name)
        scored = f.regime.to_score(m)
        if scored is not None:
            m = dataclasses.replace(m, scored=f.of({name: scored})[name])
        batches_, metrics_ = f.regime.build(m)
        assert len(batches_) == 1 and all(np.isfinite(v) for v in metrics_.values())
        assert np.isfinite(batches_[0].adv).all() and np.isfinite(batches_[0].surr_weight).all()
    assert set(f.exchange.bytes_sent) == {"a", "b", "c"}
    assert {k: n for k, n in f.sharing.counts().items() if "overlong" not in k and "record/reward" not in k} == {}


def test_texts_cross_and_nothing_else_of_a_peer_is_left(tokenizers):
    f = Fake(tokenizers, "sgt", frozen="c")
    materials, _, _ = f.step()
    a, b = materials["a"].received, materials["b"].received
    assert texts_of(tokenizers["a"], a) == {
        (1, 0, 0): "12", (1, 0, 1): "4", (1, 1, 0): "abab", (2, 0, 0): "x", (2, 0, 1): "yy", (2, 1, 0): "0123456789",
        (2, 1, 1): "z z",
    }  # fmt: skip
    # Groups are padded to the largest of the run; what b could not judge was not heard.
    assert a.source.tolist() == [1] * 3 + [2] * 3 and a.sample.tolist() == [0, 1, 2] * 2
    assert a.heard.tolist() == [[True, True, False] * 2, [True, False, False, True, True, False]]
    assert a.success[a.heard].tolist() == [1, 0, 0, 0, 1, 0, 0]
    assert a.live.tolist() == [True] * 3 + [False] * 3
    assert texts_of(tokenizers["b"], b)[0, 1, 0] == "né" and not a.trace.valid.any()
    assert a.tokens.shape[-1] == 12 and b.tokens.shape[-1] == 10


def test_a_source_is_live_where_it_hears_the_learner_too(tokenizers):
    f = Fake(tokenizers, "sgt", exchange={"topology": "explicit", "edges": ("b->a", "c->a", "a->b")})
    materials, _, _ = f.step()
    assert materials["a"].received.live.tolist() == [True] * 3 + [False] * 3
    assert materials["b"].received.live.tolist() == [True] * 3 and materials["c"].received.live.tolist() == []


def test_own_rollouts_are_not_touched(tokenizers):
    f = Fake(tokenizers, "graft")
    before = {n: f.sampled(n) for n in "abc"}
    materials, rollouts, verdicts = f.step()
    for m in materials.values():
        m.received.trace.logp[:] = 9
        m.received.tokens[:] = 9
    for n, own in rollouts.items():
        for field in dataclasses.fields(own):
            np.testing.assert_array_equal(getattr(own, field.name), getattr(before[n], field.name))
        np.testing.assert_array_equal(verdicts[n].success, SUCCESS[n])


def test_traces_are_the_log_probs_of_sampling(tokenizers):
    f = Fake(tokenizers, "graft", names="ab")
    materials, rollouts, _ = f.step()
    r, own = materials["a"].received, rollouts["b"]
    total = np.where(own.mask, own.logprobs, 0).astype(np.float64).sum(-1)
    for p, k in np.argwhere(r.usable):
        np.testing.assert_allclose(r.trace.total[p, k], total[p, r.sample[k]], rtol=1e-6)
        assert r.trace.tokens[p, k] == own.mask[p, r.sample[k]].sum()
        assert bytes(r.trace.text[p, k, : r.trace.text_bytes[p, k]]).decode() == TEXTS["b"][p][r.sample[k]]
    np.testing.assert_allclose(materials["b"].own_trace.total, total, rtol=1e-6)


def test_sums_of_shaped_rewards_cross(tokenizers):
    f = Fake(tokenizers, "xgrpo", exchange={"topology": "ring"})
    rewards = {n: np.arange(s.size).reshape(s.shape) - 2.0 for n, s in SUCCESS.items()}
    materials, _, _ = f.step(rewards=rewards)
    (stats,) = materials["b"].stats  # of a: -2 -1 0, 1 2 3
    assert stats.sum.tolist() == [-3, 6] and stats.sumsq.tolist() == [5, 14] and stats.n.tolist() == [3, 3]
    assert stats.n_success.tolist() == [1, 0]
    m = materials["b"]
    assert m.received.source.shape == (0,) and m.own_trace is None and m.capability.tolist() != []
    assert np.isnan(m.capability).all()


def test_capabilities_are_of_completed_steps(tokenizers):
    f = Fake(tokenizers, "hacpo", frozen="c", exchange={"topology": "ring"})
    materials, _, verdicts = f.step()
    assert np.isnan(materials["a"].capability).all()
    f.sharing.end_step(verdicts)
    materials, _, _ = f.step(1)
    # By source index; each knows itself and whom it hears: a hears c, b hears a. b had 2 of 3 right, a 1 of 6.
    np.testing.assert_allclose(materials["a"].capability, [1 / 6, np.nan, 0])
    np.testing.assert_allclose(materials["b"].capability, [1 / 6, 2 / 3, np.nan])
    f.sharing.end_step({"a": Verdicts(np.ones((2, 3)), np.ones((2, 3)))})
    materials, _, _ = f.step(2)
    np.testing.assert_allclose(materials["a"].capability[0], (1 / 6 + 1) / 2)


def test_without_a_regime_nothing_is_sent(tokenizers, tmp_path):
    f = Fake(tokenizers, "none", folder=tmp_path / "exchange.log")
    materials, _, _ = f.step()
    assert materials["a"].received.tokens.shape == (2, 0, 12) and f.exchange.bytes_sent == {}
    assert f.sharing.summary() == {} and f.exchange.log is None and f.sharing.counts() == {}
    assert f.sharing.learnt(0, f.cohort[0], materials["a"], [], []) == {}


@pytest.mark.parametrize("regime", sorted(set(REGIMES) - {"sft"}))  # which never learns from own rows
def test_peers_that_are_late_leave_the_batches_of_none(tokenizers, regime):
    def lost(slot, step, mine, seconds):
        return dict.fromkeys(mine)

    f = Fake(tokenizers, regime, transport=lost)
    materials, _, _ = f.step()
    for name, m in materials.items():
        scored = f.regime.to_score(m)
        if scored is not None:
            m = dataclasses.replace(m, scored=f.of({name: scored})[name])
        (got,), _ = f.regime.build(m)
        (want,), _ = none.build(m)
        for field in dataclasses.fields(Batch):
            np.testing.assert_array_equal(getattr(got, field.name), getattr(want, field.name), err_msg=field.name)
    assert all(f.exchange.causes[f"{n}/absent"] >= 1 for n in "abc")


# Teachers


def test_teachers_score_the_learners_texts_in_their_own_tokens(tokenizers):
    f = Fake(tokenizers, "distill", frozen="c", exchange={"topology": "explicit", "edges": ("b->a", "c->a", "a->b")})
    materials, rollouts, _ = f.step()
    own = rollouts["a"]
    assert [len(materials[n].teachers) for n in "ab"] == [2, 1]
    for name, t in zip("bc", materials["a"].teachers):
        tok, longest = tokenizers[name], SIZES[name][1]
        assert t.valid.shape == (2, 3)  # the learner's own group, whatever the largest of the run is
        for p in range(2):
            for g in range(3):
                ids = [*tok.encode(TEXTS["a"][p][g]), tok.eot_id]
                assert t.valid[p, g] == (len(ids) <= longest)
                if t.valid[p, g]:
                    np.testing.assert_allclose(t.total[p, g], teacher_logp(np.array(ids)).sum(), rtol=1e-5)
                    assert t.n[p, g] == len(ids) - 1
                    ends = np.cumsum([len(tok.token_bytes[i]) for i in ids[:-1]])
                    assert t.ends[p, g, : len(ends)].tolist() == ends.tolist()
                    assert t.text_bytes[p, g] == len(TEXTS["a"][p][g].encode())
        assert np.isfinite(t.eos_logp[t.valid]).all()
    assert materials["b"].teachers[0].valid.tolist() == [[True, True], [True, True]]
    assert [sorted(x) for x in f.asked] == [["b", "c"], ["a"]]
    assert (own.finish == types.STOP).all()


def test_a_learner_that_was_cut_off_has_no_stop_to_be_scored(tokenizers):
    texts = (("12", "so 3", "0123456789ab"), ("né", "7", "0123456789"))  # a's T is 12: no room for the stop id
    f = Fake(tokenizers, "distill", names="ac")
    materials, rollouts, _ = f.step(a={"texts": texts})
    assert rollouts["a"].finish.tolist() == [[0, 0, types.LENGTH], [0, 0, 0]]
    (t,) = materials["a"].teachers
    assert t.valid.all() and np.isnan(t.eos_logp[0, 2]) and np.isfinite(t.eos_logp).sum() == 5
    want = teacher_logp(np.array(tokenizers["c"].encode("0123456789ab"))).sum()
    np.testing.assert_allclose(t.total[0, 2], want, rtol=1e-5)


@pytest.mark.parametrize(
    "change", [lambda x: x["text_bytes"].__setitem__((0, 0), 3), lambda x: x["eos_logp"].__setitem__((0, 0), np.nan)]
)
def test_scores_of_other_texts_than_the_learners_are_no_scores(tokenizers, change):
    def other(slot, step, mine, seconds):
        out = {n: x and {k: np.array(v) for k, v in x.items()} for n, x in mine.items()}
        if slot == "teacher_score/a":
            change(out["c"])
            out["c"]["token_bytes"][0, 0, :2] = np.array([1, out["c"]["text_bytes"][0, 0] - 1])
        return out

    f = Fake(tokenizers, "distill", names="ac", transport=other)
    materials, _, _ = f.step()
    (t,) = materials["a"].teachers
    assert not t.valid[0, 0] and t.valid.sum() == 5


def test_scores_that_do_not_fit_the_wire_are_counted(tokenizers):
    f = Fake(tokenizers, "distill", names="ac", exchange={"max_text_bytes": 9})
    materials, _, _ = f.step()
    (t,) = materials["a"].teachers
    assert not t.valid[1, 2] and t.valid.sum() == 5
    counts = f.sharing.counts()
    # a's text is not sent, nor what c would say of it; nor is c's own text, and what a would say of that.
    assert counts == {"a/wire/overflow": 2, "c/wire/overflow": 2}


# What is counted and kept


def test_drops_are_counted_by_stage(tokenizers):
    f = Fake(tokenizers, "sgt", exchange={"max_text_bytes": 11})
    texts = (("12", "so 3", "0123456789ab"), ("né", "7", "0123456789"))
    materials, rollouts, _ = f.step(a={"texts": texts})
    # a's longest does not fit the wire; "0123456789" and its end of turn do not fit b's 10 tokens unless they merge.
    merged = len(tokenizers["b"].encode("0123456789")) < 10
    assert f.sharing.counts()["a/wire/overflow"] == 1 and f.sharing.counts()["b/record/reward"] == 1
    assert ("b/roundtrip/overlong" in f.sharing.counts()) != merged
    broken = dataclasses.replace(rollouts["a"], tokens=np.where(rollouts["a"].mask, 10**6, 0))
    share = {**rollouts, "a": broken}
    verdicts = {n: Verdicts(SUCCESS[n].astype(np.float64), SUCCESS[n]) for n in "abc"}
    materials = f.sharing.share(0, share, verdicts, {n: v.reward for n, v in verdicts.items()}, f)
    assert f.sharing.counts()["a/text/id_range"] == 6
    assert not materials["b"].received.heard[:, :3].any() and materials["b"].received.heard[:, 3:].any()


def trained(*rows):
    """A batch of rows (source, group, surr_weight, nll_weight)."""
    source, group, surr, nll = (np.array(x) for x in zip(*rows))
    n = len(source)
    values = dict.fromkeys(f.name for f in dataclasses.fields(Batch))
    values |= dict(
        source=source, group=group, sample=np.zeros(n, int), surr_weight=surr, nll_weight=nll,
        mask=np.ones((n, 3), bool), surr_mask=np.ones((n, 3), bool), source_logp=np.full(n, np.nan),
        source_tokens=np.full(n, np.nan),
    )  # fmt: skip
    return Batch(**values)


def visit(f, ids, success, *rows, step=0):
    """Metrics of learner a that saw these problems, whose own successes these are, and trained on these rows."""
    problems = tuple(Problem(id=x, question="?") for x in ids)
    success = np.array(success, np.int8)
    m = std_types.SimpleNamespace(
        own=std_types.SimpleNamespace(problems=problems),
        verdicts=Verdicts(success.astype(float), success),
        received=std_types.SimpleNamespace(heard=np.ones((len(ids), 1), bool), success=np.ones((len(ids), 1), np.int8)),
        stats=(),
    )
    batch = trained(*rows)
    return f.sharing.learnt(step, f.cohort[0], m, [batch], [{"row_logp": np.zeros(len(rows))}])


def test_stuck_are_rescued_problems_that_fail_again(tokenizers):
    f = Fake(tokenizers, "sgt")
    # p, q and r fail, s does not; p, q and s have a row of a peer, r has one without weight.
    rows = [(0, 0, 1.0, 0.0), (1, 0, 0.0, 0.5), (2, 1, 0.5, 0.0), (1, 2, 0.0, 0.0), (1, 3, 0.5, 0.0)]
    found = visit(f, "pqrs", [[0, 0], [0, -1], [0, 0], [1, 0]], *rows)
    assert "rescue/stuck" not in found and found["rescue/used"] == pytest.approx(2 / 3)
    assert f.sharing.rescued == {"a": {"p", "q"}, "b": set(), "c": set()}
    # p is all-fail again, s fails too but was not rescued; q is not visited and waits.
    found = visit(f, "ps", [[0, 0], [0, 0]], (0, 0, 1.0, 0.0), step=1)
    assert found["rescue/stuck"] == 1.0 and f.sharing.rescued["a"] == {"q"}
    found = visit(f, "pq", [[0, 0], [0, 1]], (1, 0, 1.0, 0.0), step=2)
    assert found["rescue/stuck"] == 0.0 and f.sharing.rescued["a"] == {"p"}
    assert "rescue/stuck" not in visit(f, "s", [[1, 1]], (0, 0, 1.0, 0.0), step=3)


def test_used_rows_go_to_the_log(tokenizers, tmp_path):
    f = Fake(tokenizers, "sgt", folder=tmp_path / "exchange.log")
    visit(f, "pq", [[0, 0], [0, 0]], (1, 0, 0.0, 0.5), (0, 1, 1.0, 0.0))
    f.exchange.log.flush(1)
    pq = pytest.importorskip("pyarrow.dataset")
    (row,) = pq.dataset(tmp_path / "exchange.log" / "used").to_table().to_pylist()
    assert (row["learner"], row["source"], row["problem"], row["occurrence"]) == ("a", "b", "p", 0)


def test_a_policy_that_hears_nobody_has_no_metrics_of_peers(tokenizers):
    f = Fake(tokenizers, "sgt", names="a")
    materials, _, _ = f.step()
    assert materials["a"].received.source.shape == (0,)
    assert f.sharing.learnt(0, f.cohort[0], materials["a"], [], []) == {}


def test_state_goes_through_json(tokenizers):
    f = Fake(tokenizers, "hacpo")
    _, _, verdicts = f.step()
    f.sharing.end_step(verdicts)
    visit(f, "pq", [[0, 0], [0, 0]], (1, 0, 0.0, 0.5))
    saved = json.loads(json.dumps(f.sharing.state()))
    g = Fake(tokenizers, "hacpo")
    g.sharing.restore(saved)
    assert g.sharing.state() == f.sharing.state() and g.sharing.rescued["a"] == {"p"}
    one, two = f.step(1)[0]["a"], g.step(1)[0]["a"]
    np.testing.assert_array_equal(one.capability, two.capability)
    assert f.sharing.counts() == g.sharing.counts() and isinstance(g.sharing.causes, collections.Counter)


def test_the_summary_says_who_heard_whom(tokenizers):
    f = Fake(tokenizers, "sgt", frozen="c", exchange={"topology": "ring"})
    f.step()
    s = f.sharing.summary()
    assert s["topics"] == ["rollout"] and s["edges"] == {"a": ["c"], "b": ["a"]}
    assert s["kinds"] == {"a": "live", "b": "live", "c": "frozen"} and "b" not in s["bytes_sent"]
    assert set(s["bytes_sent"]) == {"a", "c"}  # nobody hears b
    assert s["bytes_sent"] == dict(f.exchange.bytes_sent) and json.dumps(s)
    shape = f.exchange.shape
    assert (shape.P, shape.G, shape.T, shape.U) == (2, 3, 12, 96) and experience.WINDOW == 5
