"""Graders on cases with known verdicts, next to math-verify alone, and answers per second on two worker processes.

    python benchmarks/graders.py --cases grader_cases.jsonl --out graders.json

A case is a JSON line with `gold`, `pred` (an answer or a whole reply), `equal` (the right verdict), `kind`: `plain` and
`extract` go to the grader `math`, `choice` to `choice`; of `convention`, where graders differ, the agreement is given
and nothing is asked. Verdicts that are not the right ones are printed. Speeds are of the answers of `plain` and
`extract`, the better of two passes over them; math-verify's is of one process on its main thread, all that it can use.

The file is a list of rows {name, value, unit, ratio_to, machine}; `ratio_to` maps what a value is compared with to
value / compared. Without math-verify's own rows (`--alone`) it takes a few seconds.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mutualrl.rewards.workers import GraderPool
from mutualrl.types import Problem

GRADERS = {"plain": "math", "extract": "math", "choice": "choice", "convention": "math"}
TARGET = 500.0  # ordinary answers a second on two cores
Case = dict[str, str | bool]


def math_verify_alone(cases: Sequence[Case]) -> np.ndarray:
    """bool[n] math-verify's own verdicts, as its README shows it, with its own time limits."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    out = []
    for c in cases:
        gold = c["gold"] if "$" in c["gold"] or "\\boxed" in c["gold"] else f"${c['gold']}$"
        try:
            out.append(bool(verify(parse(gold), parse(c["pred"]))))
        except Exception:  # it raises on some of what models write
            out.append(False)
    return np.array(out)


def ours(pool: GraderPool, cases: Sequence[Case]) -> np.ndarray:
    """bool[n] verdicts of a grader."""
    rewards, _ = pool.grade([c["pred"] for c in cases], [Problem("", "", answer=c["gold"]) for c in cases])
    return rewards >= 1


def timed(run: Callable[[], np.ndarray], passes: int = 2) -> tuple[np.ndarray, float]:
    """What `run` returns, and the seconds of its quickest pass."""
    seconds = []
    for _ in range(passes):
        start = time.perf_counter()
        found = run()
        seconds.append(time.perf_counter() - start)
    return found, min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=Path, required=True, help="JSON lines file of cases")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--alone", action="store_true", help="leave math-verify out")
    args = parser.parse_args()
    machine, rows = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores", []
    cases = [json.loads(line) for line in args.cases.open(encoding="utf-8")]

    def add(name: str, value: float, unit: str, **ratio_to: float) -> None:
        rows.append({"name": name, "value": value, "unit": unit, "ratio_to": ratio_to, "machine": machine})
        compared = "".join(f"   {ratio:.3g} x {other}" for other, ratio in ratio_to.items())
        print(f"{name:40} {value:10.4g} {unit}{compared}", flush=True)

    for kind, grader in GRADERS.items():
        some = [c for c in cases if c["kind"] == kind]
        right = np.array([c["equal"] for c in some])
        with GraderPool(grader) as pool:
            verdicts = ours(pool, some)
            version = pool.version
        print(f"\n{kind}: {len(some)} cases, {version}")
        other = None if args.alone or grader != "math" else math_verify_alone(some)
        measures = {
            "agreement": lambda v, right: (v == right).mean(),
            "false_positives": lambda v, right: (v & ~right).sum(),
            "false_negatives": lambda v, right: (~v & right).sum(),
        }
        for name, found in measures.items():
            value, theirs = float(found(verdicts, right)), None if other is None else float(found(other, right))
            unit = "share" if name == "agreement" else "cases"
            add(f"{kind}.{name}", value, unit, **({"math-verify": value / theirs} if theirs else {}))
            if theirs is not None:
                add(f"{kind}.{name}.math_verify", theirs, unit)
        if kind != "convention":
            for c, v in zip(some, verdicts):
                if v != c["equal"]:
                    print(f"  should be {'equal' if c['equal'] else 'different'}: {c['gold']!r} and {c['pred']!r}")

    ordinary = [c for c in cases if c["kind"] in ("plain", "extract")] * 4
    print("\nspeed")
    with GraderPool("math", workers=2) as pool:
        ours(pool, ordinary[:8])  # starts the workers
        _, seconds = timed(lambda: ours(pool, ordinary))
        speed = len(ordinary) / seconds
        lost = pool.timeouts + pool.crashes
    ratios = {"target of 500 answers/s": speed / TARGET}
    if not args.alone:
        _, theirs = timed(lambda: math_verify_alone(ordinary), passes=1)
        ratios["math-verify"] = speed / (len(ordinary) / theirs)
        add("math.speed.math_verify", len(ordinary) / theirs, "answers/s")
    add("math.speed", speed, "answers/s", **ratios)
    add("math.lost", float(lost), "answers")
    args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
