"""Signatures of collapse at both sides of their thresholds, curves by hand, and what the command writes."""

import json
import xml.etree.ElementTree as ET

import pytest

from mutualrl.analysis import labels
from mutualrl.analysis.runs import Run, open_runs

STEPS = 20  # so that a tenth is two of them
HEALTHY = {"reward/group_std": (0.4, 0.2), "length/mean": (100, 80), "entropy": (1.0, 0.5), "reward/mean": (0.5, 0.9)}
N = 40


def write_run(folder, *, right=(20, 24), label=None, frozen=False, steps=STEPS, **ends):
    """A run of policies `llama` and a frozen `qwen`. Metrics are at their first value in the first half of the steps,
    then at the second; so many of N problems are `right` before and after."""
    folder.mkdir(parents=True)
    policies = {"llama": {"frozen": frozen}, "qwen": {"frozen": True}}
    config = {"steps": steps, "label": label or {"name": "self_vote", "n_vote": 8}, "policies": policies}
    (folder / "summary.json").write_text(json.dumps({"config": config}))
    evaluations = {s: {p: [1] * n + [0] * (N - n) for p in policies} for s, n in zip(("0", str(steps)), right)}
    ids = [f"p{i}" for i in range(N)]
    held_out = {"problems": ids, "kinds": ["add"] * N, "samples": 1, "steps": evaluations}
    (folder / "held_out.json").write_text(json.dumps(held_out))
    lines = [{"step": 0, "llama/held_out/accuracy": right[0] / N}]
    for step in range(1, steps + 1):
        lines.append({"step": step} | {f"llama/{m}": v[step > steps / 2] for m, v in {**HEALTHY, **ends}.items() if v})
    lines.append({"step": steps, "llama/held_out/accuracy": right[1] / N})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


@pytest.mark.parametrize(
    "more, found",
    [
        ({}, []),
        ({"reward/group_std": (0.4, 0.041)}, []),
        ({"reward/group_std": (0.4, 0.039)}, ["flat_rewards"]),
        ({"length/mean": (100, 199)}, []),
        ({"length/mean": (100, 201)}, ["length"]),
        ({"length/mean": (100, 51)}, []),
        ({"length/mean": (100, 49)}, ["length"]),
        ({"entropy": (1.0, 0.11)}, []),
        ({"entropy": (1.0, 0.09)}, ["entropy"]),
        ({"right": (30, 29)}, []),  # less, but not by more than its interval
        ({"right": (30, 20)}, ["reward_without_accuracy"]),
        ({"right": (30, 2), "reward/mean": (0.5, 0.4)}, ["accuracy"]),
        ({"right": (30, 20), "reward/mean": (0.5, 0.5)}, []),  # the reward did not rise
        ({"entropy": (1.0, 0.0), "length/mean": (100, 1)}, ["length", "entropy"]),
    ],
)
def test_signatures(tmp_path, more, found):
    run = Run("", 0, write_run(tmp_path / "run", **more))
    signatures = labels.signatures(run, "llama")
    assert set(signatures) == set(labels.RULE)
    assert [k for k, s in signatures.items() if s["found"]] == found
    said = labels.said(signatures)
    assert (said == "no signature of collapse") == (not found)
    assert all(signatures[k]["text"] in said for k in found)
    json.dumps(signatures, allow_nan=False)


def test_the_words_hold_the_numbers(tmp_path):
    run = Run("", 0, write_run(tmp_path / "run", **{"length/mean": (200, 20), "right": (30, 20)}))
    said = labels.said(labels.signatures(run, "llama"))
    assert "mean length 200 → 20 tokens" in said and "held-out pass@1 0.750 → 0.500 (-0.250 [" in said
    # Where accuracy is no signature it is said with the others, because flat rewards alone may be mastery.
    run = Run("", 0, write_run(tmp_path / "learnt", **{"reward/group_std": (0.4, 0.0), "right": (20, 40)}))
    said = labels.said(labels.signatures(run, "llama"))
    assert "reward std within groups 0.4 → 0" in said and "for comparison, held-out pass@1 0.500 → 1.000" in said


