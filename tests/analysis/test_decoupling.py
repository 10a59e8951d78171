"""κ, c and w of pairs of policies against ones worked out by hand, and intervals against the truth they must hold."""

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from mutualrl.analysis import decoupling
from mutualrl.analysis.decoupling import Evaluated, apart, counts
from mutualrl.analysis.runs import open_runs
from mutualrl.settings import ConfigError

KINDS = ["a", "a", "b", "b"]


def an(right, samples=1, wrong=None):
    return Evaluated(np.array(right), samples, wrong)


def one(table, kinds=None, **more):
    return apart([np.asarray(table, float)], [np.zeros(len(table)) if kinds is None else np.array(kinds)], **more)


def test_counts_are_expectations_over_pairs_of_samples():
    a = an([2, 1, 0], 4, [["1", None], ["1", "1", None], ["1", "1", "2", "2"]])
    b = an([1, 0, -1], 2, [["1"], ["1", None], ["1", "1"]])
    table = counts(a, b)
    # 2 of 4 and 1 of 2 right: each of the four cases a quarter. Both wrong with answer 1: 1/4 · 1/2.
    np.testing.assert_allclose(table[0], [0.25, 0.25, 0.25, 0.25, 1 / 8])
    # 1 of 4 right; both say 1: 2/4 · 1/2. No answer equals no answer in nothing.
    np.testing.assert_allclose(table[1], [0, 0.25, 0, 0.75, 1 / 4])
    assert np.isnan(table[2]).all()  # b could not be judged
    np.testing.assert_allclose(counts(b, a)[:2], table[:2, [0, 2, 1, 3, 4]])
    np.testing.assert_allclose(counts(an([2], 2, [[]]), an([2], 2, [[]])), [[1, 0, 0, 0, 0]])  # nothing is wrong


def test_without_wrong_answers_there_is_no_w():
    told, untold = an([1, 0], 2, [["1"], ["1", "1"]]), an([1, 0], 2)
    for pair in ((told, untold), (untold, told), (untold, untold)):
        table = counts(*pair)
        assert np.isnan(table[:, 4]).all()
        np.testing.assert_allclose(table[:, :4], counts(told, told)[:, :4])
        e = one(table)
        assert "w" not in e and "w" not in e["interval"] and "c" in e["interval"]
    assert one(counts(told, told))["w"] == pytest.approx(100 * (0.25 + 1) / 2)
    assert "w" not in decoupling.decoupling(40, 15, 10, 35)


def test_single_samples_are_the_statistics_of_counted_problems():
    x, y = np.array([1] * 55 + [0] * 45), np.array([1] * 40 + [0] * 15 + [1] * 10 + [0] * 35)
    # Both are wrong from 65 on, with equal answers before 88.
    mine = [[] if ok else [str(i)] for i, ok in enumerate(x)]
    theirs = [[] if ok else [str(i if i < 88 else -i)] for i, ok in enumerate(y)]
    e = one(counts(an(x, 1, mine), an(y, 1, theirs)))
    counted = decoupling.decoupling(40, 15, 10, 35, 23)
    assert {k: e[k] for k in counted} == pytest.approx(counted)
    assert counted["kappa"] == pytest.approx(0.5) and counted["w"] == pytest.approx(23)


def test_intervals_are_those_of_statistics_of_resampled_problems():
    rng = np.random.default_rng(3)
    x, y = rng.integers(5, size=(2, 60))
    table = counts(an(x, 4), an(y, 4))
    e = one(table)
    drawn = []
    for _ in range(3000):  # the same by another route
        sums = table[rng.integers(60, size=60)].sum(0)
        drawn.append([decoupling.decoupling(*sums[:4])[k] for k in ("kappa", "c")])
    expected = np.quantile(drawn, [0.025, 0.975], axis=0)
    width = expected[1] - expected[0]
    for i, key in enumerate(("kappa", "c")):
        assert np.abs(np.array(e["interval"][key]) - expected[:, i]).max() < 0.08 * width[i]
        assert e["interval"][key][0] < e[key] < e["interval"][key][1]
    assert one(table) == e  # a fixed seed
    assert one(table, seed=1) != e


