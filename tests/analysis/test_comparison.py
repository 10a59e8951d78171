"""Numbers of a comparison against ones worked out by hand, from folders made up for it; and what the report says."""

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from mutualrl.analysis import comparison_report
from mutualrl.analysis.claims import statements, verdict
from mutualrl.analysis.comparison import collect
from mutualrl.analysis.intervals import hierarchical_interval
from mutualrl.settings import ConfigError

# Two problems of each kind, four samples each. `comp` only llama can do, `dup` only qwen.
KINDS = ["comp", "comp", "dup", "dup", "rev", "rev"]
BEFORE = {"llama": [4, 2, 0, 0, 2, 2], "qwen": [0, 0, 4, 4, 1, 3]}
# step 10 of seed 0, step 10 of seed 1
AFTER = {
    "grpo": [{"llama": [4, 4, 0, 0, 4, 2], "qwen": [0, 0, 4, 4, 4, 4]}] * 2,
    "sgt": [
        {"llama": [4, 4, 4, 2, 4, 4], "qwen": [2, 0, 4, 4, 0, 0]},
        {"llama": [4, 4, 4, 0, 2, 2], "qwen": [0, 0, 4, 4, 0, 0]},
    ],
    "sgt_log": [{"llama": [4, 4, 4, 4, 4, 4], "qwen": [4, 4, 4, 4, 4, 4]}] * 2,
}
TOKENS = {"grpo": (100, 100, 0), "sgt": (100, 130, 20), "sgt_log": (100, 150, 0)}  # llama's; qwen has twice as many


