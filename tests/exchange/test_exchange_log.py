"""The log on disk: complete, whole after a kill, open to other tools, and replayed as it was heard live."""

import dataclasses
import logging

import numpy as np
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from published import ANSWERS, IDS, REWARD, SUCCESS, TEXTS, assert_same, fields, head, record, run_of, spans_of

from mutualrl import batches, experience, votes
from mutualrl.exchange import Exchange
from mutualrl.exchange_log import LogReader, LogWriter
from mutualrl.experience import WireShape
from mutualrl.settings import ConfigError, LogSource
from mutualrl.types import Problem

SIZES = WireShape.of(run_of())
NAMES = ("a", "b")


def made(name="b", step=0, **kwargs):
    return record(name, step=step, shape=SIZES, seed=step, **kwargs)[0]


def write(folder, records):
    """A log of records, flushed once."""
    log = LogWriter(folder)
    for r in records:
        log.add(r)
    log.flush(10**6)


def reader(folder, policy="b", used_by="", topics=("rollout", "trace")):
    return LogReader(LogSource(str(folder), policy, used_by), "exchange.logs.x", topics)


def heard(log, step, problems=IDS, traced=True, topic="rollout", shape=SIZES):
    return log.record(topic, step, problems, shape, traced)


def texts_of(r):
    """Text of every valid row by (problem, sample)."""
    return {
        (r.header.problems[p], int(g)): bytes(r.text[p, g, : r.text_bytes[p, g]]).decode()
        for p, g in np.argwhere(r.valid)
    }


def test_what_was_published_comes_back_bit_for_bit(tmp_path):
    r = made(step=4)
    write(tmp_path, [r, made("a", step=4)])
    assert (tmp_path / "rollout" / "part-00000004-00999999.parquet").is_file()
    got, missing = heard(reader(tmp_path), 4)
    assert missing == {}
    assert_same(got, r)  # every row of it is valid, so there is nothing that only the wire holds
    bare, _ = heard(reader(tmp_path, topics=("rollout",)), 4, traced=False)
    assert bare.token_logp is None and (bare.logp_sum == r.logp_sum).all()


def test_other_topics_come_back(tmp_path):
    stats = experience.stats_record(head("b", step=2), REWARD, SUCCESS, SIZES)
    rates = experience.capability_record(head("b", step=2), [0.5, 0.25])
    write(tmp_path, [stats, rates, made(step=2)])
    log = reader(tmp_path, topics=("stats", "capability"))
    got, _ = heard(log, 2, topic="stats")
    assert_same(got, stats)
    got, _ = heard(log, 7, topic="capability")
    np.testing.assert_array_equal(got.window, rates.window)
    assert heard(log, 1, topic="capability") == (None, {"absent": 1})
    assert heard(log, 2, topic="vote") == (None, {"absent": 1})


def test_nothing_is_padded_and_other_tools_open_it(tmp_path):
    r = dataclasses.replace(made(), valid=np.arange(4) < np.array([4, 0, 2])[:, None])
    scores = experience.teacher_record(head("b"), "a", spans_of(TEXTS, np.zeros((3, 4), np.int8)), SIZES)
    vote = experience.vote_record(head("b"), votes.count(ANSWERS), SIZES)
    write(tmp_path, [r, scores, vote])
    (tmp_path / "rollout" / ".part-00000009-00000010.parquet.writing").write_bytes(b"half")
    table = pyarrow.dataset.dataset(tmp_path / "rollout").to_table()
    assert len(table) == 6
    assert [bytes(x) for x in table["text"].to_pylist()] == [x.encode() for x in (*TEXTS[0], *TEXTS[2][:2])]
    assert table["problem"].to_pylist() == ["p/0"] * 4 + ["p/2"] * 2
    assert table["sample"].to_pylist() == [0, 1, 2, 3, 0, 1]
    assert [len(x) for x in table["token_logp"].to_pylist()] == table["n"].to_pylist()
    assert table["answer"].to_pylist() == ["12", None, None, "é", None, None]
    assert {"run", "step", "policy", "version", "label_source", "schema", "temperature", "eos_logp", "logp_sum"} <= set(
        table.column_names
    )
    assert pyarrow.dataset.dataset(tmp_path / "teacher_score").to_table()["learner"].to_pylist() == ["a"] * 12
    assert pyarrow.dataset.dataset(tmp_path / "vote").to_table()["answers"].to_pylist()[1] == ["7", "日本", "4"]
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_parquet(tmp_path / "rollout")
    assert len(frame) == 6 and frame.reward.tolist() == [1.0, 0, 0, 0.5, 1, 1]
    np.testing.assert_array_equal(frame.token_bytes[1], [2, 2, 1])