def test_intervals_hold_the_truth():
    rng = np.random.default_rng(5)
    # Two policies whose chances on a problem share a part: the truth by one very large set.
    draw = lambda n: np.clip(0.5 + rng.choice([-0.3, 0.3], n) + rng.uniform(-0.2, 0.2, (2, n)), 0, 1)
    x, y = draw(1_000_000)
    truth = decoupling.decoupling(
        (x * y).mean(), (x * (1 - y)).mean(), ((1 - x) * y).mean(), ((1 - x) * (1 - y)).mean()
    )
    hits = dict.fromkeys(("kappa", "c"), 0)
    for _ in range(200):
        pair = [an(rng.binomial(4, p), 4) for p in draw(100)]
        e = one(counts(*pair), draws=400)
        for key in hits:
            hits[key] += e["interval"][key][0] <= truth[key] <= e["interval"][key][1]
    assert min(hits.values()) / 200 >= 0.9  # 0.95 minus three standard errors


def test_kinds_do_not_widen_an_interval():
    table = counts(an([1] * 50 + [1] * 50), an([1] * 50 + [0] * 50))  # they differ in all of one kind
    kinds = ["a"] * 50 + ["b"] * 50
    assert one(table, kinds)["interval"]["c"] == [50.0, 50.0]
    low, high = one(table)["interval"]["c"]
    assert low < 42 and high > 58


def test_what_is_undefined_is_absent():
    e = one(counts(an([1, 1]), an([1, 1])))
    assert "kappa" not in e and "kappa" not in e["interval"] and e["c"] == 0.0 and e["interval"]["c"] == [0.0, 0.0]
    e = one(counts(an([1, 1, 0]), an([1, 1, 0])))  # some draws are without the third problem
    assert e["kappa"] == pytest.approx(1.0) and "kappa" not in e["interval"]
    for tables in ([], [np.full((2, 5), np.nan)]):
        with pytest.raises(ValueError, match="at least one"):
            apart(tables, [np.zeros(2)] * len(tables))


def test_several_seeds_are_averaged_and_widen_the_interval():
    rng = np.random.default_rng(1)
    right = rng.integers(2, size=(2, 200))
    same, other = counts(an(right[0]), an(right[0])), counts(an(right[0]), an(right[1]))
    kinds = np.zeros(200)
    both = apart([same, other], [kinds, kinds])
    alone = apart([other, other], [kinds, kinds])
    assert both["c"] == pytest.approx((0 + one(other)["c"]) / 2) and both["kappa"] == pytest.approx(
        (1 + one(other)["kappa"]) / 2
    )
    width = lambda e: e["interval"]["c"][1] - e["interval"]["c"][0]
    assert width(both) > 3 * width(alone) and both["interval"]["c"][0] == 0.0  # not below what is possible


def write_run(folder, steps, *, wrong=None, label="verifier", problems=("p0", "p1", "p2", "p3"), samples=2):
    folder.mkdir(parents=True)
    policies = {p: {"frozen": False} for p in next(iter(steps.values()))}
    config = {"steps": 10, "label": label, "policies": policies}
    (folder / "summary.json").write_text(json.dumps({"config": config, "policies": {}, "exchange": {}}))
    held_out = {"problems": list(problems), "kinds": KINDS, "samples": samples, "steps": steps}
    (folder / "held_out.json").write_text(json.dumps(held_out | ({"wrong": wrong} if wrong else {})))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    return str(folder)


STEPS = {"0": {"llama": [2, 0, 0, 1], "qwen": [0, 2, 1, 0]}, "10": {"llama": [2, 2, 1, 0], "qwen": [2, 2, 0, 0]}}
SAID = {2: [], 1: ["1"], 0: ["1", "2"]}
WRONG = {s: {p: [SAID[c] for c in right] for p, right in of.items()} for s, of in STEPS.items()}