def write_run(folder, arm, seed):
    folder.mkdir(parents=True)
    frozen = {"llama": {"frozen": False}, "qwen": {"frozen": False}}
    logs = {}
    if arm == "sgt_log":
        logs = {f"{p}_log": {"folder": f"elsewhere/sgt/{seed}/exchange.log", "policy": p} for p in ("llama", "qwen")}
    config = {
        "steps": 10, "label": "verifier", "policies": frozen, "exchange": {"logs": logs},
        "transfer": {"name": "none" if arm == "grpo" else "sgt"},
    }  # fmt: skip
    kinds = ("generated", "trained", "scored")
    policies = {
        p: {"tokens": {k: n * times for k, n in zip(kinds, TOKENS[arm])}} for p, times in (("llama", 1), ("qwen", 2))
    }
    exchange = (
        {"bytes_sent": {"llama": 600, "qwen": 400 + seed}, "dropped": {"llama/text/utf8": 2 + 2 * seed}}
        if arm == "sgt"
        else {}
    )
    (folder / "summary.json").write_text(json.dumps({"config": config, "policies": policies, "exchange": exchange}))
    half = {p: [(a + b) // 2 for a, b in zip(BEFORE[p], AFTER[arm][seed][p])] for p in BEFORE}
    steps = {"0": BEFORE, "10": AFTER[arm][seed], "5": half}
    problems = [f"{k}/{i}/{seed}" for i, k in enumerate(KINDS)]
    (folder / "held_out.json").write_text(
        json.dumps({"problems": problems, "kinds": KINDS, "samples": 4, "steps": steps})
    )
    lines = [{"step": 0, "llama/held_out/accuracy": 0.5}]
    for step in range(1, 11):
        line = {"step": step, "time/sample": 0.5, "time/update": 50.0 if step == 1 else 1.0, "llama/entropy": step / 10}
        line["llama/rescue/all_fail"] = 0.0 if step > 2 else 0.5 / step  # 0.5, 0.25, then none
        if arm == "sgt" and step <= 2:
            line["llama/rescue/available"] = 1.0 if step == 1 else 0.25
        lines.append(line)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("work")
    found = {arm: {s: root / arm / str(s) for s in (0, 1)} for arm in AFTER}
    for arm in AFTER:
        for s in (0, 1):
            write_run(found[arm][s], arm, s)
    return found


@pytest.fixture(scope="module")
def found(folders):
    return collect(folders, baseline="grpo", contrasts=[("sgt", "sgt_log")])


def test_groups_of_kinds_come_from_before_training(found):
    assert found["groups"]["llama"] == {
        "all": ["comp", "dup", "rev"], "main": ["rev"], "peer_only": ["dup"], "own_only": ["comp"],
    }  # fmt: skip
    assert found["groups"]["qwen"]["peer_only"] == ["comp"] and found["groups"]["qwen"]["own_only"] == ["dup"]
    assert found["policies"] == ["llama", "qwen"] and found["steps"] == 10 and found["missing"] == {}


def test_accuracies_by_hand(found):
    a = found["arms"]["sgt"]["policies"]["llama"]["accuracy"]
    assert a["all"]["before"]["value"] == pytest.approx(10 / 24)
    assert a["all"]["after"]["seeds"] == {"0": pytest.approx(22 / 24), "1": pytest.approx(16 / 24)}
    assert a["all"]["after"]["value"] == pytest.approx(19 / 24) and a["all"]["after"]["problems"] == 6
    assert a["all"]["gain"]["value"] == pytest.approx(9 / 24)
    # grpo: 14/24 with both seeds
    assert a["all"]["minus"]["grpo"]["seeds"] == {"0": pytest.approx(8 / 24), "1": pytest.approx(2 / 24)}
    assert a["peer_only"]["minus"]["grpo"]["value"] == pytest.approx(5 / 8)
    assert a["main"]["minus"]["grpo"]["value"] == pytest.approx(0.0)
    assert set(a["all"]["minus"]) == {"grpo", "sgt_log"}
    assert a["all"]["minus"]["sgt_log"]["value"] == pytest.approx(-5 / 24)
    for group in a.values():
        for e in (group["before"], group["after"], *group["minus"].values()):
            assert e["interval"][0] <= e["value"] <= e["interval"][1]


def test_pass_at_k_by_hand(found):
    p = found["arms"]["sgt"]["policies"]["qwen"]["pass@k"]["peer_only"]
    # 2 of 4 right in one of two problems of one seed: pass@2 of it is 1 - C(2,2)/C(4,2) = 5/6
    assert p["2"]["after"]["value"] == pytest.approx(5 / 6 / 2 / 2) and p["4"]["after"]["value"] == pytest.approx(0.25)
    assert set(p) == {"2", "4"}


def test_first_step_with_half_right(found):
    # seed 0 at step 5: (2 + 1)/8, at 10: 6/8; seed 1 at 5: 2/8, at 10: 4/8
    assert found["arms"]["sgt"]["policies"]["llama"]["half"] == {"dup": {"0": 10, "1": 10}}
    assert found["arms"]["sgt_log"]["policies"]["llama"]["half"] == {"dup": {"0": 5, "1": 5}}
    assert found["arms"]["grpo"]["policies"]["qwen"]["half"] == {"comp": {"0": None, "1": None}}
    assert found["arms"]["sgt"]["policies"]["llama"]["curves"]["peer_only"] == {
        "steps": [0, 5, 10], "seeds": {"0": [0.0, 0.375, 0.75], "1": [0.0, 0.25, 0.5]},
    }  # fmt: skip


def test_costs_in_both_readings(found):
    tokens = {arm: e["policies"]["llama"]["tokens"] for arm, e in found["arms"].items()}
    # Ten steps of 1.5 s; the first one's compiling does not count. A third of the tokens are llama's.
    assert found["arms"]["grpo"]["seconds"] == pytest.approx(15.0)
    assert tokens["grpo"]["own"] == {"generated": 100, "trained": 100, "scored": 0, "seconds": pytest.approx(5.0)}
    assert tokens["grpo"]["joint"] == tokens["grpo"]["own"]  # nobody hears anybody
    assert tokens["sgt"]["own"]["trained"] == 130 and tokens["sgt"]["joint"]["trained"] == 390
    assert tokens["sgt"]["joint"]["seconds"] == pytest.approx(15.0)
    assert tokens["sgt_log"]["joint"]["generated"] == 300 + 300  # and the run that wrote the logs, once
    ratio = found["arms"]["sgt"]["policies"]["llama"]["ratio"]
    assert ratio["own"]["generated"] == 1.0 and ratio["joint"]["generated"] == 3.0 and "scored" not in ratio["own"]
    assert found["arms"]["sgt"]["bytes_sent"] == 1000.5 and found["arms"]["sgt"]["dropped"] == {"llama/text/utf8": 3.0}


def test_training_metrics(found):
    metrics = found["arms"]["sgt"]["policies"]["llama"]["metrics"]
    assert metrics["entropy"] == {"mean": pytest.approx(0.55), "end": pytest.approx(0.9)}  # steps 8, 9, 10
    assert metrics["rescue/all_fail"]["mean"] == pytest.approx(0.075)
    # of the problems without own success, not of steps: (0.5 · 1 + 0.25 · 0.25)/0.75
    assert metrics["rescue/available"] == {"mean": pytest.approx(0.75)}
    assert "kl/ref" not in metrics


def test_noise_of_evaluation_and_decoupling(found):
    # grpo, llama: one problem with 2 of 4 right: variance of its mean 0.25/3; qwen: none
    arm = found["arms"]["grpo"]
    assert arm["policies"]["llama"]["evaluation_noise"] == pytest.approx(np.sqrt(0.25 / 3) / 6)
    assert arm["policies"]["qwen"]["evaluation_noise"] == 0.0
    # After: llama 1 1 0 0 1 .5, qwen 0 0 1 1 1 1: exactly one right in 4.5 of 6
    assert arm["decoupling"]["llama/qwen"]["after"]["c"] == pytest.approx(75.0)


def test_decoupling_has_intervals_and_no_w_without_wrong_answers(found):
    after = found["arms"]["sgt"]["decoupling"]["llama/qwen"]["after"]
    assert after["problems"] == 6 and "w" not in after and "w" not in after["interval"]
    assert after["interval"]["c"][0] < after["c"] < after["interval"]["c"][1]


def add_labels(folder, **collapsed):
    """Makes a run one that learnt from labels, with wrong answers."""
    summary = json.loads((folder / "summary.json").read_text())
    summary["config"]["label"] = {"name": "peer_vote", "min_share": 0.5}
    (folder / "summary.json").write_text(json.dumps(summary))
    held_out = json.loads((folder / "held_out.json").read_text())
    held_out["wrong"] = {
        s: {p: [["1"] * (4 - c) for c in right] for p, right in of.items()} for s, of in held_out["steps"].items()
    }
    (folder / "held_out.json").write_text(json.dumps(held_out))
    lines = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        late = line["step"] > 5
        for p in ("llama", "qwen"):
            line |= {f"{p}/label/acc": 0.8 if late else 0.6, f"{p}/agreement": 0.7, f"{p}/wrong_consensus": 0.125}
            line |= {f"{p}/length/mean": 10.0 if late and p in collapsed else 100.0, f"{p}/reward/group_std": 0.25}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))


