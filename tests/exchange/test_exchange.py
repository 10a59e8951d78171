"""The rounds of a step: who is heard, what is dropped and counted, and that all learners take the same branch."""

import concurrent.futures
import dataclasses
import json
import threading

import numpy as np
import pytest
from published import IDS, REWARD, SHAPE, SUCCESS, TEXTS, assert_same, fields, head, record, run_of, spans_of

from mutualrl import experience, votes, wire
from mutualrl.exchange import Exchange, in_process, slot
from mutualrl.experience import WireShape
from mutualrl.settings import ConfigError

PROBLEMS = list(IDS)
SIZES = WireShape.of(run_of())  # as SHAPE, but for the longest answer


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def made(name, **kwargs):
    return record(name, shape=SIZES, **kwargs)[0]


def exchange(names="ab", topics=("rollout", "trace"), transport=in_process, clock=None, frozen="", **settings):
    run = run_of(names, frozen=frozen, **settings)
    return Exchange(run, topics, run_id="run", transport=transport, clock=clock or Clock())


def heard_by(e, learner, records, step=0, slots=("rollout",), problems=PROBLEMS):
    e.open()
    for r in records:
        e.publish(r)
    return dict((s.name, found) for s, found in e.gather(step, slots, problems).of(learner))


def test_every_learner_hears_its_peers_by_index_and_never_itself():
    e = exchange("abc", frozen="b")
    e.open()
    for i, name in enumerate("cab"):
        e.publish(made(name, seed=i))
    heard = e.gather(0, ["rollout"], PROBLEMS)
    assert [s.name for s, _ in heard.of("a")] == ["b", "c"]
    assert [s.name for s, _ in heard.of("c")] == ["a", "b"]
    assert e.causes == {f"{x}/reward": 1 for x in "abc"}
    for s, found in heard.of("a"):
        want, _ = wire.validate(made(s.name, seed="cab".index(s.name)))
        assert_same(found["rollout"], want)


def test_one_policy_hears_nobody():
    assert heard_by(exchange("a"), "a", [made("a")]) == {}


def test_what_is_published_is_not_changed_by_who_hears_it():
    r = made("b")
    before = {k: np.array(v) for k, v in fields(r).items()}
    heard_by(exchange(), "a", [made("a"), r], problems=["p/2", "p/0", "new"])
    for k, v in fields(r).items():
        np.testing.assert_array_equal(v, before[k])


def test_a_policy_that_is_missing_is_absent_for_every_learner_in_that_step_only():
    e = exchange("abc")
    heard = e
    e.open()
    e.publish(made("a"))
    e.publish(made("c"))
    heard = e.gather(0, ["rollout"], PROBLEMS)
    assert {name: [s.name for s, _ in heard.of(name)] for name in "abc"} == {"a": ["c"], "b": ["a", "c"], "c": ["a"]}
    assert e.causes["b/absent"] == 1
    assert set(heard_by(e, "a", [made(x, step=1) for x in "abc"], step=1)) == {"b", "c"}
    assert e.causes["b/absent"] == 1


def test_nothing_is_left_over_from_the_step_before():
    e = exchange()
    assert heard_by(e, "a", [made("b")])
    assert heard_by(e, "a", [], step=1) == {} and e.causes["b/absent"] == 1


def others(slot, step, mine, seconds):
    """A transport that might have to wait for other processes."""
    return dict(mine)


def test_one_process_waits_for_nobody():
    """However long a step takes: transfer does not depend on the speed of the machine."""
    clock = Clock()
    e = exchange(clock=clock, deadline_s=10.0)
    e.open()
    clock.now += 1000
    e.publish(made("b"))
    assert e.gather(0, ["rollout"], PROBLEMS).of("a") and "b/absent" not in e.causes


def test_what_nobody_hears_is_not_sent():
    e = exchange("abc", topology="ring", frozen="c")
    e.open()
    for x in "abc":
        e.publish(made(x))
    e.gather(0, ["rollout"], PROBLEMS)
    assert set(e.bytes_sent) == {"a", "c"} and not any(key.endswith("absent") for key in e.causes)


