"""Problems and samples of an evaluation to be browsed in its page: what of the sample files goes in, and the script
that filters and shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mutualrl.analysis import pages
from mutualrl.analysis.evaluation_plots import finite

PROBLEMS = 2000  # of a benchmark in the page
CHARACTERS = 20_000  # of a text in the page; of a longer one, the beginning and the end
PAGE_CHARACTERS = 30_000_000  # of all texts in the page, shared evenly by the benchmarks


def read(folder: Path, benchmark: str, policies: Sequence[str], budget: int = PAGE_CHARACTERS) -> dict[str, Any]:
    """What of a benchmark's sample files goes in the page, and in words what does not.

    Args:
      folder: of the evaluation. budget: characters of texts.

    Returns:
      {"name", "policies": [name], "problems": [{"id", "kind", "level", "gold", "asked": [[text, [policy's place]]],
      "by": [samples or None a policy]}], "notes": [text]}; a sample is [text, answer or None, right or None,
      tokens or None, finish]. A policy that did not come to a problem has None there.
    """
    paths = {p: folder / "samples" / benchmark / f"{p}.jsonl" for p in policies}
    names = {p: path.relative_to(folder).as_posix() for p, path in paths.items()}
    problems: dict[str, dict[str, Any]] = {}
    ids: dict[str, set[str]] = {p: set() for p in policies}
    notes: list[str] = []
    for place, (p, path) in enumerate(paths.items()):
        if not path.is_file():
            notes.append(f"{names[p]} is not there.")
            continue
        unread = 0
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                row = _parsed(line)
                if row is None:
                    unread += bool(line.strip())
                    continue
                key = _text(row["id"])
                ids[p].add(key)
                if key in problems or len(problems) < PROBLEMS:
                    _add(problems.setdefault(key, _problem(row, len(policies))), place, row)
        if unread:
            notes.append(f"{names[p]}: {unread} line{'s' * (unread > 1)} could not be read, as after an interruption.")
    every = set().union(*ids.values())
    notes += [f"{p} has {len(ids[p])} of {len(every)} problems." for p in policies if len(ids[p]) < len(every)]
    kept, size, cuts = [], 0, 0
    for problem in problems.values():
        size += problem.pop("size")
        if size > budget and kept:
            break
        kept.append(problem)
        cuts += problem.pop("cuts")
    left = [f"the first {len(kept):,} of {len(every):,} problems are here"] if len(kept) < len(every) else []
    left += [f"{cuts:,} texts longer than {CHARACTERS:,} characters are cut in the middle"] if cuts else []
    if left:
        notes.append(f"{'; '.join(left).capitalize()}. Everything is in {', '.join(names.values())}.")
    return {"name": benchmark, "policies": list(policies), "problems": kept, "notes": notes}


def _parsed(line: str) -> dict[str, Any] | None:
    """A line's problem; None for a torn line or another thing."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    ok = isinstance(row, dict) and "id" in row and isinstance(row.get("samples"), list)
    return row if ok and all(isinstance(s, dict) for s in row["samples"]) else None


def _problem(row: Mapping[str, Any], policies: int) -> dict[str, Any]:
    head = {k: _text(row.get(k)) for k in ("id", "kind", "level", "gold")}
    return {**head, "asked": [], "by": [None] * policies, "size": 0, "cuts": 0}


def _add(problem: dict[str, Any], place: int, row: Mapping[str, Any]) -> None:
    """Adds a policy's line to its problem, with the size of its texts and how many of them are cut."""
    texts = [_text(row.get("asked")), *(_text(s.get("text")) for s in row["samples"])]
    problem["cuts"] += sum(len(t) > CHARACTERS for t in texts)
    asked, *samples = map(cut, texts)
    for text, places in problem["asked"]:
        if text == asked:
            places.append(place)
            break
    else:
        problem["asked"].append([asked, [place]])
        problem["size"] += len(asked)
    problem["size"] += sum(map(len, samples))
    problem["by"][place] = [
        [
            text,
            None if s.get("answer") is None else cut(_text(s["answer"])),
            s["right"] if isinstance(s.get("right"), bool) else None,
            s["tokens"] if finite(s.get("tokens")) else None,
            _text(s.get("finish")),
        ]
        for text, s in zip(samples, row["samples"])
    ]


def _text(x: Any) -> str:
    return x if isinstance(x, str) else "" if x is None else json.dumps(x)


def cut(text: str) -> str:
    """A text of at most `CHARACTERS` as it is; of a longer one the two ends, with a word between on what is missing."""
    if len(text) <= CHARACTERS:
        return text
    half = CHARACTERS // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"


def section(index: int, benchmark: Mapping[str, Any]) -> str:
    """Where the page shows a benchmark's problems."""
    return pages.bullets(benchmark["notes"]) + f'<div class="browse" data-benchmark="{index}"></div>'


def embedded(benchmarks: Sequence[Mapping[str, Any]]) -> str:
    """Data and script, to come after the places. No text can end the data's element: it holds no `<`."""
    data = [{k: b[k] for k in ("name", "policies", "problems")} for b in benchmarks]
    plain = json.dumps(data, separators=(",", ":"), allow_nan=False)  # ASCII: odd characters are escaped too
    for character in "<>&":
        plain = plain.replace(character, f"\\u{ord(character):04x}")
    return (
        f"<style>{CSS}</style><noscript><p>Problems are shown by a script, which is off.</p></noscript>\n"
        f'<script type="application/json" id="evaluation-data">{plain}</script>\n<script>{SCRIPT}</script>'
    )


CSS = """
.browse select, .browse input { font: inherit; margin: 0 .6em .4em 0; max-width: 22em }
.browse details { border-bottom: 1px solid #ddd; padding: .2em 0 } .browse summary { cursor: pointer }
.browse pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; background: #f6f6f6; padding: .6em;
  margin: .3em 0 .8em }
.browse h4 { margin: .6em 0 .2em } .browse .start { color: #555; margin-left: .6em }
.browse .mark { margin-left: .8em; white-space: nowrap } .right { color: #00527f } .wrong { color: #a84600 }
.samples { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 0 1.2em }
.samples > div { min-width: 0 }
"""

# Texts enter the document as text nodes only, so nothing in them can act.
SCRIPT = r"""
"use strict";
const [TEXT, ANSWER, RIGHT, TOKENS, FINISH] = [0, 1, 2, 3, 4];
const PER_STEP = 100;

const has = (problem, i, test) => (problem.by[i] || []).some(test);
const solved = (problem, i) => has(problem, i, s => s[RIGHT] === true);
const failed = (problem, i) => !solved(problem, i) && has(problem, i, s => s[RIGHT] === false);
const mixed = (problem, i) => solved(problem, i) && has(problem, i, s => s[RIGHT] === false);

const SHOWS = {
  all: () => true,
  wrong: failed,
  right: solved,
  mixed: mixed,
  better: (p, i, j) => solved(p, i) && failed(p, j),
  truncated: (p, i) => has(p, i, s => s[FINISH] === "length"),
  unanswered: (p, i) => has(p, i, s => s[ANSWER] === null),
  unjudged: (p, i) => has(p, i, s => s[RIGHT] === null),
  missing: (p, i) => p.by[i] === null,
  none: p => p.by.some((_, i) => failed(p, i)) && !p.by.some((_, i) => solved(p, i)),
};

function shows(problem, show) {
  const [what, i, j] = show.split(":");
  return SHOWS[what](problem, Number(i), Number(j));
}

function holds(problem, text) {
  const wanted = text.toLowerCase();
  const inside = x => x !== null && x.toLowerCase().includes(wanted);
  return !wanted || inside(problem.id) || inside(problem.gold) || problem.asked.some(a => inside(a[0])) ||
    problem.by.some(samples => (samples || []).some(s => inside(s[TEXT]) || inside(s[ANSWER])));
}

function selected(problems, by) {
  return problems.filter(p => shows(p, by.show) && (!by.kind || p.kind === by.kind) &&
    (!by.level || p.level === by.level) && holds(p, by.text));
}

function choices(benchmark) {
  const names = benchmark.policies, several = names.length > 1, out = [["all", "all problems"]];
  const more = benchmark.problems.some(p => p.by.some(s => s && s.length > 1));
  const each = (what, words) => names.forEach((n, i) => out.push([what + ":" + i, words(n)]));
  if (several) out.push(["none", "right for nobody"]);
  each("wrong", n => (more ? "never right for " : "wrong for ") + n);
  if (several) names.forEach((a, i) => names.forEach((b, j) => {
    if (i !== j) out.push(["better:" + i + ":" + j, "right for " + a + ", wrong for " + b]);
  }));
  each("right", n => (more ? "right at least once for " : "right for ") + n);
  if (more) each("mixed", n => "now right, now wrong for " + n);
  each("truncated", n => "truncated: " + n);
  each("unanswered", n => "no answer: " + n);
  each("unjudged", n => "cannot be judged: " + n);
  each("missing", n => "not done by " + n);
  return out.map(([show, words]) => [show, words, benchmark.problems.filter(p => shows(p, show)).length])
    .filter(([show, , n]) => n || show === "all");
}

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function select(options, changed) {
  const made = element("select", {}, ...options.map(([value, words]) => element("option", {value}, words)));
  made.addEventListener("change", changed);
  return made;
}

function mark(samples) {
  const n = samples.filter(s => s[RIGHT] === true).length, judged = samples.some(s => s[RIGHT] !== null);
  const sign = !judged ? "?" : n === samples.length ? "✓" : n ? "◐" : "✗";
  return [sign + (samples.length > 1 ? " " + n + "/" + samples.length : ""), !judged ? "" : n ? "right" : "wrong"];
}

function oneLine(text, most) {
  const line = text.slice(0, 4 * most).replace(/\s+/g, " ").trim();
  return line.length > most ? line.slice(0, most) + "…" : line;
}

function shownSample(sample, open) {
  const [sign, colour] = mark([sample]);
  const answer = sample[ANSWER] === null ? "no answer" : oneLine(sample[ANSWER], 80);
  const facts = " · " + (sample[TOKENS] === null ? "?" : sample[TOKENS]) + " tokens · " + sample[FINISH];
  const head = element("summary", {}, element("strong", {className: colour}, sign + " " + answer), facts);
  return element("details", {open}, head, element("pre", {}, sample[TEXT]));
}

function shownProblem(problem, names) {
  const out = [];
  for (const [text, places] of problem.asked) {
    const who = problem.asked.length > 1 ? " of " + places.map(i => names[i]).join(", ") : "";
    out.push(element("h4", {}, "Asked" + who), element("pre", {}, text));
  }
  out.push(element("h4", {}, "Gold"), element("pre", {}, problem.gold));
  const columns = names.map((name, i) => {
    const samples = problem.by[i];
    if (samples === null) return element("div", {}, element("h4", {}, name), "not done");
    return element("div", {}, element("h4", {}, name), ...samples.map(s => shownSample(s, samples.length === 1)));
  });
  out.push(element("div", {className: "samples"}, ...columns));
  return out;
}

function shownRow(problem, names) {
  const head = element("summary", {}, element("strong", {}, problem.id));
  const about = [problem.kind, problem.level && "level " + problem.level].filter(Boolean).join(", ");
  if (about) head.append(" · " + about);
  names.forEach((name, i) => {
    if (problem.by[i] === null) return;
    const [sign, colour] = mark(problem.by[i]);
    head.append(element("span", {className: "mark " + colour}, name + " " + sign));
  });
  if (problem.asked.length) head.append(element("span", {className: "start"}, oneLine(problem.asked[0][0], 110)));
  const row = element("details", {}, head);
  row.addEventListener("toggle", () => {  // filled when first opened
    if (row.open && row.children.length === 1) row.append(...shownProblem(problem, names));
  });
  return row;
}

function browse(place, benchmark) {
  const names = benchmark.policies, list = element("div", {}), count = element("p", {className: "note"});
  const values = key => [...new Set(benchmark.problems.map(p => p[key]).filter(Boolean))]
    .sort((a, b) => a.localeCompare(b, "en", {numeric: true}));
  const show = select(choices(benchmark).map(([value, words, n]) => [value, words + " (" + n + ")"]), refill);
  const kind = select([["", "all subjects"], ...values("kind").map(k => [k, k])], refill);
  const level = select([["", "all levels"], ...values("level").map(k => [k, "level " + k])], refill);
  const text = element("input", {type: "search", placeholder: "search texts"});
  let wait = 0;
  text.addEventListener("input", () => { clearTimeout(wait); wait = setTimeout(refill, 250); });
  const controls = element("div", {}, show);
  if (values("kind").length > 1) controls.append(kind);
  if (values("level").length > 1) controls.append(level);
  controls.append(text);
  place.append(controls, count, list);

  function refill() {
    const by = {show: show.value, kind: kind.value, level: level.value, text: text.value.trim()};
    const found = selected(benchmark.problems, by);
    count.textContent = found.length + " of " + benchmark.problems.length + " problems";
    list.replaceChildren();
    extend(found, 0);
  }

  function extend(found, from) {
    list.append(...found.slice(from, from + PER_STEP).map(p => shownRow(p, names)));
    const left = found.length - from - PER_STEP;
    if (left <= 0) return;
    const more = element("button", {}, "show more (" + left + " left)");
    more.addEventListener("click", () => { more.remove(); extend(found, from + PER_STEP); });
    list.append(more);
  }

  refill();
}

const data = JSON.parse(document.getElementById("evaluation-data").textContent);
for (const place of document.querySelectorAll(".browse")) browse(place, data[Number(place.dataset.benchmark)]);
"""