def test_labels_have_a_section_where_some_arm_has_them(folders, found, tmp_path):
    assert found["arms"]["sgt"]["label"] == "verifier" and "<h2>Labels</h2>" not in comparison_report.page(found)
    assert "collapse" not in found["arms"]["sgt"]["policies"]["llama"]
    for seed in (0, 1):
        write_run(tmp_path / f"sgt/{seed}", "sgt", seed)
        add_labels(tmp_path / f"sgt/{seed}", **({"llama": True} if seed else {}))
    labelled = collect({"grpo": folders["grpo"], "sgt": {s: tmp_path / f"sgt/{s}" for s in (0, 1)}}, baseline="grpo")
    arm = labelled["arms"]["sgt"]
    assert arm["label"] == "peer_vote" and labelled["arms"]["grpo"]["label"] == "verifier"
    assert arm["policies"]["llama"]["metrics"]["label/acc"] == {"mean": pytest.approx(0.7), "end": pytest.approx(0.8)}
    assert arm["policies"]["llama"]["metrics"]["wrong_consensus"]["end"] == pytest.approx(0.125)
    collapse = arm["policies"]["llama"]["collapse"]
    assert [collapse[s]["length"]["found"] for s in ("0", "1")] == [False, True]
    # Every wrong answer is 1. Seed 0 after: llama 4 4 4 2 4 4, qwen 2 0 4 4 0 0: nowhere both wrong.
    # Seed 1: llama 4 4 4 0 2 2, qwen 0 0 4 4 0 0: the two of `rev`, half of llama's.
    assert arm["decoupling"]["llama/qwen"]["after"]["w"] == pytest.approx((0 + 100 * (0.5 + 0.5) / 6) / 2)
    assert "w" not in labelled["arms"]["grpo"]["decoupling"]["llama/qwen"]["after"]
    page = comparison_report.page(labelled)
    for text in (
        "<h2>Labels</h2>",
        "label accuracy",
        "1 of 2",
        "sgt, seed 1: mean length 100 → 10 tokens",
        "κ against c",
    ):
        assert text in page, text
    assert "sgt, seed 0:" not in page and page.count("<svg") == 4 + 2 + 1
    json.dumps(labelled, allow_nan=False)