def test_a_record_after_the_deadline_is_absent_for_all():
    clock = Clock()
    e = exchange("abc", clock=clock, deadline_s=10.0, transport=others)
    e.open()
    e.publish(made("a"))
    clock.now += 10
    e.publish(made("b"))  # in time, just
    clock.now += 0.5
    e.publish(made("c"))
    heard = e.gather(0, ["rollout"], PROBLEMS)
    assert [s.name for s, _ in heard.of("a")] == ["b"] and [s.name for s, _ in heard.of("b")] == ["a"]
    assert e.causes["c/absent"] == 1 and "b/absent" not in e.causes


def test_every_round_has_its_own_deadline():
    clock = Clock()
    e = exchange(topics=("rollout", "trace", "teacher_score"), clock=clock, deadline_s=10.0, transport=others)
    e.open()
    for x in "ab":
        e.publish(made(x))
    clock.now += 9
    heard = e.gather(0, ["rollout"], PROBLEMS)
    clock.now += 9
    e.publish(teacher("b", "a"))
    assert "rollout" in dict(heard.of("a"))[e._sources[1]]
    assert [s.name for s, _ in e.gather(0, ["teacher_score/a"], PROBLEMS).of("a")] == ["b"]
    clock.now += 11
    e.publish(teacher("a", "b"))
    assert e.gather(0, ["teacher_score/b"], PROBLEMS).of("b") == []
    assert e.causes["a/absent"] == 1


def teacher(name, learner):
    scored = spans_of(TEXTS, np.zeros((3, 4), np.int8), seed=7)
    return experience.teacher_record(head(name), learner, scored, SIZES)


def test_a_teachers_scores_are_for_one_learner():
    e = exchange("abc", topics=("rollout", "teacher_score"))
    e.open()
    for r in (teacher("b", "a"), teacher("c", "a"), teacher("a", "b")):
        e.publish(r)
    assert slot(teacher("b", "a")) == "teacher_score/a"
    heard = e.gather(0, ["teacher_score/a"], PROBLEMS)
    assert [s.name for s, _ in heard.of("a")] == ["b", "c"]
    assert e.causes == {}  # nobody waits for the learner's own scores


def test_a_record_in_the_wrong_slot_is_dropped():
    """What b says of c's texts, given out as what it says of a's."""

    def swap(slot, step, mine, seconds):
        return {**mine, "b": wire.to_wire(teacher("b", "c"), SIZES)}

    e = exchange("abc", topics=("rollout", "teacher_score"), transport=swap)
    assert heard_by(e, "a", [teacher("b", "a")], slots=["teacher_score/a"]) == {}
    assert e.causes == {"b/policy": 1, "c/absent": 1}


def test_several_topics_in_one_round():
    e = exchange(topics=("rollout", "stats", "capability"))
    r = made("b", traced=False)
    stats = experience.stats_record(head("b"), REWARD, SUCCESS, SIZES)
    rates = experience.capability_record(head("b"), [0.5])
    found = heard_by(e, "a", [r, stats, rates], slots=["rollout", "stats", "capability"])["b"]
    assert list(found) == ["rollout", "stats", "capability"]
    assert found["rollout"].token_logp is None
    assert_same(found["stats"], stats)
    assert_same(found["capability"], rates)
    assert e.causes == {"b/reward": 1, "a/absent": 3}


# Staleness


@pytest.mark.parametrize(
    "max_staleness,step,kept", [(0, 3, True), (0, 4, False), (2, 5, True), (2, 6, False), (2, 2, False)]
)
def test_old_records_of_policies_in_training_are_dropped(max_staleness, step, kept):
    e = exchange(max_staleness=max_staleness)
    found = heard_by(e, "a", [made("a", step=step), made("b", step=3)], step=step)
    assert bool(found) == kept
    assert e.causes["b/stale"] == (not kept)


def test_records_of_frozen_policies_do_not_age():
    e = exchange(frozen="b")
    assert heard_by(e, "a", [made("a", step=50), made("b", step=3)], step=50)
    assert "b/stale" not in e.causes