def test_what_cannot_be_judged_is_absent(tmp_path):
    run = Run("", 0, write_run(tmp_path / "run", **{"entropy": None, "reward/group_std": (0.0, 0.0)}))
    assert set(labels.signatures(run, "llama")) == {"length", "accuracy", "reward_without_accuracy"}
    assert labels.signatures(run, "qwen") == {}  # no metrics at all
    assert labels.said({}) == "nothing to judge a collapse by"


def test_ends_are_the_first_and_the_last_tenth(tmp_path):
    folder = write_run(tmp_path / "run")
    lines = [{"step": s, "llama/entropy": float(s)} for s in range(1, STEPS + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    run = Run("", 0, folder)
    assert labels.ends(run, "llama/entropy") == (1.5, 19.5) and labels.ends(run, "llama/length/mean") is None


def test_curves_average_many_steps_and_show_gaps(tmp_path, monkeypatch):
    monkeypatch.setattr(labels, "POINTS", 2)
    runs = [Run("", s, write_run(tmp_path / str(s))) for s in (0, 1)]
    found = labels.curves(runs, "llama")
    assert found["entropy"] == {"steps": [10, 20], "seeds": {"0": [1.0, 0.5], "1": [1.0, 0.5]}}
    assert found["held_out/accuracy"] == {"steps": [0, 20], "seeds": {"0": [0.5, 0.6], "1": [0.5, 0.6]}}
    assert "label/acc" not in found
    runs[1].lines = [x for x in runs[1].lines if x["step"] <= 10]
    assert labels.curves(runs, "llama")["entropy"]["seeds"]["1"] == [1.0, None]


def test_of_runs(tmp_path):
    metrics = {"label/acc": (0.5, 0.75), "agreement": (0.4, 0.6), "wrong_consensus": (0.1, 0.2)}
    a, b = write_run(tmp_path / "a", **metrics), write_run(tmp_path / "b", label="verifier")
    found = labels.of_runs(open_runs([str(a), str(b)]))
    assert list(found["runs"]) == ["a", "b"] and found["runs"]["b"]["label"] == "verifier"
    entry = found["runs"]["a"]
    assert entry["label"] == "self_vote" and list(entry["policies"]) == ["llama"]  # a frozen one does not learn
    of = entry["policies"]["llama"]["metrics"]
    assert of["label/acc"] == {"start": 0.5, "end": 0.75} and of["wrong_consensus"]["end"] == pytest.approx(0.2)
    assert of["held_out/accuracy"] == {"start": 0.5, "end": 0.6}
    assert labels.has_labels(open_runs([str(a)])["a"]) and not labels.has_labels(open_runs([str(b)])["b"])


def test_command(tmp_path, monkeypatch, capsys):
    ill = write_run(tmp_path / "ill", **{"label/acc": (0.5, 0.25), "entropy": (1.0, 0.01)})
    well = write_run(tmp_path / "well")
    monkeypatch.setattr("sys.argv", ["labels", str(well), str(ill), f"--out={tmp_path / 'found'}"])
    labels.main()
    printed = capsys.readouterr().out
    assert "ill, llama: entropy 1 → 0.01 nats" in printed and "well, llama: no signature of collapse" in printed
    assert printed.index("ill, llama") < printed.index("well, llama")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["runs"]["ill"]["policies"]["llama"]["collapse"]["entropy"]["found"] is True
    assert found["rule"].keys() == labels.RULE.keys()
    page = (tmp_path / "found.html").read_text()
    assert "ill, llama: entropy" in page and "0.50 → 0.25" in page and "src=" not in page
    texts = " ".join(ET.fromstring("<svg" + page.split("<svg")[1].split("</svg>")[0] + "</svg>").itertext())
    assert all(t in texts for t in ("label accuracy", "ill (self_vote)", "held-out pass@1"))
    monkeypatch.setattr("sys.argv", ["labels", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit, match="must be the folder of a finished run") as error:
        labels.main()
    assert "\n" not in str(error.value)