# Which step is replayed


def test_the_nearest_earlier_step_of_each_problem_is_replayed_and_never_a_later_one(tmp_path):
    said = {0: ("p/0", "p/1", "p/2"), 3: ("p/1", "x", "p/0"), 8: ("p/2", "p/1", "x")}
    records = [
        made(step=s, ids=ids, texts=tuple((f"{s} {x}",) * 4 for x in ids), answers=None) for s, ids in said.items()
    ]
    write(tmp_path, records)
    log = reader(tmp_path)
    for step in range(10):
        for problem in ("p/0", "p/1", "p/2", "x", "y"):
            past = [s for s, ids in said.items() if s <= step and problem in ids]
            got, missing = heard(log, step, (problem,))
            if past:
                assert texts_of(got) == {(problem, g): f"{max(past)} {problem}" for g in range(4) if got.valid[0, g]}
                assert got.valid[0].sum() in (3, 4) and got.header.step == step
            else:
                assert got is None and missing == {"absent": 1}
    got, _ = heard(log, 5, ("x", "y", "p/2"))
    assert {k[0] for k in texts_of(got)} == {"x", "p/2"} and not got.valid[1].any()


def test_the_same_problem_twice_in_a_step(tmp_path):
    write(tmp_path, [made(ids=("p", "q", "p"))])
    got, _ = heard(reader(tmp_path), 0, ("q", "p", "p"))
    np.testing.assert_array_equal(got.text[[0, 1, 2]], made().text[[1, 0, 2]])


def test_replay_is_what_was_heard_live(tmp_path):
    """The same steps, one run live and one from its log, hear the same; invalid rows apart, bit for bit."""
    rng = np.random.default_rng(0)
    topics = ("rollout", "trace", "stats", "capability")
    live = Exchange(run_of(), topics, run_id="run", folder=tmp_path / "exchange.log")
    slots, kept = ["rollout", "stats", "capability"], {}
    steps = [tuple(f"p/{i}" for i in rng.permutation(6)[:3]) for _ in range(5)]
    for step, ids in enumerate(steps):
        live.open()
        for name in NAMES:
            reward = rng.choice([0.0, 1.0, np.nan], (3, 4))
            r = record(name, step=step, ids=ids, reward=reward, seed=10 * step + (name == "b"), shape=SIZES)[0]
            live.publish(dataclasses.replace(r, valid=rng.random((3, 4)) < 0.8))
            live.publish(experience.stats_record(head(name, step=step, ids=ids), reward, SUCCESS, SIZES))
            live.publish(experience.capability_record(head(name, step=step, ids=ids), live.rates[name]))
            live.note_rewards(name, reward)
        kept[step] = dict(live.gather(step, slots, ids).of("a"))
        if step in (1, 3, 4):
            live.log.flush(step + 1)

    logs = {"ghost": LogSource(str(tmp_path / "exchange.log"), "b")}
    again = Exchange(run_of("a", logs=logs), topics, run_id="other")
    for step, ids in enumerate(steps):
        again.open()
        ((ghost, found),) = again.gather(step, slots, ids).of("a")
        (want,) = kept[step].values()
        assert ghost.name == "ghost" and ghost.index == 1 and list(found) == slots
        r, w = found["rollout"], want["rollout"]
        np.testing.assert_array_equal(r.valid, w.valid)
        for name, x in fields(w).items():
            y = fields(r)[name]
            assert np.asarray(x).dtype == np.asarray(y).dtype
            if np.ndim(x) >= 2:
                x, y = x[w.valid], y[w.valid]
            np.testing.assert_array_equal(x, y, err_msg=name)
        assert_same(found["stats"], want["stats"])
        np.testing.assert_array_equal(found["capability"].window, want["capability"].window)
    assert again.causes["ghost/reward"] == live.causes["b/reward"]


# Which rows were trained on


def trained(source, sample, group, surr=0.0, nll=0.0):
    """A batch of rows with these origins and weights; only what the log reads of it is there."""
    n = len(source)
    empty = {f.name: None for f in dataclasses.fields(batches.Batch)}
    as_row = lambda x, kind: np.broadcast_to(np.asarray(x, kind), n)
    return batches.Batch(
        **empty
        | {
            "source": as_row(source, np.int32),
            "sample": as_row(sample, np.int32),
            "group": as_row(group, np.int32),
            "surr_weight": as_row(surr, np.float32),
            "nll_weight": as_row(nll, np.float32),
        }
    )