def test_rows_are_flat_and_say_what_they_are_relative_to(found):
    rows = {r["name"]: r for r in found["rows"]}
    row = rows["sgt/llama/all/after"]
    assert set(row) == {"name", "value", "unit", "ratio_to", "machine"} and row["unit"] == "pass@1"
    assert row["value"] == pytest.approx(19 / 24) and row["ratio_to"] == {"grpo": pytest.approx(19 / 14)}
    assert (
        rows["sgt/qwen/generated/joint"]["ratio_to"] == {"grpo": 1.5} and rows["grpo/llama/all/after"]["ratio_to"] == {}
    )


def test_missing_runs_are_said(folders):
    some = {**folders, "sgt": {0: folders["sgt"][0], 1: folders["sgt"][0] / "nowhere"}}
    found = collect(some, baseline="grpo", failed={"sgt_log/0": "exit status 1:\nlong log", "sgt_log/1": "not run"})
    assert set(found["missing"]) == {"sgt/1", "sgt_log/0", "sgt_log/1"} and "exit status 1:" in str(found["missing"])
    assert found["arms"]["sgt"]["seeds"] == [0] and "sgt_log" not in found["arms"]
    for s in found["statements"]:
        assert s["verdict"] == "open" or s["against"] == "before" or "one seed only" in s["text"]
    page = comparison_report.page(found)
    assert "sgt_log/0" in page and "Missing runs" in page
    with pytest.raises(ConfigError, match="nothing to report"):
        collect({"grpo": {0: folders["sgt"][0] / "nowhere"}}, baseline="grpo")


def test_other_problems_are_not_compared(folders, tmp_path):
    write_run(tmp_path / "sgt/0", "sgt", 0)
    held_out = json.loads((tmp_path / "sgt/0/held_out.json").read_text())
    (tmp_path / "sgt/0/held_out.json").write_text(json.dumps({**held_out, "problems": held_out["problems"][::-1]}))
    with pytest.raises(ConfigError, match="other held-out problems"):
        collect({"grpo": folders["grpo"], "sgt": {0: tmp_path / "sgt/0"}}, baseline="grpo")


def test_problems_that_could_not_be_judged_do_not_count(folders, tmp_path):
    write_run(tmp_path / "sgt/0", "sgt", 0)
    held_out = json.loads((tmp_path / "sgt/0/held_out.json").read_text())
    held_out["steps"]["5"]["qwen"][3] = -1  # a `dup` problem, in one evaluation of one policy
    (tmp_path / "sgt/0/held_out.json").write_text(json.dumps(held_out))
    found = collect({"grpo": folders["grpo"], "sgt": {0: tmp_path / "sgt/0"}}, baseline="grpo")
    e = found["arms"]["sgt"]["policies"]["llama"]["accuracy"]["peer_only"]
    assert e["after"]["value"] == 1.0 and e["after"]["problems"] == 1  # 4 of 4 in the other one
    assert e["minus"]["grpo"]["value"] == 1.0 and e["minus"]["grpo"]["problems"] == 1
    assert found["arms"]["grpo"]["policies"]["llama"]["accuracy"]["peer_only"]["after"]["problems"] == 2


def test_report_holds_numbers_and_plots(found, tmp_path, capsys):
    comparison_report.write(found, tmp_path)
    assert json.loads((tmp_path / "compare.json").read_text()) == json.loads(json.dumps(found))
    page = (tmp_path / "report.html").read_text()
    for text in ("0.792", "+0.208", "dup 10 10", "3.00×", "Harm to either side", "llama/text/utf8 3.0", "κ"):
        assert text in page, text
    assert page == comparison_report.page(found)  # the same numbers, the same page
    assert "src=" not in page and 'href="http' not in page and "@import" not in page  # nothing is fetched
    plots = ["<svg" + p.split("</svg>")[0] + "</svg>" for p in page.split("<svg")[1:]]
    assert len(plots) == 4  # curves and bars of two policies
    for plot in plots:
        texts = " ".join(ET.fromstring(plot).itertext())
        assert "grpo" in texts and "sgt_log" in texts
    comparison_report.show(found, tmp_path)
    printed = capsys.readouterr().out
    assert printed.startswith("Harm to either side")
    assert all(text in printed for text in ("0.79", "+0.21", "report.html"))