def test_votes_are_never_of_an_earlier_step():
    e = exchange(topics=(), label="peer_vote", max_staleness=5)
    v = experience.vote_record(head("b", step=3), votes.count((("1", "1", "2"),) * 3), SIZES)
    assert heard_by(e, "a", [v], step=4, slots=["vote"]) == {} and e.causes["b/stale"] == 1
    assert heard_by(e, "a", [v], step=3, slots=["vote"])


# Problems are matched by name


def test_problems_are_brought_into_the_order_of_the_step():
    e = exchange()
    r = made("b")
    got = heard_by(e, "a", [r], problems=["p/2", "new", "p/0"])["b"]["rollout"]
    checked, _ = wire.validate(r)
    assert got.header.problems == ("p/2", "new", "p/0")
    for name in ("text", "reward", "token_logp", "eos_logp", "logp_sum", "finish", "success", "valid"):
        theirs, mine = getattr(checked, name), getattr(got, name)
        np.testing.assert_array_equal(mine[0], theirs[2], err_msg=name)
        np.testing.assert_array_equal(mine[2], theirs[0], err_msg=name)
    assert not got.valid[1].any() and np.isnan(got.reward[1]).all() and (got.success[1] == -1).all()
    assert (got.answer_bytes[1] == -1).all()


def test_the_second_occurrence_of_a_problem_matches_the_second():
    e = exchange()
    r = made("b", ids=("p", "q", "p"))
    got = heard_by(e, "a", [r], problems=["q", "p", "p"])["b"]["rollout"]
    for mine, theirs in ((0, 1), (1, 0), (2, 2)):
        np.testing.assert_array_equal(got.text[mine], r.text[theirs])
    got = heard_by(e, "a", [r], problems=["p", "p", "p"])["b"]["rollout"]
    assert got.valid.any(1).tolist() == [True, True, False]


def test_a_source_with_fewer_problems_says_nothing_of_the_others():
    e = exchange(topics=("rollout", "trace", "stats"), label="peer_vote")
    ids = IDS[1:]
    records = [
        made("b", texts=TEXTS[:2], ids=ids),
        experience.stats_record(head("b", ids=ids), REWARD[:2], SUCCESS[:2], SIZES),
        experience.vote_record(head("b", ids=ids), votes.count((("1", "1"), ("2", None))), SIZES),
    ]
    found = heard_by(e, "a", records, slots=["rollout", "stats", "vote"])["b"]
    assert found["rollout"].valid.any(1).tolist() == [False, True, True]
    assert found["stats"].stats.n.tolist() == [0, 4, 4] and found["stats"].stats.sum.tolist() == [0, 1.5, 0]
    assert found["vote"].winner.tolist() == [-1, 0, 0] and found["vote"].n.tolist() == [0, 2, 2]
    # The step itself may have fewer problems than the wire holds.
    found = heard_by(e, "a", records, slots=["vote", "stats"], problems=["p/2"])["b"]
    assert found["vote"].winner.tolist() == [0, -1, -1] and found["vote"].answer_bytes[1:].max() == -1
    assert found["stats"].stats.n.tolist() == [4, 0, 0]


# What a peer sends is dropped and counted, whatever it is; a learner's own records are not touched


def spoilt(change):
    """A transport that changes what b has sent."""

    def transport(slot, step, mine, seconds):
        out = dict(mine)
        out["b"] = change({k: np.array(v) for k, v in out["b"].items()})
        return out

    return transport


def set_to(name, value, at=()):
    def change(sent):
        sent[name][at] = value
        return sent

    return change


@pytest.mark.parametrize(
    "cause,change",
    [
        ("absent", lambda sent: None),
        ("schema", set_to("header/schema", 99)),
        ("shape", lambda sent: {}),
        ("shape", lambda sent: sent | {"text": sent["text"][:, :, :-1]}),
        ("shape", lambda sent: sent | {"token_logp": sent["token_logp"].astype(np.float16)}),
        ("policy", lambda sent: sent | {"header/policy": wire.to_wire(made("a"), SIZES)["header/policy"]}),
        ("stale", set_to("header/step", 7)),
        ("stale", set_to("header/step", -1)),
    ],
)
def test_a_whole_record_is_dropped_and_counted(cause, change):
    e = exchange("abc", transport=spoilt(change))
    e.open()
    for x in "abc":
        e.publish(made(x))
    heard = e.gather(0, ["rollout"], PROBLEMS)
    assert [s.name for s, _ in heard.of("a")] == ["c"] and [s.name for s, _ in heard.of("c")] == ["a"]
    assert e.causes == {f"b/{cause}": 1, "a/reward": 1, "c/reward": 1}


