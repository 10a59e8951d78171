"""A comparison for people: tables on the terminal, and one HTML page with tables and plots that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mutualrl.analysis import comparison_plots, costs, decoupling, label_plots, labels, pages
from mutualrl.analysis.claims import GROUP_NAMES, harm, signed, verdict
from mutualrl.analysis.pages import Cell
from mutualrl.files import replace_text

DIAGNOSTICS = {  # metric: (heading, mean over all steps or `end`)
    "entropy": ("entropy, end", "end"),
    "kl/old": ("KL old", "mean"),
    "kl/ref": ("KL ref", "mean"),
    "clip/low": ("clip low", "mean"),
    "clip/high": ("clip high", "mean"),
    "clip/peer_low": ("peer clip low", "mean"),
    "clip/peer_high": ("peer clip high", "mean"),
    "clip/peer_dual": ("peer dual clip", "mean"),
    "grad_norm": ("gradient", "mean"),
    "ratio/ess_frac": ("ESS share", "mean"),
    "kl_hat": ("KL to source", "mean"),
    "rescue/all_fail": ("all fail", "mean"),
    "rescue/available": ("available", "mean"),
    "rescue/used": ("used", "mean"),
    "rescue/stuck": ("stuck", "mean"),
    "peer_rows": ("peer rows", "mean"),
    "thl/bound": ("THL bound", "mean"),
    "thl/group_tokens": ("THL group", "mean"),
    "reward/group_std": ("reward std in groups, end", "end"),
    "length/mean": ("length, end", "end"),
}
LABEL_METRICS = {  # metric: heading, of the end of training
    "label/acc": "label accuracy",
    "label/share": "share of the vote",
    "label/missing": "problems without label",
    "label/reward_acc": "reward accuracy",
    "agreement": "agreement",
    "wrong_consensus": "wrong consensus",
}
WIDE = 190  # columns of a terminal that has room for intervals
LEGEND = """▲ ▼: the 95 % interval over seeds and problems excludes 0. half at: first step
with half of a kind right that only the peer could do, seed by seed. tokens: all
that was generated for a policy to learn from, in multiples of {base}'s own."""
MARKS = {"better": "▲", "worse": "▼", "open": ""}


def write(found: Mapping[str, Any], folder: Path) -> None:
    """Writes compare.json and report.html."""
    replace_text(folder / "compare.json", json.dumps(found, indent=1, allow_nan=False) + "\n")
    replace_text(folder / "report.html", page(found))


def show(found: Mapping[str, Any], folder: Path) -> None:
    """Prints the report: harm first, a table a policy, what is established, and where the rest is."""
    console = Console()
    console.print(harm(found), style="bold", highlight=False)
    for policy in found["policies"]:
        head, rows = results(found, policy, short=console.width < WIDE)
        table = Table(title=f"{policy}: held-out pass@1 after training, and minus {found['baseline']}")
        for i, text in enumerate(head):
            table.add_column(text, justify="right" if i else "left", no_wrap=not i)
        for row in rows:
            colour = {"better": "[blue]{}[/]", "worse": "[red]{}[/]"}
            table.add_row(*(colour.get(mark, "{}").format(text.replace("[", r"\[")) for text, mark in row))
        console.print(table)
    console.print(LEGEND.format(base=found["baseline"]), highlight=False)
    for s in found["statements"]:
        if s["verdict"] != "open":
            console.print(f"{MARKS[s['verdict']]} {s['text']}", highlight=False, markup=False, soft_wrap=True)
    still = sum(s["verdict"] == "open" for s in found["statements"])
    console.print(f"{still} comparisons show no difference; they are in the report.", highlight=False)
    for name, why in found["missing"].items():
        console.print(f"missing: {name} ({why})", highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{folder / 'report.html'}: all tables and plots. {folder / 'compare.json'}: all numbers.", soft_wrap=True
    )


