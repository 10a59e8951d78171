"""Speed of the tokenizer bridge on one core: traces, encoders, alignment.

    python benchmarks/bridge.py --out bridge.json [tokenizer folder ...]

Without folders two byte-level BPEs are trained on the spot; with them every ordered pair is measured. The log-probs are
random, the ids are the source's own encoding of made-up texts of prose, sums, code and other scripts.

The file is a list of rows {name, value, unit, ratio_to, machine}; `ratio_to` maps what a value is compared with to
value / compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import tempfile
import time
from pathlib import Path

import numpy as np

from mutualrl.tokenizers import bridge
from mutualrl.tokenizers.bridge import GRANULARITIES, SPLITS, ByteTable
from mutualrl.tokenizers.tokenizer import Tokenizer
from mutualrl.tokenizers.train import train
from mutualrl.types import STOP

TARGET = 1e6  # tokens/s of the alignment alone
WORDS = (
    "the of we is that and to number so in be two a by this it equal sum which first step for then have at total sides "
    "each must answer Let integer therefore from Since both product condition value Hence second factor let's "
    "substitute triangle However expression equation simplify probability divisible polynomial contradiction"
).split()
OTHER = (
    "\\[ \\frac{{{}}}{{{}}} = \\sqrt{{{}}} \\]\n", "{} + {} = {}\n", "**Step {}:** $x_{} \\le {}$\n\n",
    "def f(x):\n    return x ** {} + {} * x - {}\n", "因此答案是 {}，而不是 {} 或 {}。", "Ответ: {}, {} или {}. ",
    "🙂👍🏽 {} {} {} ", "الجواب {} {} {} ",
)  # fmt: skip


def made_up_text(rng: np.random.Generator, size: int) -> str:
    """About `size` characters: runs of words, frequent ones first in `WORDS`, with other things between them."""
    frequency = 1 / np.arange(1, len(WORDS) + 1)
    parts, length = [], 0
    while length < size:
        words = rng.choice(WORDS, rng.integers(5, 40), p=frequency / frequency.sum())
        part = " ".join(words) + ". " + str(rng.choice(OTHER)).format(*rng.integers(0, 500, 3))
        parts.append(part)
        length += len(part)
    return "".join(parts)


def best_seconds(run, repeats: int) -> float:
    """The shortest of several runs: other work on the machine only ever adds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(source: Tokenizer, learner: Tokenizer, texts: list[str], repeats: int) -> dict[str, float]:
    """name → tokens/s of each stage from `source` to `learner`; the text's tokens on the side the stage works on."""
    rng = np.random.default_rng(0)
    rows = [[*source.encode(text), source.stop_ids[0]] for text in texts]
    lengths = np.array([len(ids) for ids in rows])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.zeros(mask.shape, np.int32)
    ids[mask] = np.concatenate(rows)
    logprobs = np.where(mask, -rng.exponential(1.0, mask.shape), 0).astype(np.float32)
    finish, table, learner_table = (
        np.full(len(rows), STOP),
        ByteTable(source.token_bytes),
        ByteTable(learner.token_bytes),
    )
    make_trace = lambda: bridge.trace(ids, mask, logprobs, finish, table)[0]
    trace = make_trace()
    stopped = np.ones(len(rows), bool)
    retokenise = lambda: bridge.retokenise(
        trace.text, trace.text_bytes, trace.valid, learner, stopped=stopped, length=8192, table=learner_table
    )
    got = retokenise()
    if not got.ok.all():
        raise SystemExit(f"{source.name} -> {learner.name}: texts were refused: {got.causes}")
    width = int(got.mask.sum(-1).max())
    ends, prior = got.ends[:, :width], -rng.exponential(1.0, (len(rows), width))
    decoded = [row[:n].tobytes().decode() for row, n in zip(trace.text, trace.text_bytes)]
    sources, targets = int(trace.n.sum()), int(got.n.sum())
    found = {
        "trace": sources / best_seconds(make_trace, repeats),
        "encode": targets / best_seconds(lambda: [learner.encode(text) for text in decoded], repeats),
        "retokenise": targets / best_seconds(retokenise, repeats),
    }
    for granularity, split in itertools.product(GRANULARITIES, SPLITS):
        run = lambda g=granularity, s=split: bridge.align(trace, ends, got.n, granularity=g, split=s, prior=prior)
        found[f"align.{granularity}.{split}"] = targets / best_seconds(run, repeats)
    return found


def machine() -> str:
    """The processor, in words."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, one core of {os.cpu_count()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tokenizers", nargs="*", help="folders of lossless tokenizers; two at least")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--rows", type=int, default=256, help="texts")
    parser.add_argument("--size", type=int, default=4000, help="characters of a text")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    texts = [made_up_text(rng, args.size) for _ in range(args.rows)]
    if args.tokenizers:
        loaded = {Path(folder).name: Tokenizer.load(folder) for folder in args.tokenizers}
    else:
        loaded = {}
        for size in (400, 1000):
            with tempfile.TemporaryDirectory() as folder:
                train(folder, "bpe", texts[:64], size=size)
                loaded[f"bpe{size}"] = Tokenizer.load(folder)
    rows, where = [], machine()
    for source, learner in itertools.permutations(loaded, 2):
        for stage, value in measure(loaded[source], loaded[learner], texts, args.repeats).items():
            name = f"bridge.{stage}.{source}-{learner}"
            ratio = {"target of 1e6 tokens/s": value / TARGET} if stage.startswith("align") else {}
            rows.append({"name": name, "value": value, "unit": "tokens/s", "ratio_to": ratio, "machine": where})
            print(f"{name:60} {value / 1e6:8.2f} million tokens/s", flush=True)
    args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
