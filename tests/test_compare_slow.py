"""A small comparison from end to end, as a user runs it: warm-ups, runs in parallel, an interruption, the report."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFIG = f"""
import runpy
def get_config():
    config = runpy.run_path({str(ROOT / "configs/compare_demo.py")!r})["get_config"]()
    base = config.base
    base.data.kinds = KINDS = ("rev", "inc", "comp", "dup")
    base.steps, base.eval_every, base.eval_problems = 80, 20, 80
    for model in base.warmup.policies.values():
        model["steps"] = 800
        model["right"] = {{k: model["right"][k] for k in KINDS}}
    config.arms = {{name: config.arms[name] for name in ("grpo", "sgt", "sft")}}
    config.seeds, config.contrasts = (0, 1), ("sgt/sft",)
    return config
"""


@pytest.mark.slow
def test_a_small_comparison_is_interrupted_goes_on_and_reports(tmp_path):
    file, work = tmp_path / "small.py", tmp_path / "work"
    file.write_text(CONFIG)
    command = [sys.executable, "-m", "mutualrl.compare", f"--config={file}", f"--workdir={work}",
               f"--config.base.warmup.folder={tmp_path / 'models'}"]  # fmt: skip
    # The suite's own settings of XLA are for its other tests.
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}

    first = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 900
    while not list(work.glob("*/*/summary.json")) and time.monotonic() < until and first.poll() is None:
        time.sleep(0.5)
    first.send_signal(signal.SIGTERM)
    assert first.wait(60) == 128 + signal.SIGTERM
    done = {p: p.stat().st_mtime_ns for p in work.glob("*/*/summary.json")}
    assert 1 <= len(done) < 6

    again = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert again.returncode == 0, again.stderr[-2000:]
    assert f"{len(done)} of 6 runs are finished already" in again.stderr
    assert all(p.stat().st_mtime_ns == at for p, at in done.items())

    found = json.loads((work / "compare.json").read_text())
    assert found["missing"] == {} and list(found["arms"]) == ["grpo", "sgt", "sft"]
    # So short a warm-up may leave a policy unable to do a kind at which it is only meant to be poor.
    assert "dup" in found["groups"]["llama"]["peer_only"] and "comp" in found["groups"]["qwen"]["peer_only"]
    for policy in ("llama", "qwen"):
        of = {arm: e["policies"][policy] for arm, e in found["arms"].items()}
        alone, peer = (of[arm]["accuracy"]["all"]["after"]["value"] for arm in ("grpo", "sgt"))
        assert peer > alone - 0.05  # 80 steps are too few to promise more
        assert of["grpo"]["accuracy"]["all"]["before"]["seeds"] == of["sgt"]["accuracy"]["all"]["before"]["seeds"]
        assert of["sgt"]["metrics"]["rescue/used"]["mean"] > 0.5
        # `sft` was shown the very rows that `sgt` trained on.
        assert of["sft"]["metrics"]["peer_rows"]["mean"] == pytest.approx(of["sgt"]["metrics"]["peer_rows"]["mean"])
    page = (work / "report.html").read_text()
    assert page.count("<svg") == 4 and found["statements"] and all(s["text"] in page for s in found["statements"])

    before = (work / "sgt/0/log.txt").stat().st_size
    assert subprocess.run(command, env=env, cwd=ROOT, capture_output=True, timeout=300).returncode == 0
    assert (work / "sgt/0/log.txt").stat().st_size == before