def results(found: Mapping[str, Any], policy: str, short: bool = False) -> tuple[list[str], list[list[Cell]]]:
    """The main table of a policy: an arm a row. The short one is without intervals, one column a group."""
    base, out = found["baseline"], []
    groups = [g for g in GROUP_NAMES if any(g in e["policies"][policy]["accuracy"] for e in found["arms"].values())]
    head = ["arm"] if short else ["arm", "seeds"]
    for g in groups:
        head += [g.replace("_", " ")] if short else [g.replace("_", " "), f"- {base}"]
    if "peer_only" in groups:
        head.append("half at")
    head.append("tokens" if short else "generated, own / joint")
    for arm, entry in found["arms"].items():
        p = entry["policies"][policy]
        row: list[Cell] = [(arm, "")] if short else [(arm, ""), (str(len(entry["seeds"])), "")]
        for g in groups:
            e = p["accuracy"][g]
            minus = e["minus"].get(base)
            mark = verdict(minus) if minus else ""
            if short:
                more = f" {minus['value']:+.2f}{MARKS[mark]}" if minus else ""
                row.append((f"{e['after']['value']:.2f}{more}", mark))
                continue
            row += [
                (f"{e['after']['value']:.3f}", ""),
                (f"{signed(minus)} {MARKS[mark]}".strip() if minus else "", mark),
            ]
        if "peer_only" in groups:
            row.append((halves(p["half"], short), ""))
        ratio = p["ratio"]
        readings = ("joint",) if short else ("own", "joint")
        row.append((" / ".join(_times(ratio[r].get("generated")) for r in readings), ""))
        out.append(row)
    return head, out


def halves(half: Mapping[str, Mapping[str, int | None]], short: bool = False) -> str:
    """Steps at which half of a kind was right, seed by seed, e.g. `dup 60 80 never`; short: `60 80 -`."""
    never = "-" if short else "never"
    steps = {k: " ".join(never if s is None else str(s) for s in v.values()) for k, v in half.items()}
    return "; ".join(v if short else f"{k} {v}" for k, v in steps.items())


def accuracy(found: Mapping[str, Any], policy: str) -> tuple[list[str], list[list[Cell]]]:
    """Before, after and pass@k with intervals: an arm and group a row."""
    ks = sorted(
        {k for e in found["arms"].values() for g in e["policies"][policy]["pass@k"].values() for k in g}, key=int
    )
    head = ["arm", "problems", "before", "after", "gain", *(f"pass@{k} after" for k in ks)]
    rows: list[list[Cell]] = []
    for arm, entry in found["arms"].items():
        p = entry["policies"][policy]
        for g, e in p["accuracy"].items():
            gain = verdict(e["gain"])
            rows.append([
                (f"{arm}, {GROUP_NAMES[g]}", ""), (str(e["after"]["problems"]), ""), (_plain(e["before"]), ""),
                (_plain(e["after"]), ""), (signed(e["gain"]), gain if gain == "worse" else ""),
                *((_plain(p["pass@k"][g][k]["after"]) if k in p["pass@k"][g] else "", "") for k in ks),
            ])  # fmt: skip
    return head, rows


def diagnostics(found: Mapping[str, Any], policy: str) -> tuple[list[str], list[list[Cell]]]:
    """Means of training metrics, an arm a row; columns that no arm has are left out."""
    of = {arm: e["policies"][policy]["metrics"] for arm, e in found["arms"].items()}
    columns = [m for m in DIAGNOSTICS if any(m in have for have in of.values())]
    rows = [
        [(arm, ""), *((pages.number(have.get(m, {}).get(DIAGNOSTICS[m][1])), "") for m in columns)]
        for arm, have in of.items()
    ]
    return ["arm", *(DIAGNOSTICS[m][0] for m in columns)], rows