@pytest.mark.parametrize(
    "cause,change",
    [
        ("utf8", set_to("text", 0xFF, (0, 0, 0))),
        ("lengths", set_to("token_bytes", 0, (0, 0, 0))),
        ("logp", set_to("token_logp", np.nan, (0, 0, 0))),
        ("range", set_to("finish", 9, (0, 0))),
        ("reward", set_to("reward", np.inf, (0, 0))),
    ],
)
def test_a_row_is_dropped_and_counted(cause, change):
    e = exchange("abc", transport=spoilt(change))
    clean = exchange("abc")
    want = heard_by(clean, "a", [made(x) for x in "abc"])
    got = heard_by(e, "a", [made(x) for x in "abc"])
    assert_same(got["c"]["rollout"], want["c"]["rollout"])
    valid = want["b"]["rollout"].valid.copy()
    valid[0, 0] = False
    np.testing.assert_array_equal(got["b"]["rollout"].valid, valid)
    assert e.causes - clean.causes == {f"b/{cause}": 1}


class Carrier:
    """A transport between two processes that meet at every round; what crosses are bytes."""

    def __init__(self):
        self.barrier, self.sent = threading.Barrier(2, timeout=20), {}

    def of(self, me):
        def carry(slot, step, mine, seconds):
            assert seconds <= 600.0
            there = {name: x for name, x in mine.items() if x is not None}
            self.sent[slot, step, me] = {
                name: {k: (v.dtype, v.shape, v.tobytes()) for k, v in x.items()} for name, x in there.items()
            }
            self.barrier.wait()
            both = {name: x for at in (0, 1) for name, x in self.sent[slot, step, at].items()}
            return {
                name: {k: np.frombuffer(b, kind).reshape(size) for k, (kind, size, b) in both[name].items()}
                for name in mine
                if name in both
            }

        return carry


def test_two_processes_hear_what_one_would():
    """Process 0 has policies a and c, process 1 has b and d; d has nothing for the first round."""
    topics, slots = ("rollout", "trace", "stats", "teacher_score"), ["rollout", "stats"]
    stats = {x: experience.stats_record(head(x), REWARD, SUCCESS, SIZES) for x in "abcd"}
    rollouts = {x: made(x, seed=i) for i, x in enumerate("abcd") if x != "d"}

    def rounds(e, mine):
        e.open()
        for x in mine:
            for r in (rollouts.get(x), stats[x]):
                if r is not None:
                    e.publish(r)
        first = e.gather(0, slots, PROBLEMS)
        for x in mine:
            if x != "b":
                e.publish(teacher(x, "b"))
        return first, e.gather(0, ["teacher_score/b"], PROBLEMS)

    carrier = Carrier()
    apart = [exchange("abcd", topics=topics, transport=carrier.of(k)) for k in (0, 1)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(rounds, apart, ("ac", "bd")))
    one = exchange("abcd", topics=topics)
    want = rounds(one, "abcd")
    for e, got in zip(apart, found):
        assert e.causes == one.causes and e.causes["d/absent"] == 1
        for mine, theirs in zip(got, want):
            for learner in "abcd":
                a, b = mine.of(learner), theirs.of(learner)
                assert [(s, list(x)) for s, x in a] == [(s, list(x)) for s, x in b]
                for (_, x), (_, y) in zip(a, b):
                    for name in x:
                        assert_same(x[name], y[name])
    assert [s.name for s, _ in want[1].of("b")] == ["a", "c", "d"]
    assert apart[0].bytes_sent + apart[1].bytes_sent == one.bytes_sent
    assert set(apart[0].bytes_sent) == {"a", "c"}