def an(value, low, high, seeds=3):
    return {"value": value, "interval": [low, high], "seeds": {str(s): value for s in range(seeds)}}


@pytest.mark.parametrize(
    "estimate, expected, text",
    [
        (an(0.1, 0.02, 0.2), "better", "sgt is better than grpo for llama on the main kinds: +0.100 [+0.020, +0.200]"),
        (an(-0.1, -0.2, -0.02), "worse", "sgt is worse than grpo for llama on the main kinds"),
        (an(0.1, -0.01, 0.2), "open", "no difference shown, +0.100 [-0.010, +0.200]; the interval includes 0"),
        (an(0.1, 0.0, 0.2), "open", "the interval includes 0"),
        (an(0.015, 0.01, 0.02, seeds=1), "open", "one seed decides nothing below 0.02"),
        (an(0.1, 0.05, 0.2, seeds=1), "better", "one seed only, so this says nothing about others"),
    ],
)
def test_statements_claim_what_the_interval_supports(estimate, expected, text):
    assert verdict(estimate) == expected
    accuracy = {"main": {"minus": {"grpo": estimate}, "gain": an(0.3, 0.2, 0.4)}}
    (said,) = statements({"arms": {"sgt": {"policies": {"llama": {"accuracy": accuracy}}}}})
    assert said["verdict"] == expected and text in said["text"]


def test_harm_comes_first_also_against_the_start():
    accuracy = {
        "all": {"minus": {"grpo": an(0.1, 0.02, 0.2)}, "gain": an(0.3, 0.2, 0.4)},
        "own_only": {"minus": {"grpo": an(0.0, -0.1, 0.1)}, "gain": an(-0.3, -0.4, -0.2)},
    }
    found = {"baseline": "grpo", "arms": {"prp": {"policies": {"qwen": {"accuracy": accuracy}}}}}
    found["statements"] = statements(found)
    assert [s["verdict"] for s in found["statements"]] == ["worse", "better", "open"]
    assert "made qwen worse than it was on kinds only this policy can do: -0.300" in found["statements"][0]["text"]
    from mutualrl.analysis.claims import harm

    assert harm(found) == "Harm to either side: 1 case established."


@pytest.mark.parametrize(
    "seeds, seed_spread, problem_spread", [(3, 0.0, 0.4), (3, 0.05, 0.4), (3, 0.2, 0.2), (5, 0.1, 0.3)]
)
def test_intervals_hold_the_truth(seeds, seed_spread, problem_spread):
    rng = np.random.default_rng(7)
    hits, trials = 0, 150
    kinds = np.repeat(["a", "b"], 20)
    for _ in range(trials):
        # A normal's two-point version for problems: few different values, as accuracies have.
        noise = problem_spread * rng.choice([-1.0, 1.0], (seeds, 40))
        values = 0.3 + seed_spread * rng.standard_normal((seeds, 1)) + noise + np.where(kinds == "a", -0.2, 0.2)
        low, high = hierarchical_interval(list(values), [kinds] * seeds, draws=400)
        hits += low <= 0.3 <= high
    assert hits / trials >= 0.91  # 0.95 minus 2.3 standard errors


def test_kinds_do_not_widen_an_interval():
    kinds = np.repeat(["a", "b"], 50)
    values = [np.where(kinds == "a", 1.0, 0.0)] * 3  # differs between kinds only: a fixed half of each
    assert hierarchical_interval(values, [kinds] * 3) == [0.5, 0.5]
    low, high = hierarchical_interval(values, [np.repeat("a", 100)] * 3)
    assert low < 0.46 and high > 0.54


def test_degenerate_intervals():
    one = np.array(["a"])
    assert hierarchical_interval([np.array([0.25])], [one]) == [0.25, 0.25]
    low, high = hierarchical_interval([np.array([0.2]), np.array([0.4])], [one, one])
    assert low < -0.5 and high > 1.1  # two seeds say next to nothing
    for bad in ([], [np.zeros(0)]):
        with pytest.raises(ValueError, match="at least one seed"):
            hierarchical_interval(bad, [np.zeros(len(b)) for b in bad])