def compute(found: Mapping[str, Any], policy: str) -> tuple[list[str], list[list[Cell]]]:
    """Tokens and seconds in both readings, with multiples of the baseline's own."""
    kinds = [*costs.KINDS, "seconds"]
    head = ["arm", *(f"{k}, own" for k in kinds), *(f"{k}, joint" for k in kinds)]
    rows = []
    for arm, entry in found["arms"].items():
        p = entry["policies"][policy]
        row: list[Cell] = [(arm, "")]
        for reading in ("own", "joint"):
            for k in kinds:
                times = p["ratio"][reading].get(k)
                row.append((f"{p['tokens'][reading][k]:,.0f}" + (f" ({times:.2f}×)" if times else ""), ""))
        rows.append(row)
    return head, rows


def page(found: Mapping[str, Any]) -> str:
    """The whole HTML page."""
    base, arms = found["baseline"], found["arms"]
    seeds = sorted({s for e in arms.values() for s in e["seeds"]})
    parts = [
        f"<h1>{len(arms)} arms, {len(seeds)} seed{'s' * (len(seeds) > 1)}, {found['steps']} steps</h1>",
        f"<p><strong>{pages.text(harm(found))}</strong></p>",
        pages.bullets([s["text"] for s in found["statements"] if s["verdict"] == "worse"]),
        "<h2>Established differences in favour of an arm</h2>",
        pages.bullets([s["text"] for s in found["statements"] if s["verdict"] == "better"]) or "<p>None.</p>",
    ]
    for policy in found["policies"]:
        groups = "; ".join(f"{GROUP_NAMES[g]}: {', '.join(k) or 'none'}" for g, k in found["groups"][policy].items()
                           if g != "all")  # fmt: skip
        noise = [e["policies"][policy]["evaluation_noise"] for e in arms.values()]
        parts += [
            f"<h2>{pages.text(policy)}</h2><p class=note>{pages.text(groups)}.</p>",
            pages.table(*results(found, policy)),
            comparison_plots.bars(found, policy),
            comparison_plots.curves(found, policy),
            "<h3>Before, after and pass@k</h3>",
            pages.table(*accuracy(found, policy)),
            ""
            if None in noise
            else "<p class=note>Evaluating the same checkpoint again would move pass@1 on all "
            f"problems of one seed by a standard deviation of up to {max(noise):.4f}.</p>",
            "<h3>What happened in training</h3>",
            pages.table(*diagnostics(found, policy)),
            "<h3>What it cost</h3>",
            pages.table(*compute(found, policy)),
        ]
    head = ["arm", "regime", "labels by", "seconds a run", "bytes sent"]
    rows: list[list[Cell]] = [
        [
            (arm, ""),
            (e["transfer"], ""),
            (e["label"], ""),
            (f"{e['seconds']:,.0f}", ""),
            (f"{e['bytes_sent']:,.0f}", ""),
        ]
        for arm, e in arms.items()
    ]
    pairs = {f"{arm}, {pair}": times for arm, e in arms.items() for pair, times in e["decoupling"].items()}
    parts += ["<h2>Cohorts</h2>", pages.table(head, rows)]
    if pairs:
        parts += ["<h3>Who fails where, before and after training</h3>", pages.table(*decoupling.rows(pairs))]
    if any(e["dropped"] for e in arms.values()):
        parts.append("<p>Texts that were not used, a run, by policy, stage and cause:</p>")
        parts.append(pages.bullets([f"{a}: {_counts(e['dropped'])}" for a, e in arms.items() if e["dropped"]]))
    parts += [
        *label_section(found, pairs),
        "<h2>No difference shown</h2>",
        pages.bullets([s["text"] for s in found["statements"] if s["verdict"] == "open"]) or "<p>None.</p>",
        "<h2>Missing runs</h2>" + pages.bullets([f"{n}: {w}" for n, w in found["missing"].items()])
        if found["missing"]
        else "",
        "<h2>How to read this</h2>",
        pages.bullets(_notes(found, base)),
    ]
    return pages.document("Comparison", parts)


