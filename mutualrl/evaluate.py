"""Which samples of policies are right: the loop's evaluation on held-out problems, and the command.

    python -m mutualrl.evaluate (--config=FILE | --run=FOLDER [--step=N] | --model=[NAME=]MODEL ...)
                                --benchmarks=NAME,... --workdir=FOLDER [flags]

The numbers are those of `mutualrl.accuracy`; what the command takes and writes stands in `mutualrl.evaluation_request`
and `mutualrl.evaluation`, which this module loads only then: it needs no device itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mutualrl import accuracy
from mutualrl.rewards.workers import GraderPool
from mutualrl.types import Problem, Rollouts

if TYPE_CHECKING:
    from mutualrl.policy import Policy


def sampled(
    asked: Sequence[tuple[Policy, Sequence[Problem]]],
    grader: GraderPool,
    *,
    batch: int,
    samples: int,
    temperature: float,
    top_p: float,
    top_k: int,
) -> Iterator[tuple[Policy, Rollouts, np.ndarray, list[list[str | None]]]]:
    """Samples one batch of every policy, all at the same time, and grades it.

    Random streams go by policy, problem and number of the sample, and every batch has one shape: a problem's samples
    are the same whichever problems it is asked with.

    Args:
      asked: policies, and what each is asked: between 1 and `batch` problems.
      samples: K, rollouts a problem. temperature: 0 is greedy.

    Yields:
      policy, its rollouts of the problems (behind them may be others, which only fill up the batch), f64[P, K] 1 right,
      0 wrong, NaN where it cannot be judged, and P lists of the K answers.
    """
    pending = []
    for policy, problems in asked:
        padded = [*problems, *[problems[0]] * (batch - len(problems))]  # one shape, one compilation
        pending.append(
            policy.sample(
                padded, 0, samples=samples, temperature=temperature, top_p=top_p, top_k=top_k, purpose="evaluate"
            )
        )
    for (policy, problems), work in zip(asked, pending):
        rollouts = work.result()
        replies = [t for group in rollouts.text[: len(problems)] for t in group]
        reward, found = grader.grade(replies, [x for x in problems for _ in range(samples)])
        right = np.where(np.isfinite(reward), reward >= 1.0, np.nan).reshape(-1, samples)
        yield policy, rollouts, right, [found[i : i + samples] for i in range(0, len(found), samples)]


def evaluate(
    policies: Sequence[Policy],
    problems: Sequence[Problem],
    grader: GraderPool,
    *,
    samples: int,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    batch: int = 64,
    advance: Callable[[int], None] = lambda done: None,
) -> dict[str, dict[str, Any]]:
    """Accuracy of every policy on the same problems, with the same random streams each time it is called.

    Problems that the grader cannot judge (no gold answer) do not count.

    Args:
      samples: rollouts a problem. temperature: 0 is greedy.
      batch: problems sampled at a time.
      advance: told the number of problems done.

    Returns:
      {policy: {accuracy (pass@1 over all samples), interval, n, kinds: {kind: the same three}, pass@k, maj,
      generated tokens, and `ensemble_maj` under every policy; all in [0, 1]. `right`: right samples of each problem, -1
      where it could not be judged; `wrong`: of each problem the answers of its wrong samples, None for no answer}}.

    Raises:
      ValueError: no problem can be judged.
    """
    right = {p.name: np.zeros((len(problems), samples)) for p in policies}
    answers: dict[str, list[list[str | None]]] = {p.name: [] for p in policies}
    tokens = dict.fromkeys(right, 0)
    for start in range(0, len(problems), batch):
        chunk = problems[start : start + batch]
        for policy, rollouts, correct, found in sampled(
            [(p, chunk) for p in policies],
            grader,
            batch=min(batch, len(problems)),
            samples=samples,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
        ):
            right[policy.name][start : start + len(chunk)] = correct
            answers[policy.name] += found
            tokens[policy.name] += int(rollouts.lengths[: len(chunk)].sum())
        advance(start + len(chunk))

    judged = np.isfinite(list(right.values())).all(axis=(0, 2))
    if not judged.any():
        raise ValueError("no held-out problem can be judged: none has a gold answer")
    kinds = [p.kind for p, ok in zip(problems, judged) if ok]
    known = {name: r[judged] for name, r in right.items()}
    given = {name: [a for a, ok in zip(each, judged) if ok] for name, each in answers.items()}
    results: dict[str, dict[str, Any]] = {name: accuracy.mean(r) for name, r in known.items()}
    for name, result in results.items():
        if found_kinds := accuracy.by(known[name], kinds):
            result["kinds"] = found_kinds
        if samples > 1:
            result["pass@k"] = accuracy.passed(known[name])
            result["maj"] = float(accuracy.voted(known[name], given[name]).mean())
    if samples > 1:
        ensemble = float(accuracy.voted(*accuracy.pooled(list(known.values()), list(given.values()))).mean())
        for result in results.values():
            result["ensemble_maj"] = ensemble
    for name, result in results.items():
        result["generated"] = tokens[name]
        result["wrong"] = [
            [a for a, c in zip(each, correct) if c == 0] for each, correct in zip(answers[name], right[name])
        ]
        result["right"] = np.where(judged, np.nan_to_num(right[name]).sum(1), -1).astype(int).tolist()
    return results


def main() -> None:
    """Command line; ends with exit code 2 and one line where something is wrong."""
    from mutualrl import evaluation_request
    from mutualrl.settings import ConfigError

    if not set(sys.argv[1:]).isdisjoint(("--help", "-h", "--helpfull", "--helpshort")):
        print(evaluation_request.usage())
        return
    try:
        request = evaluation_request.parse(sys.argv)
        from mutualrl import evaluation  # loads jax: not for help or a wrong flag

        evaluation.main(request)
    except ConfigError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
