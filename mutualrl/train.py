"""The loop: a cohort of policies, one step after the other.

    python -m mutualrl.train --config=configs/demo.py --workdir=runs/demo [--config.steps=50 ...]

The same command takes up a run that was stopped, from its last complete checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mutualrl import metrics, report
from mutualrl.checkpoint import Checkpoints, last_record
from mutualrl.cohort import build, open_grader, prepare
from mutualrl.config import ConfigError, RunConfig, label_options, label_source, regime, transfer_options
from mutualrl.data.stream import ProblemStream, fingerprint
from mutualrl.evaluate import evaluate
from mutualrl.exchange import Exchange
from mutualrl.experience import NAME_BYTES
from mutualrl.files import replace_text
from mutualrl.labelling import Labelling, wordings
from mutualrl.meshes import make_plan
from mutualrl.policy import Policy
from mutualrl.rewards.workers import GraderPool
from mutualrl.scores import Scores, complete, shaped_rewards
from mutualrl.settings import differences
from mutualrl.sharing import Sharing
from mutualrl.summary import write_summary
from mutualrl.types import Problem


def train_step(
    step: int,
    cohort: Sequence[Policy],
    problems: Sequence[Problem],
    labelling: Labelling,
    transfer: Any,
    sharing: Sharing,
) -> dict[str, dict[str, float]]:
    """One cohort step: sample, label, share, build batches, update. Verbs of all policies are dispatched together.

    Args:
      step: number of the step, from 0.
      cohort: the policies; the states of those that are not frozen move on.
      problems: the step's P problems, the same for all.
      labelling: who says what is right. transfer: module of `mutualrl.transfer`.
      sharing: what crosses between policies.

    Returns:
      metrics of every policy by name, and under '' those of the step (seconds a stage).
    """
    clock = [time.monotonic()]
    sharing.begin_step()
    rollouts, generated = labelling.collect(labelling.sample(problems, step))
    clock.append(time.monotonic())

    verdicts, labels = labelling.label(step, rollouts)
    clock.append(time.monotonic())

    learners = [p for p in cohort if not p.config.frozen]
    scores = Scores(cohort)
    rewards = shaped_rewards(scores, cohort, rollouts, verdicts)
    materials = sharing.share(step, rollouts, verdicts, rewards, scores)
    clock.append(time.monotonic())

    asked = scores.of({p.name: rows for p in learners if (rows := transfer.to_score(materials[p.name])) is not None})
    built = {p.name: transfer.build(dataclasses.replace(materials[p.name], scored=asked.get(p.name))) for p in learners}
    batches = complete(scores, {name: out for name, (out, _) in built.items()})
    updates = {p.name: [p.update(batch) for batch in batches[p.name]] for p in learners}
    results = {p.name: metrics.of_rollouts(rollouts[p.name], verdicts[p.name]) | labels[p.name] for p in cohort}
    for p in cohort:
        results[p.name]["tokens/generated"] = float(generated[p.name])
    for p in learners:
        done = [u.result() for u in updates[p.name]]
        results[p.name] |= metrics.of_updates(done) | built[p.name][1]
        results[p.name] |= sharing.learnt(step, p, materials[p.name], batches[p.name], done)
        results[p.name]["tokens/scored"] = float(scores.tokens[p.name])
    labelling.end_step(step)
    sharing.end_step(verdicts)
    clock.append(time.monotonic())
    seconds = {f"time/{k}": b - a for k, a, b in zip(("sample", "label", "share", "update"), clock, clock[1:])}
    return {**results, "": seconds}


def train(run: RunConfig, workdir: str | Path) -> dict[str, Any]:
    """Runs the cohort from its last checkpoint (or the start) to the end; see the module's docstring.

    Args:
      run: the settings, from `mutualrl.config.read`.
      workdir: folder of checkpoints, metrics.jsonl, tensorboard/, config.json, held_out.json and summary.json, and of
        exchange.log where that is on.

    Returns:
      the contents of summary.json.

    Raises:
      ConfigError: something cannot work; raised before any weight is loaded.
    """
    with open_grader(run) as grader:
        return _train(run, Path(workdir), grader)


def _train(run: RunConfig, workdir: Path, grader: GraderPool) -> dict[str, Any]:
    started = time.monotonic()
    plan = make_plan(run.policies, run.plan)
    problems, held_out, opened, dropped = prepare(run, grader)
    stream = ProblemStream(problems, run.seed)
    progress = {
        "policies": list(run.policies),
        "seed": run.seed,
        "steps": run.steps,
        "stream": stream.state(),
        "held_out": fingerprint(held_out),
        "evaluations": {},
        "tokens": {name: {} for name in run.policies},
        "seconds": 0.0,
        "dropped": dropped,
        "grader": grader.version,
    }
    if (record := last_record(workdir / "checkpoints")) is not None:
        check_same_run(record, progress, run, workdir)

    topics = regime(run).topics(transfer_options(run))
    exchange = Exchange(run, topics, run_id=workdir.name, folder=workdir / "exchange.log" if run.exchange.log else None)
    if topics or exchange.voters:
        check_names(wordings(problems, label_source(run).needs(label_options(run)).views))
    workdir.mkdir(parents=True, exist_ok=True)
    report.show_start(run, plan, opened)
    cohort = build(run, opened, plan)
    labelling = Labelling(run, cohort, exchange, grader)
    transfer, sharing = regime(run), Sharing(run, cohort, labelling, exchange)
    checkpoints = Checkpoints(workdir / "checkpoints", cohort, keep=run.checkpoint_keep)
    first_step = 0
    if (restored := checkpoints.restore()) is not None:
        first_step, saved = restored
        stream.restore(saved["stream"])
        if saved["held_out"] != progress["held_out"]:
            logging.warning("%s: other held-out problems than before; earlier evaluations are dropped", workdir)
            saved["evaluations"] = {}
        if "sharing" in saved:  # not before policies exchanged anything
            sharing.restore(saved["sharing"])
        progress = {**progress, **{k: saved[k] for k in ("evaluations", "tokens", "seconds")}}
        logging.warning("%s goes on after step %d", workdir, first_step)
    note_config(run, workdir)
    if exchange.log:
        exchange.log.keep_to(first_step)
    before_seconds = progress["seconds"]
    warn = report.Warnings()
    # As many slots as in training, so that an evaluation needs no more memory.
    step_rollouts = run.problems_per_step * min(p.group_size for p in run.policies.values())

    kept = first_step if restored else -1
    writer = metrics.MetricWriter(workdir, tensorboard=run.tensorboard, keep_to=kept)

    def assess(step: int, title: str) -> None:
        if held_out and str(step) not in progress["evaluations"]:
            with report.Progress(title, len(held_out)) as bar:
                found = evaluate(
                    cohort,
                    held_out,
                    grader,
                    samples=run.eval_samples,
                    temperature=run.eval_temperature,
                    top_p=run.eval_top_p,
                    top_k=run.eval_top_k,
                    batch=max(1, step_rollouts // run.eval_samples),
                    advance=bar.update,
                )
            note_held_out(workdir, step, held_out, run.eval_samples, found)
            progress["evaluations"][str(step)] = found
            writer.write(step, {f"{name}/held_out/accuracy": r["accuracy"] for name, r in found.items()})

    def save(step: int) -> None:
        progress["seconds"] = before_seconds + time.monotonic() - started
        progress["sharing"] = sharing.state()
        if exchange.log:
            exchange.log.flush(step)
        checkpoints.save(step, {**progress, "stream": stream.state()})

    if first_step == 0:
        assess(0, "Evaluating before training")
    with report.Progress("Training", run.steps, done=first_step) as bar:
        for step in range(first_step, run.steps):
            found = train_step(step, cohort, stream.next(run.problems_per_step), labelling, transfer, sharing)
            count_tokens(progress["tokens"], found)
            check_health(found, run, warn, sharing.counts())
            done = step + 1
            writer.write(done, flatten(found, grader, sharing))
            bar.update(done, describe(found))
            if done < run.steps and run.eval_every and done % run.eval_every == 0:
                assess(done, f"Evaluating after step {done}")
            if done < run.steps and run.checkpoint_every and done % run.checkpoint_every == 0:
                save(done)
    assess(run.steps, "Evaluating after training")
    if first_step < run.steps:
        save(run.steps)
    writer.close()
    checkpoints.close()
    return write_summary(workdir, run, cohort, progress, sharing.summary())


def check_names(problems: Sequence[Problem]) -> None:
    """Refuses problems whose names are too long to cross between policies.

    Raises:
      ConfigError.
    """
    longest = max((x.id for x in problems), key=lambda x: len(x.encode()))
    if len(longest.encode()) > NAME_BYTES:
        raise ConfigError(
            f"data: the problem id {longest[:60]!r}… has {len(longest.encode())} bytes: at most {NAME_BYTES}"
        )


def check_same_run(record: Mapping[str, Any], now: Mapping[str, Any], run: RunConfig, workdir: Path) -> None:
    """Refuses to go on from a checkpoint of another run.

    Args:
      record: of the newest checkpoint. now: what a run with the present settings starts with.

    Raises:
      ConfigError: other policies, seed or data, or fewer steps than are done.
    """
    here = f"the checkpoints in {workdir}"
    if sorted(record["policies"]) != sorted(now["policies"]):
        raise ConfigError(
            f"policies={', '.join(now['policies'])}: {here} are of {', '.join(record['policies'])}; use another workdir"
        )
    if record["seed"] != run.seed:
        raise ConfigError(f"seed={run.seed}: {here} are of seed {record['seed']}; use another workdir")
    if record["stream"]["fingerprint"] != now["stream"]["fingerprint"]:
        raise ConfigError(f"data: the problems are not those of {here}; use another workdir")
    if record["step"] > run.steps:
        raise ConfigError(f"steps={run.steps}: {here} have {record['step']} steps already")
    decaying = [name for name, p in run.policies.items() if p.schedule != "constant" or p.warmup_fraction]
    if record["steps"] != run.steps and decaying:
        logging.warning(
            "steps was %d, now %d: the schedules of %s are sized anew", record["steps"], run.steps, ", ".join(decaying)
        )


def note_config(run: RunConfig, workdir: Path) -> None:
    """Writes config.json; where there is one of an earlier try, says what has changed since."""
    path, now = workdir / "config.json", json.loads(json.dumps(dataclasses.asdict(run)))
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError):
        before = now
    if changed := differences(before, now):
        logging.warning("%s was begun with other settings: %s", workdir, "; ".join(changed))
    replace_text(path, json.dumps(now, indent=1) + "\n")


def note_held_out(
    workdir: Path, step: int, problems: Sequence[Problem], samples: int, found: Mapping[str, dict[str, Any]]
) -> None:
    """Moves the right samples and the wrong answers of every problem from an evaluation's results to held_out.json:

    {"problems": [id], "kinds": [kind of each], "samples": n, "steps": {step: {policy: [right samples of each]}},
     "wrong": {step: {policy: [[answer, or null, of each wrong sample] of each]}}}
    """
    path = workdir / "held_out.json"
    here = {"problems": [x.id for x in problems], "kinds": [x.kind for x in problems], "samples": samples}
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError):
        before = {}
    same = all(before.get(k) == v for k, v in here.items())
    for key, part in (("steps", "right"), ("wrong", "wrong")):
        here[key] = before.get(key, {}) if same else {}
        here[key][str(step)] = {name: result.pop(part) for name, result in found.items()}
    replace_text(path, json.dumps(here) + "\n")


def count_tokens(totals: dict[str, dict[str, int]], found: Mapping[str, Mapping[str, float]]) -> None:
    """Adds a step's generated, trained and scored tokens to the totals of every policy."""
    for name, total in totals.items():
        for kind in ("generated", "trained", "scored"):
            total[kind] = total.get(kind, 0) + int(found[name].get(f"tokens/{kind}", 0))  # a frozen policy trains none