def label_section(found: Mapping[str, Any], pairs: Mapping[str, Any]) -> list[str]:
    """Parts of the page on labels; none where no arm learnt from labels other than the verifier's.

    Args:
      pairs: decoupling of each arm's pairs before and after training, by name.
    """
    arms, parts = found["arms"], []
    if not any("collapse" in p for e in arms.values() for p in e["policies"].values()):
        return []
    for policy in found["policies"]:
        of = {arm: e["policies"][policy]["label_curves"] for arm, e in arms.items()}
        parts += [
            f"<h3>{pages.text(policy)}</h3>",
            pages.table(*label_table(found, policy)),
            label_plots.curves(of, f"labels-{policy}"),
            pages.bullets(collapses(found, policy)),
        ]
    note = f"Numbers are of the last quarter of the steps. {labels.RULE_NOTE}"
    return ["<h2>Labels</h2>", f"<p class=note>{pages.text(note)}</p>", *parts,
            "<h3>κ against c</h3>" if pairs else "", label_plots.apart(pairs)]  # fmt: skip


def label_table(found: Mapping[str, Any], policy: str) -> tuple[list[str], list[list[Cell]]]:
    """What labels were worth at the end of training and how many seeds show a signature of collapse: an arm a row."""
    of = {arm: e["policies"][policy] for arm, e in found["arms"].items()}
    columns = [m for m in LABEL_METRICS if any("end" in p["metrics"].get(m, {}) for p in of.values())]
    head = ["arm", "labels by", *(LABEL_METRICS[m] for m in columns), *(k.replace("_", " ") for k in labels.RULE)]
    rows: list[list[Cell]] = []
    for arm, p in of.items():
        row: list[Cell] = [(arm, ""), (found["arms"][arm]["label"], "")]
        row += [(pages.number(p["metrics"].get(m, {}).get("end")), "") for m in columns]
        for rule in labels.RULE:
            judged = [s[rule]["found"] for s in p["collapse"].values() if rule in s]
            row.append((f"{sum(judged)} of {len(judged)}" if judged else "", "worse" if any(judged) else ""))
        rows.append(row)
    return head, rows


def collapses(found: Mapping[str, Any], policy: str) -> list[str]:
    """The signatures of collapse of a policy in words: an arm and seed that has some a sentence."""
    return [
        f"{arm}, seed {seed}: {labels.said(signatures)}"
        for arm, e in found["arms"].items()
        for seed, signatures in e["policies"][policy]["collapse"].items()
        if any(s["found"] for s in signatures.values())
    ]


def _notes(found: Mapping[str, Any], base: str) -> list[str]:
    return [
        "pass@1 is the share of right samples on held-out problems, "
        f"{found['samples']} a problem. Every arm is judged at its last step, so no checkpoint was chosen.",
        "Intervals are 95 % over seeds and problems by a hierarchical bootstrap, widened for few seeds; differences "
        "are paired by seed and problem. They are not corrected for how many there are: about one in twenty true "
        "zeros would be called a difference.",
        f"Groups of kinds: {found['rule']}.",
        "own: what a policy itself generated, trained on and scored. joint: the whole run in which it learnt, peers "
        "included, and the run that wrote a log it listened to. Multiples are of the own share of "
        f"{base}. Evaluation is left out. Seconds: median step times steps; own seconds by share of tokens.",
        "Curves: mean over seeds, bands from the lowest to the highest seed; dashed: " + base + ".",
        "available: of the problems a policy fails in all its samples, those that a peer solved; used: those it was "
        "trained on; stuck: rescued at the previous visit and failed again.",
        *decoupling.NOTES,
    ]


def _counts(dropped: Mapping[str, float]) -> str:
    return ", ".join(f"{cause} {n:,.1f}" for cause, n in dropped.items())


def _plain(e: Mapping[str, Any]) -> str:
    return f"{e['value']:.3f} [{e['interval'][0]:.3f}, {e['interval'][1]:.3f}]"


def _times(x: float | None) -> str:
    return "-" if x is None else f"{x:.2f}×"