def log_with_used(folder):
    log = LogWriter(folder)
    problems = [Problem(id=x, question="") for x in IDS]
    for step in (0, 4):
        for name in NAMES:
            log.add(made(name, step=step))
    # Learner a (index 0) at step 0: two rows of b, one of them twice, own rows, and one of b that has no weight.
    log.add_used(0, "a", 0, NAMES, problems, [trained([0, 1, 1], [3, 3, 0], [1, 1, 1], [0.5, 0, 0], [0, 0.25, 0])])
    log.add_used(0, "a", 0, NAMES, problems, [trained([0], [0], [0], 1.0), trained([1, 1], [3, 2], [1, 2], 0.1, 0.0)])
    log.add_used(4, "a", 0, NAMES, problems, [trained([1], [1], [0], nll=0.5)])
    log.add_used(0, "b", 1, NAMES, problems, [trained([0], [0], [0], nll=0.5)])
    log.flush(5)


def test_used_rows_are_received_ones_with_a_weight(tmp_path):
    log_with_used(tmp_path)
    used = pyarrow.dataset.dataset(tmp_path / "used").to_table().to_pylist()
    rows = [(x["step"], x["problem"], x["learner"], x["source"], x["sample"], x["update"]) for x in used]
    assert rows == [
        (0, "p/1", "a", "b", 3, 0), (0, "p/1", "a", "b", 3, 1), (0, "p/2", "a", "b", 2, 1), (4, "p/0", "a", "b", 1, 0),
        (0, "p/0", "b", "a", 0, 0),
    ]  # fmt: skip
    assert [(x["surr_weight"], x["nll_weight"]) for x in used[:2]] == [(0, 0.25), (np.float32(0.1), 0)]


def test_a_log_can_be_restricted_to_what_a_policy_trained_on(tmp_path):
    log_with_used(tmp_path)
    log = reader(tmp_path, used_by="a")
    rows = lambda step: set(texts_of(heard(log, step)[0]))
    assert rows(0) == {("p/1", 3), ("p/2", 2)}
    assert rows(3) == {("p/1", 3), ("p/2", 2)}
    # At step 4 the policy had all problems again, and only one row of the first was used.
    assert rows(4) == {("p/0", 1)}
    assert heard(log, 4, ("p/1",)) == (None, {})  # it was there; nothing of it was used
    with pytest.raises(ConfigError, match="exchange.logs.x.used_by='b'"):
        reader(tmp_path, used_by="b")


def test_a_problem_that_comes_twice_in_a_step_is_used_where_it_was_used(tmp_path):
    ids = ("p", "q", "p")
    log = LogWriter(tmp_path)
    log.add(made(ids=ids))
    problems = [Problem(id=x, question="") for x in ids]
    log.add_used(0, "a", 0, NAMES, problems, [trained([1, 1], [3, 1], [2, 0], nll=1.0)])
    log.flush(1)
    got, _ = heard(reader(tmp_path, used_by="a"), 0, ids)
    assert np.argwhere(got.valid).tolist() == [[0, 1], [2, 3]]


def test_used_rows_of_a_log_without_rollouts(tmp_path):
    write(tmp_path, [experience.stats_record(head("b"), REWARD, SUCCESS, SIZES)])
    assert reader(tmp_path, topics=("stats",)).record("stats", 0, IDS, SIZES, False)[0]
    with pytest.raises(ConfigError, match="exchange.logs.x.used_by='a'"):
        reader(tmp_path, used_by="a", topics=("stats",))


# A run that is killed


