"""Greedy evaluation next to transformers' own: prompts, tokens, log-probs, extracted answers, accuracy.

    python benchmarks/evaluation_parity.py --model=smollm2-135m-instruct.gguf --data=FOLDER --out=parity.json

The first problems of each data set are answered twice, in float32 on the CPU: here, by prompt building, sampler and
grader as an evaluation uses them, and by transformers with PyTorch: `apply_chat_template`, left padding with an
attention mask, `generate(do_sample=False)`, `decode`. Then transformers reads this package's completions and gives its
own logits of every token. A fault, at which the command ends with 1, is one of

  * prompt ids that differ (the completions of that problem are not compared then),
  * a token that is not transformers' best after the same tokens before it, by 1e-3 of a logit or more,
  * completions that differ at a token where transformers' logits are not that close,
  * answers or verdicts that differ although the completions do not.

What is closer than 1e-3 is a tie: rounding decides, and both completions are right. Ties are listed.

The two readings are independent where that is possible. transformers reads a GGUF file with its own reader (which needs
the packages gguf and accelerate) and a Hugging Face folder as always. But of a GGUF file's tokenizer it ignores the
pre-tokeniser's name: SmolLM2's digits are then not cut off from spaces before them, and 15 of GSM8K's 1319 test prompts
get ids that the model was not trained with. `--tokenizer=FOLDER` is a folder with the model's published tokenizer
files, for transformers alone; a chat template that it lacks comes from the model's file.

The answers of both sides are extracted and graded by this package's graders; math problems are also judged by
math-verify alone, of transformers' text. The file is a list of rows {name, value, unit, ratio_to, machine}; those of
ties and faults have a `note` as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # elsewhere float32 products are rounded to fewer bits
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from graders import math_verify_alone
from transformers import AutoModelForCausalLM, AutoTokenizer

from mutualrl.cohort import build, open_models
from mutualrl.config import PolicyConfig, RunConfig
from mutualrl.data import recipe, recipes
from mutualrl.meshes import make_plan
from mutualrl.policy import Policy
from mutualrl.rewards.workers import GraderPool
from mutualrl.types import STOP, Problem

TIE = 1e-3  # logits closer than this are decided by rounding


@dataclasses.dataclass
class Replies:
    """What one side answered: of every problem the prompt ids, the new ids (a stop id included) and their text."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    texts: list[str]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Why two replies differ: `gap` in logits, NaN where it explains nothing."""

    problem: str
    gap: float
    note: str

    @property
    def tie(self) -> bool:
        return self.gap < TIE


@dataclasses.dataclass(frozen=True)
class Judged:
    """transformers' logits of our tokens.

    Attributes:
      gap: f64[tokens] the best logit less the token's.
      logprob: f64[tokens] the token's log-prob in nats.
      apart: distance of the logits of both sides' tokens where the completions part, NaN where they do not or one ends.
    """

    gap: np.ndarray
    logprob: np.ndarray
    apart: float