def test_a_transport_that_knows_less_than_the_others_leaves_a_source_out():
    """Each of two processes has one policy; what one does not have comes from the other, as bytes."""
    sent = {}

    def transport(me):
        def carry(slot, step, mine, seconds):
            assert seconds == 600.0
            assert [name for name, x in mine.items() if x is not None] == [me]
            sent[me] = {k: (v.dtype, v.shape, v.tobytes()) for k, v in mine[me].items()}
            return {
                name: {k: np.frombuffer(b, kind).reshape(shape) for k, (kind, shape, b) in sent[name].items()}
                for name in mine
                if name in sent
            }

        return carry

    first, second = exchange(transport=transport("a")), exchange(transport=transport("b"))
    heard_by(first, "a", [made("a", seed=1)])
    apart = heard_by(second, "b", [made("b", seed=2)])
    together = heard_by(exchange(), "b", [made("a", seed=1), made("b", seed=2)])
    assert_same(apart["a"]["rollout"], together["a"]["rollout"])
    assert first.causes["b/absent"] == 1 and "a/absent" not in second.causes


# What is counted and remembered


def test_bytes_sent_are_those_of_texts_and_tokens():
    e, bare = exchange(), exchange(topics=("rollout",))
    heard_by(e, "a", [made("a")])
    heard_by(bare, "a", [made("a", traced=False)])
    text = sum(len(x.encode()) for row in TEXTS for x in row)
    tokens = sum((len(x.encode()) + 1) // 2 for row in TEXTS for x in row)
    assert e.bytes_sent["a"] - bare.bytes_sent["a"] == 6 * tokens
    assert text < bare.bytes_sent["a"] < text + 12 * 150  # no padding of texts; numbers of a row apart
    before = e.bytes_sent["a"]
    heard_by(e, "a", [made("a")])
    assert e.bytes_sent["a"] == 2 * before
    short, again = exchange(), made("a")
    drop = np.ones((3, 4), bool)
    drop[2, 0] = False  # 16 bytes in 8 tokens
    heard_by(short, "a", [dataclasses.replace(again, valid=drop)])
    numbers = (
        3 * 4 + 2 * 8 + 4 + 4 * 1
    )  # lengths of text, answer, tokens; sum, reward; stop; finish, tail, success, valid
    assert before - short.bytes_sent["a"] == 16 + 6 * 8 + numbers
    stats = exchange(topics=("stats",))
    heard_by(stats, "a", [experience.stats_record(head("a"), REWARD, SUCCESS, SIZES)])
    assert stats.bytes_sent["a"] == 3 * (4 + 4 * 8 + 4)


def test_rates_are_of_the_last_five_completed_steps():
    e = exchange()
    assert e.rates == {"a": [], "b": []}
    e.note_rewards("a", np.array([[1.0, 0, -1, np.nan], [0.5, 0, 0, 0]]))
    assert e.rates["a"] == [2 / 7]
    e.note_rewards("a", np.full((2, 2), np.nan))  # nothing was judged
    assert e.rates["a"] == [2 / 7]
    for k in range(5):
        e.note_rewards("a", np.array([[1.0] * k + [0.0] * (4 - k)]))
    assert e.rates["a"] == [0, 0.25, 0.5, 0.75, 1] and e.rates["b"] == []


def test_state_goes_through_json():
    e = exchange()
    heard_by(e, "a", [made("b")])
    e.note_rewards("a", REWARD)
    state = e.state()
    saved = json.loads(json.dumps(state))
    e.note_rewards("a", REWARD)
    assert state == saved  # it does not move on with the run
    other = exchange()
    other.restore(saved)
    assert other.state() == saved and other.causes == e.causes and other.bytes_sent == e.bytes_sent
    other.note_rewards("a", REWARD)
    assert other.rates == e.rates
    assert json.loads(json.dumps(saved)) == saved


def test_a_run_whose_name_does_not_fit_the_wire_is_refused():
    Exchange(run_of(), ("rollout",), run_id="ä" * 80)
    with pytest.raises(ConfigError, match="^workdir=.*at most 160 bytes$"):
        Exchange(run_of(), ("rollout",), run_id="ä" * 81)
    Exchange(run_of(), (), run_id="ä" * 81)


def test_sizes_of_the_run():
    assert dataclasses.replace(SIZES, A=SHAPE.A) == SHAPE