def check_health(
    found: Mapping[str, Mapping[str, float]], run: RunConfig, warn: report.Warnings, dropped: Mapping[str, int]
) -> None:
    """Warns, once each, of what usually means that a run is not doing what its owner thinks.

    Args:
      dropped: from `Sharing.counts`.
    """
    for key in dropped:
        if key.endswith("/absent"):
            name = key.partition("/")[0]
            warn(key, f"{name} was absent from the exchange in a step; who hears it learnt without it, see {key}")
    for name, policy in run.policies.items():
        m = found[name]
        gap = m.get("mismatch/mean_abs", 0.0)
        limit = run.mismatch_limit if policy.dtype == "float32" else max(run.mismatch_limit, 0.1)
        signs = {
            "mismatch": (
                gap > limit,
                f"sampler and trainer log-probs differ by {gap:.3f} nats a token (limit {limit:g})",
            ),
            "truncated": (
                m["truncated_frac"] == 1.0,
                f"every completion was cut off at max_new_tokens={policy.max_new_tokens}; raise it, or set stop_text",
            ),
            "skipped": (m.get("skipped_updates", 0), "an update had a non-finite gradient and was skipped"),
            "invalid": (m["reward/invalid"], "some rewards were not finite; those rollouts left the update"),
        }
        for key, (seen, message) in signs.items():
            if seen:
                warn(f"{name}/{key}", f"{name}: {message}")