def test_pairs_of_one_run(tmp_path):
    found = decoupling.of_runs(open_runs([write_run(tmp_path / "one", STEPS, wrong=WRONG)]))
    assert list(found["pairs"]) == ["llama & qwen"] and found["problems"] == 4
    assert found["runs"]["one"]["steps"] == [0, 10] and found["runs"]["one"]["label"] == "verifier"
    times = found["pairs"]["llama & qwen"]
    # Exactly one right: 1, 1, .5, .5 of a problem before; 0, 0, .5, 0 after.
    assert times["before"]["c"] == pytest.approx(75.0) and times["after"]["c"] == pytest.approx(12.5)
    # After: p2, llama one 1, qwen 1 and 2: 1/2 · 1/2; p3, both 1 and 2: 2/4.
    assert times["after"]["w"] == pytest.approx(100 * (0.25 + 0.5) / 4)
    # Before: p2, llama 1 and 2, qwen one 1: 1/4; p3 the other way round: 1/4.
    assert times["before"]["w"] == pytest.approx(100 * 0.5 / 4)


def test_pairs_across_runs_and_folders_without_wrong_answers(tmp_path):
    first = write_run(tmp_path / "peer/0", STEPS, wrong=WRONG, label={"name": "peer_vote", "min_share": 0.0})
    other = {s: {"llama": of["llama"]} for s, of in STEPS.items()}
    other["0"]["llama"] = [2, 0, 0, -1]
    second = write_run(tmp_path / "self/0", other)
    found = decoupling.of_runs(open_runs([first, second]))
    assert list(found["pairs"]) == [
        "peer/0:llama & peer/0:qwen", "peer/0:llama & self/0:llama", "peer/0:qwen & self/0:llama",
    ]  # fmt: skip
    assert found["problems"] == 3  # p3 could not be judged in one evaluation, so nowhere
    across = found["pairs"]["peer/0:llama & self/0:llama"]["after"]
    assert across["c"] == pytest.approx(100 * 0.5 / 3) and "w" not in across
    assert "w" in found["pairs"]["peer/0:llama & peer/0:qwen"]["after"]
    assert found["runs"]["peer/0"]["label"] == "peer_vote" and found["runs"]["self/0"]["label"] == "verifier"


def test_evaluations_noted_without_wrong_answers_have_no_w(tmp_path):
    found = decoupling.of_runs(open_runs([write_run(tmp_path / "one", STEPS, wrong={"10": WRONG["10"]})]))
    times = found["pairs"]["llama & qwen"]
    assert "w" not in times["before"] and times["after"]["w"] == pytest.approx(100 * (0.25 + 0.5) / 4)
    _, rows = decoupling.rows(found["pairs"])
    assert rows[0][4] == ("-", "") and rows[1][4][0].startswith("18.8 [")


def test_refusals_are_one_line(tmp_path):
    a = write_run(tmp_path / "a", STEPS)
    b = write_run(tmp_path / "b", STEPS, problems=("p0", "p1", "p2", "p9"))
    single = write_run(tmp_path / "c", {s: {"llama": of["llama"]} for s, of in STEPS.items()})
    with pytest.raises(ConfigError, match="b: has other held-out problems than .*a; policies are paired") as error:
        decoupling.of_runs(open_runs([a, b]))
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="one policy"):
        decoupling.of_runs(open_runs([single]))
    with pytest.raises(ConfigError, match="given twice"):
        open_runs([a, a + "/../a"])
    with pytest.raises(ConfigError, match="nowhere: must be the folder of a finished run"):
        open_runs([a, str(tmp_path / "nowhere")])
    with pytest.raises(ConfigError, match="RUN is missing"):
        open_runs([])


def test_command(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "one", STEPS, wrong=WRONG)
    monkeypatch.setattr("sys.argv", ["decoupling", run, f"--out={tmp_path / 'found'}"])
    decoupling.main()
    printed = capsys.readouterr().out
    assert "llama & qwen" in printed and "12.5" in printed and "found.html" in printed
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["schema"] == 1 and found["pairs"]["llama & qwen"]["after"]["c"] == 12.5
    page = (tmp_path / "found.html").read_text()
    assert "src=" not in page and "llama &amp; qwen" in page and "12.5 [" in page
    texts = " ".join(ET.fromstring("<svg" + page.split("<svg")[1].split("</svg>")[0] + "</svg>").itertext())
    assert "1  llama & qwen" in texts and "before training" in texts
    for argv, message in (([run, "--oot=x"], "oot"), ([run, f"--out={tmp_path}/no/x"], "can be written to")):
        monkeypatch.setattr("sys.argv", ["decoupling", *argv])
        with pytest.raises(SystemExit, match=message) as error:
            decoupling.main()
        assert "\n" not in str(error.value)