def parting(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first place at which two runs of ids differ, or None."""
    if ours == theirs:
        return None
    return next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))


class Reference:
    """The model in transformers."""

    def __init__(self, model: Path, tokenizer: Path | None):
        gguf = model.suffix == ".gguf"
        place, named = (model.parent, {"gguf_file": model.name}) if gguf else (model, {})
        own = AutoTokenizer.from_pretrained(place, **named)
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer) if tokenizer else own
        self.tokenizer.chat_template = self.tokenizer.chat_template or own.chat_template
        self.model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **named).eval()
        self.pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else own.eos_token_id
        stops = self.model.generation_config.eos_token_id
        self.stops = set(stops if isinstance(stops, list) else [stops])

    def prompt(self, problem: Problem) -> list[int]:
        messages = [{"role": "user", "content": problem.asked}]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    def padded(self, rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        """Ids and attention mask, i64[B, S], padded on the left."""
        length = max(map(len, rows))
        ids, mask = torch.full((len(rows), length), self.pad), torch.zeros((len(rows), length), dtype=torch.int64)
        for row, some in enumerate(rows):
            ids[row, length - len(some) :] = torch.tensor(some)
            mask[row, length - len(some) :] = 1
        return {"input_ids": ids, "attention_mask": mask}

    @torch.inference_mode()
    def answer(self, problems: Sequence[Problem], new_tokens: int) -> Replies:
        prompts = [self.prompt(p) for p in problems]
        given = self.padded(prompts)
        out = self.model.generate(**given, do_sample=False, max_new_tokens=new_tokens, pad_token_id=self.pad)
        tokens = []
        for row in out[:, given["input_ids"].shape[1] :].tolist():
            end = next((i + 1 for i, token in enumerate(row) if token in self.stops), len(row))
            tokens.append(row[:end])
        decode = lambda ids: self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Replies(prompts, tokens, [decode(ids) for ids in tokens])

    @torch.inference_mode()
    def judge(self, ours: Replies, theirs: Replies) -> list[Judged]:
        """What the model says of our tokens, each after our tokens before it."""
        given = self.padded([prompt + tokens for prompt, tokens in zip(ours.prompts, ours.tokens)])
        positions = (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        kept = max(map(len, ours.tokens)) + 1
        logits = self.model(**given, position_ids=positions, logits_to_keep=kept).logits
        found = []
        for row, mine, others in zip(logits, ours.tokens, theirs.tokens):
            own = row[-len(mine) - 1 : -1].double()
            taken = own.gather(-1, torch.tensor(mine)[:, None])[:, 0]
            gap, logp = own.max(-1).values - taken, taken - own.logsumexp(-1)
            at = parting(mine, others)
            both = at is not None and at < min(len(mine), len(others))
            apart = float(abs(own[at, others[at]] - taken[at])) if both else float("nan")
            found.append(Judged(gap.numpy(), logp.numpy(), apart))
        return found


def open_policy(model: Path, prompt_tokens: int, new_tokens: int) -> Policy:
    """The model as a run opens it, with one padded prompt length."""
    config = PolicyConfig(
        model=str(model), frozen=True, unroll_layers=True, max_new_tokens=new_tokens,
        max_prompt_tokens=prompt_tokens, prompt_bucket=prompt_tokens,
    )  # fmt: skip
    run = RunConfig(policies={"policy": config}, data={"name": "recipe"})
    return build(run, open_models(run), make_plan(run.policies))[0]


def answer(policy: Policy, problems: Sequence[Problem]) -> tuple[Replies, list[np.ndarray]]:
    """This package's replies, and the log-probs it recorded of each one's tokens."""
    out = policy.sample(problems, 0, samples=1, temperature=0, purpose="evaluate").result()
    prompts = [row[at >= 0].tolist() for row, at in zip(out.prompt, out.prompt_positions)]
    tokens = [row[keep].tolist() for row, keep in zip(out.tokens[:, 0], out.mask[:, 0])]
    logps = [row[keep].astype(np.float64) for row, keep in zip(out.logprobs[:, 0], out.mask[:, 0])]
    for ids, finish in zip(tokens, out.finish[:, 0]):
        assert (finish == STOP) == (ids[-1] in policy.tokenizer.stop_ids)
    return Replies(prompts, tokens, [group[0] for group in out.text]), logps


def difference(problem: Problem, ours: list[int], theirs: list[int], judged: Judged, show) -> Difference | None:
    """Where two completions part, or ours leaves the reference's best by more than a tie; None if neither is so."""
    at, worst = parting(ours, theirs), int(judged.gap.argmax())
    if judged.gap[worst] >= TIE and worst != at:
        return Difference(problem.id, float(judged.gap[worst]), f"token {worst}: {show(ours[worst])} is not the best")
    if at is None:
        return None
    if at == min(len(ours), len(theirs)):
        return Difference(
            problem.id, judged.apart, f"token {at}: one ends, {len(ours)} tokens here, {len(theirs)} there"
        )
    return Difference(problem.id, judged.apart, f"token {at}: {show(ours[at])} here, {show(theirs[at])} there")


def compare(policy: Policy, reference: Reference, name: str, problems: list[Problem], args: Any) -> dict[str, Any]:
    """Figures of one data set by name, and `differences`."""
    ours, theirs, recorded, judged = Replies([], [], []), Replies([], [], []), [], []
    for start in range(0, len(problems), args.batch):
        chunk = problems[start : start + args.batch]
        padded = chunk + [chunk[0]] * (min(args.batch, len(problems)) - len(chunk))  # one shape, one compilation
        mine, logps = answer(policy, padded)
        mine = Replies(*(x[: len(chunk)] for x in (mine.prompts, mine.tokens, mine.texts)))
        other = reference.answer(chunk, args.new_tokens)
        recorded += logps[: len(chunk)]
        judged += reference.judge(mine, other)
        for all_of, some in ((ours, mine), (theirs, other)):
            all_of.prompts += some.prompts
            all_of.tokens += some.tokens
            all_of.texts += some.texts
        print(f"{name}: {start + len(chunk)} of {len(problems)} problems", flush=True)

    with GraderPool(recipes.find(name).grader) as pool:
        our_rewards, our_answers = pool.grade(ours.texts, problems)
        their_rewards, their_answers = pool.grade(theirs.texts, problems)
    show = lambda token: repr(reference.tokenizer.decode([token]))
    same_prompt = [a == b for a, b in zip(ours.prompts, theirs.prompts)]
    same_answer = [a == b for a, b in zip(our_answers, their_answers)]
    found = []
    for i, problem in enumerate(problems):
        if not same_prompt[i]:
            found.append(Difference(problem.id, float("nan"), "prompt ids differ"))
            continue
        differs = difference(problem, ours.tokens[i], theirs.tokens[i], judged[i], show)
        said = f"answers {our_answers[i]!r} here, {their_answers[i]!r} there"
        if differs:
            found.append(differs if same_answer[i] else dataclasses.replace(differs, note=f"{differs.note}; {said}"))
        elif not same_answer[i] or our_rewards[i] != their_rewards[i]:
            found.append(Difference(problem.id, float("nan"), f"same tokens, but {said}"))
    figures = {
        "problems": (len(problems), "problems"),
        "prompts_equal": (sum(same_prompt), "problems"),
        "tokens": (sum(map(len, ours.tokens)), "tokens"),
        "completions_equal": (sum(a == b for a, b in zip(ours.tokens, theirs.tokens)), "problems"),
        "completions_ended": (sum(ids[-1] in reference.stops for ids in theirs.tokens), "problems"),
        "ties": (sum(d.tie for d in found), "problems"),
        "faults": (sum(not d.tie for d in found), "problems"),
        "gap_max": (max(j.gap.max() for j in judged), "logit"),
        "logprob_difference_max": (max(abs(a - j.logprob).max() for a, j in zip(recorded, judged)), "nats"),
        "answers_equal": (sum(same_answer), "problems"),
        "answers_found": (sum(a is not None for a in our_answers), "problems"),
        "accuracy": ((our_rewards >= 1).mean(), "share"),
        "accuracy.transformers": ((their_rewards >= 1).mean(), "share"),
    }
    if recipes.find(name).grader == "math":
        alone = math_verify_alone([{"gold": p.answer, "pred": text} for p, text in zip(problems, theirs.texts)])
        figures["accuracy.transformers_math_verify"] = (alone.mean(), "share")
        figures["verdicts_equal.math_verify"] = (((our_rewards >= 1) == alone).sum(), "problems")
        for i in np.flatnonzero((our_rewards >= 1) != alone):
            read = f"{our_answers[i]!r} of ...{ours.texts[i][-160:]!r}"
            print(f"  {problems[i].id}: right {our_rewards[i] >= 1} here, {alone[i]} by math-verify alone; {read}")
    return {**figures, "differences": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or Hugging Face folder, with a template")
    parser.add_argument("--data", required=True, help="folder of the data sets' JSON lines files")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--tokenizer", type=Path, help="folder of published tokenizer files, for transformers")
    parser.add_argument("--recipes", nargs="+", default=["gsm8k", "arc_challenge"], help="data sets by name")
    parser.add_argument("--problems", type=int, default=100, help="of each data set")
    parser.add_argument("--new_tokens", type=int, default=128, help="a completion has at most")
    parser.add_argument("--batch", type=int, default=50, help="problems answered side by side")
    args = parser.parse_args()
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    reference = Reference(args.model, args.tokenizer)
    sets = {name: recipe.load("test", recipe=name, folder=args.data, limit=args.problems) for name in args.recipes}
    longest = max(len(reference.prompt(p)) for problems in sets.values() for p in problems)
    policy = open_policy(args.model, -(-longest // 64) * 64, args.new_tokens)
    rows, faults = [], 0
    for name, problems in sets.items():
        figures = compare(policy, reference, name, problems, args)
        differences = figures.pop("differences")
        for figure, (value, unit) in figures.items():
            rows.append({"name": f"{name}.{figure}", "value": float(value), "unit": unit})
            print(f"{name + '.' + figure:48} {float(value):10.4g} {unit}")
        for d in differences:
            kind, gap = "tie" if d.tie else "fault", None if np.isnan(d.gap) else d.gap
            rows.append({"name": f"{name}.{kind}.{d.problem}", "value": gap, "unit": "logit", "note": d.note})
            print(f"  {kind} {d.problem}: gap {d.gap:.2g}, {d.note}")
        faults += sum(not d.tie for d in differences)
    rows = [{**row, "ratio_to": {}, "machine": machine} for row in rows]
    args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if faults:
        sys.exit(f"{faults} differences that no tie explains")


if __name__ == "__main__":
    main()