def test_a_killed_run_leaves_whole_parts_and_goes_on_from_its_checkpoint(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        log = LogWriter(folder)
        for step in range(6):
            for name in NAMES:
                log.add(made(name, step=step))
            log.add_used(step, "a", 0, NAMES, [Problem(id=x, question="") for x in IDS], [trained([1], [0], [0], 1.0)])
            if step % 2:
                log.flush(step + 1)
            if folder == killed and step == 4:
                break
    # Flushed at 4 and killed in step 4; the last complete checkpoint is that of step 2.
    assert sorted(x.name for x in (killed / "rollout").iterdir()) == [
        "part-00000000-00000001.parquet", "part-00000002-00000003.parquet",
    ]  # fmt: skip
    (killed / "rollout" / ".part-00000004-00000005.parquet.writing").write_bytes(b"half")
    log = LogWriter(killed)
    log.keep_to(2)
    assert [x.name for x in sorted((killed / "rollout").iterdir())] == ["part-00000000-00000001.parquet"]
    assert [x.name for x in sorted((killed / "used").iterdir())] == ["part-00000000-00000001.parquet"]
    for step in range(2, 6):
        for name in NAMES:
            log.add(made(name, step=step))
        log.add_used(step, "a", 0, NAMES, [Problem(id=x, question="") for x in IDS], [trained([1], [0], [0], 1.0)])
        if step % 2:
            log.flush(step + 1)
    for topic in ("rollout", "used"):
        a, b = (pyarrow.dataset.dataset(f / topic).to_table().to_pylist() for f in (straight, killed))
        assert len(a) > 0 and repr(a) == repr(b)  # NaN is NaN in repr
    log.keep_to(0)
    assert not list((killed / "rollout").iterdir())


def test_parts_up_to_the_step_are_kept(tmp_path):
    parts = four_parts(tmp_path)  # one of each of four steps
    LogWriter(tmp_path).keep_to(2)
    assert sorted((tmp_path / "rollout").iterdir()) == parts[:2]


def test_nothing_to_flush_writes_nothing(tmp_path):
    log = LogWriter(tmp_path / "exchange.log")
    log.keep_to(0)
    log.flush(3)
    assert not (tmp_path / "exchange.log").exists()


def test_a_step_in_which_a_policy_has_no_valid_row(tmp_path):
    nothing = dataclasses.replace(made("a"), valid=np.zeros((3, 4), bool))
    write(tmp_path / "alone", [nothing])
    assert not (tmp_path / "alone").exists()
    write(tmp_path / "among", [nothing, made("b"), nothing])
    assert len(texts_of(heard(reader(tmp_path / "among"), 0)[0])) == 12


# Logs that are not as they should be


def four_parts(folder):
    log = LogWriter(folder)
    for step in range(4):
        log.add(made(step=step))
        log.flush(step + 1)
    return sorted((folder / "rollout").glob("part-*"))


@pytest.mark.parametrize("how", ["cut", "empty", "noise", "flipped", "other"])
def test_a_damaged_part_is_passed_over_with_a_warning(tmp_path, how, caplog):
    path = four_parts(tmp_path)[2]
    raw = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(raw[: len(raw) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "noise":
        path.write_bytes(np.random.default_rng(0).bytes(len(raw)))
    elif how == "flipped":
        for at in range(100, len(raw) // 2, 50):
            raw[at] ^= 0x55
        path.write_bytes(raw)
    else:
        pq.write_table(pyarrow.table({"step": [1]}), path)
    with caplog.at_level(logging.WARNING):
        log = reader(tmp_path)
    assert log.damaged == 1 and str(path) in caplog.text and "passed over" in caplog.text
    whole = made(step=1)
    for step in (1, 2):  # what the damaged part had is replayed from the step before
        np.testing.assert_array_equal(heard(log, step)[0].logp_sum, whole.logp_sum)
    np.testing.assert_array_equal(heard(log, 3)[0].logp_sum, made(step=3).logp_sum)


def test_no_flipped_bit_in_the_data_goes_unnoticed(tmp_path):
    path = four_parts(tmp_path)[2]
    raw, group = path.read_bytes(), pq.read_metadata(path).row_group(0)
    for column in (group.column(i) for i in range(group.num_columns)):
        begin = column.dictionary_page_offset or column.data_page_offset
        flipped = bytearray(raw)
        flipped[begin + column.total_compressed_size - 1] ^= 0x10  # without checksums most of these go unnoticed
        path.write_bytes(flipped)
        assert reader(tmp_path).damaged == 1, column.path_in_schema


def test_rows_of_another_schema_are_passed_over(tmp_path, caplog):
    old = made(step=1)
    old = dataclasses.replace(old, header=dataclasses.replace(old.header, schema=experience.SCHEMA + 1))
    write(tmp_path, [made(step=0), old])
    with caplog.at_level(logging.WARNING):
        log = reader(tmp_path)
    assert "12 rows of another schema" in caplog.text
    np.testing.assert_array_equal(heard(log, 1)[0].logp_sum, made(step=0).logp_sum)


def test_rows_that_do_not_fit_this_run_are_counted(tmp_path):
    write(tmp_path, [made()])
    log = reader(tmp_path)
    for smaller, lost in (({"U": 15}, 1), ({"T": 7}, 1), ({"G": 3}, 3), ({"A": 5}, 1)):
        shape = dataclasses.replace(SIZES, **smaller)
        got, missing = heard(log, 0, shape=shape)
        assert missing == {"overflow": lost} and got.valid.sum() == 12 - lost
        assert got.text.shape == (shape.P, shape.G, shape.U) and got.token_bytes.shape[-1] == shape.T


def test_rows_without_log_probs_do_not_count_where_they_are_needed(tmp_path):
    log = LogWriter(tmp_path)
    log.add(made(step=0, traced=False))
    log.flush(1)
    with pytest.raises(ConfigError, match="exchange.logs.x.folder=.*no log-probs"):
        reader(tmp_path)
    assert heard(reader(tmp_path, topics=("rollout",)), 0, traced=False)[0].valid.all()
    log.add(made(step=1))  # the run went on with another regime
    log.flush(2)
    log = reader(tmp_path)
    assert heard(log, 1)[0].valid.all()
    got, missing = heard(log, 0)
    assert missing == {"trace": 12} and not got.valid.any()


@pytest.mark.parametrize("column", ["text", "reward", "occurrence", "temperature"])
def test_a_part_without_a_column_is_passed_over(tmp_path, column):
    log = LogWriter(tmp_path)
    for step in (0, 1):
        log.add(made(step=step))
        log.flush(step + 1)
    path = tmp_path / "rollout" / "part-00000001-00000001.parquet"
    pq.write_table(pq.read_table(path).drop_columns([column]), path)
    found = reader(tmp_path)
    assert found.damaged == 1
    np.testing.assert_array_equal(heard(found, 1)[0].logp_sum, made(step=0).logp_sum)


def test_log_probs_that_are_not_as_many_as_tokens_are_none(tmp_path):
    write(tmp_path, [made()])
    path = tmp_path / "rollout" / "part-00000000-00999999.parquet"
    table = pq.read_table(path)
    longer = [x * 20 if i == 3 else x for i, x in enumerate(table["token_logp"].to_pylist())]
    at = table.column_names.index("token_logp")
    pq.write_table(table.set_column(at, "token_logp", pyarrow.array(longer, pyarrow.list_(pyarrow.float32()))), path)
    got, missing = heard(reader(tmp_path), 0)
    assert missing == {"trace": 1} and not got.valid[0, 3] and got.valid.sum() == 11


def test_rows_of_several_label_sources_are_to_be_judged_again(tmp_path):
    write(tmp_path, [made(step=0), made(step=1, ids=("p/1",), texts=TEXTS[1:2], label="vote")])
    log = reader(tmp_path)
    assert heard(log, 0)[0].header.label_source == "verifier"
    assert heard(log, 1, ("p/1",))[0].header.label_source == "vote"
    assert heard(log, 1)[0].header.label_source == ""


def test_refusals_name_the_setting(tmp_path):
    with pytest.raises(ConfigError, match=r"exchange\.logs\.x\.folder=.*no such folder"):
        reader(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"exchange\.logs\.x\.policy='b'.*no rollout"):
        reader(tmp_path)
    write(tmp_path, [made()])
    with pytest.raises(ConfigError, match=r"exchange\.logs\.x\.policy='z'.*must be one of b"):
        reader(tmp_path, "z")
    with pytest.raises(ConfigError, match=r"exchange\.logs\.x\.policy='b'.*no stats"):
        reader(tmp_path, topics=("stats",))
    with pytest.raises(ConfigError, match=r"exchange\.logs\.x\.used_by='a'"):
        reader(tmp_path, used_by="a")


def test_a_log_that_is_absent_or_damaged_in_a_row_is_counted_by_the_exchange(tmp_path):
    bad = made(step=1)
    text = bad.text.copy()
    text[0, 0, 0] = 0xFF
    write(tmp_path, [dataclasses.replace(bad, text=text)])
    e = Exchange(run_of("a", logs={"x": LogSource(str(tmp_path), "b")}), ("rollout", "trace"), run_id="run")
    assert e.gather(0, ["rollout"], IDS).of("a") == []
    assert e.causes == {"x/absent": 1}
    ((_, found),) = e.gather(1, ["rollout"], IDS).of("a")
    assert e.causes["x/utf8"] == 1 and not found["rollout"].valid[0, 0] and found["rollout"].valid[0, 1]


def test_a_log_is_not_waited_for_where_it_cannot_speak(tmp_path):
    write(tmp_path, [made()])
    run = run_of("a", logs={"x": LogSource(str(tmp_path), "b")})
    e = Exchange(run, ("rollout", "teacher_score"), run_id="run")
    assert e.gather(0, ["teacher_score/a", "vote"], IDS).of("a") == [] and e.causes == {}