def flatten(found: Mapping[str, Mapping[str, float]], grader: GraderPool, sharing: Sharing) -> dict[str, float]:
    """Slash paths to numbers: `<policy>/<metric>`, step-wide ones without a policy."""
    out = {f"{name}/{k}" if name else k: v for name, m in found.items() for k, v in m.items()}
    dropped = {f"exchange/{k}": float(n) for k, n in sharing.counts().items()}
    return {**out, **dropped, "grader/timeouts": grader.timeouts, "grader/crashes": grader.crashes}


def describe(found: Mapping[str, Mapping[str, float]]) -> str:
    """A step in a few words, for the progress display."""
    names = [n for n in found if n]
    seconds = sum(found[""].values())
    tokens = sum(found[n]["tokens/generated"] for n in names)
    rewards = "  ".join(f"{n} {found[n].get('reward/mean', float('nan')):.2f}" for n in names)
    return f"reward {rewards}  {tokens / seconds:,.0f} tok/s"


def main() -> None:
    """Command line."""
    from mutualrl.command_line import read_command_line

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        run, workdir = read_command_line(sys.argv)
        if run.warmup:
            from mutualrl.warmup import ensure_models

            run = ensure_models(run)
        summary = train(run, workdir)
    except ConfigError as error:
        sys.exit(f"config: {error}")
    report.show_end(summary, Path(workdir))


if __name__ == "__main__":
    main()
