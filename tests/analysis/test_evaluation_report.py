"""The page of an evaluation: what its table says and marks, that texts cannot act in it, and its script, run by node on
a document that takes text only."""

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from mutualrl.analysis import evaluation_browser, evaluation_report

EVIL = "</script><script>alert(1)</script><!-- <script> <img src=x onerror=alert(2)> \u2028 \ud800 é &lt; ]]>"


def sample(text, answer, right, finish="stop"):
    return {"text": text, "answer": answer, "right": right, "tokens": len(text), "finish": finish}


def line(i, samples, kind="algebra", level=1, asked="What is it?", gold="4"):
    return {"id": f"p{i}", "kind": kind, "level": level, "asked": asked, "gold": gold, "samples": samples}


def result(accuracy, low, high, n=3, **more):
    tokens = {"generated": 100, "mean": 12.4}
    return {"accuracy": accuracy, "interval": [low, high], "n": n, "samples": 1, "pass@k": {"1": accuracy},
            "maj@k": {"1": accuracy}, "truncated": 0.25, "unanswered": 0.125, "tokens": tokens,
            "by": {}, **more}  # fmt: skip


def write_evaluation(folder, samples, benchmarks):
    """samples: benchmark -> policy -> lines."""
    for benchmark, of in samples.items():
        (folder / "samples" / benchmark).mkdir(parents=True)
        for policy, lines in of.items():
            text = "".join(json.dumps(x) + "\n" for x in lines)
            (folder / "samples" / benchmark / f"{policy}.jsonl").write_text(text)
    found = {"schema": 1, "settings": {"limit": 3}, "versions": {}, "seconds": 1.5, "benchmarks": benchmarks}
    (folder / "evaluation.json").write_text(json.dumps(found))
    return folder


def entry(policies, **more):
    return {"n": 3, "dropped": {"prompt": 2, "gold": 0}, "samples": 1, "grader": "math 1", "policies": policies,
            "ensemble_maj": None, **more}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    right, wrong = sample("so it is 4", "4", True), sample("so it is 5", "5", False)
    cut_off = sample("and then", None, False, "length")
    return write_evaluation(
        tmp_path,
        {"gsm8k": {
            "llama": [line(0, [right]), line(1, [wrong]), line(2, [wrong], kind="geometry", level=2)],
            "qwen": [line(0, [wrong], asked="Otherwise?"), line(1, [right])],
            "gemma": [line(0, [cut_off]), line(1, [sample(EVIL, EVIL, None)], gold=EVIL), line(2, [wrong])],
        }},
        {"gsm8k": entry({"llama": result(1 / 3, 0.1, 0.5), "qwen": result(0.5, 0.2, 0.9, 2),
                         "gemma": result(0.0, 0.0, 0.05)})},
    )  # fmt: skip


class Page(HTMLParser):
    """Elements, the texts of scripts by type, and the tables' cells with their class."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.cells, self._in = [], {}, [], None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        self._in = (tag, attrs)
        if tag == "td":
            self.cells.append(["", attrs.get("class", "")])

    def handle_endtag(self, tag):
        self._in = None

    def handle_data(self, data):
        if self._in and self._in[0] == "script":
            kind = self._in[1].get("type", "")
            assert kind not in self.scripts
            self.scripts[kind] = data
        elif self._in and self._in[0] == "td":
            self.cells[-1][0] += data


def opened(folder):
    return Page(evaluation_report.write(folder).read_text(encoding="utf-8"))


def test_no_text_of_a_sample_acts_and_none_is_lost(folder):
    page = opened(folder)
    assert [t for t, _ in page.tags].count("script") == 2 and "img" not in dict(page.tags)
    (benchmark,) = json.loads(page.scripts["application/json"])
    assert "<" not in page.scripts["application/json"]
    problem = benchmark["problems"][1]
    assert problem["gold"] == "4" and problem["id"] == "p1"
    assert problem["by"][benchmark["policies"].index("gemma")] == [[EVIL, EVIL, None, len(EVIL), "stop"]]
    for tag, attrs in page.tags:  # nothing is fetched
        assert tag not in ("link", "iframe", "base") and "src" not in attrs
        assert (attrs.get("href") or attrs.get("xlink:href") or "#").startswith("#")


def test_odd_names_in_results_do_not_act_either(tmp_path):
    name = "</svg><script>alert(1)</script> $x_1$ _"
    by = {"subject": {name: {"accuracy": 0.5, "interval": [0, 1], "n": 2}, "_b": {"accuracy": 1, "interval": [1, 1]}}}
    found = entry({"_a": result(0.5, 0.2, 0.9, by=by), "\ud800$": result(None, None, None, by=by)})
    page = opened(write_evaluation(tmp_path, {}, {"b": found}))
    assert [t for t, _ in page.tags].count("script") == 2
    assert any(c[0] == name for c in page.cells)


def test_table_marks_only_a_lead_beyond_intervals(folder):
    rows = evaluation_report.summary({"b": entry({"x": result(0.5, 0.4, 0.6), "y": result(0.2, 0.1, 0.39)})})[1]
    assert rows[0] == [("b", ""), ("x", ""), ("3", ""), ("0.500 [0.400, 0.600]", "better"), ("25.0 %", ""),
                       ("12.5 %", ""), ("12", "")]  # fmt: skip
    assert rows[1][:2] == [("", ""), ("y", "")] and rows[1][3][1] == ""
    assert not [c for c in opened(folder).cells if c[1]]  # qwen leads, within intervals
    assert evaluation_report.leader({"x": result(0.5, 0.4, 0.6), "y": result(0.2, 0.1, 0.4)}) is None
    assert evaluation_report.leader({"x": result(0.5, 0.4, 0.6)}) is None
    vote = {"accuracy": 0.9, "interval": [0.8, 1.0], "n": 3}
    rows = evaluation_report.summary({"b": entry({"x": result(0.5, 0.4, 0.6)}, ensemble_maj=vote)})[1]
    assert rows[1][1] == ("cohort's vote", "") and rows[1][3] == ("0.900 [0.800, 1.000]", "better")
    assert rows[1][4] == ("", "")


def test_a_benchmark_in_a_sentence():
    said = "3 problems; 1 sample a problem; graded by math 1; 2 left out: longer than the context."
    assert evaluation_report.about(entry({})) == said


def test_more_samples_groups_and_plots(tmp_path):
    ks = {"pass@k": {"1": 0.25, "2": 0.5, "4": 0.75, "3": 0.6}, "maj@k": {"1": 0.25, "2": 0.25, "4": 0.5}}
    group = lambda x: {"accuracy": x, "interval": [x - 0.1, x + 0.1], "n": 2}
    by = {"level": {"10": group(0.3), "2": group(0.4)}, "subject": {"b": group(0.6), "a": group(0.2)}}
    found = {"m": entry({"x": result(0.25, 0.2, 0.3, **ks, by=by), "y": result(0.2, 0.1, 0.3)})}
    head, rows = evaluation_report.summary(found)
    assert head[4:6] == ["pass@k", "maj@k"] and [c[0] for c in rows[0][4:6]] == ["0.750 (4)", "0.500 (4)"]
    head, rows = evaluation_report.more_samples(found)
    assert head == ["", "k = 1", "k = 2", "k = 3", "k = 4"]
    assert [c[0] for c in rows[1]] == ["m, x, maj@k", "0.250", "0.250", "", "0.500"]
    head, rows = evaluation_report.groups(found["m"], "level")
    assert head == ["level", "problems", "x", "y"]
    assert [c[0] for c in rows[1]] == ["10", "2", "0.300 [0.200, 0.400]", ""] and rows[0][0][0] == "2"
    text = evaluation_report.write(write_evaluation(tmp_path, {}, found)).read_text()
    plots = [f"<svg{p.split('</svg>')[0]}</svg>" for p in text.split("<svg")[1:]]
    assert len(plots) == 4
    used = [{e.get("{http://www.w3.org/1999/xlink}href") for e in ET.fromstring(p).findall(".//{*}use")} for p in plots]
    assert all(used) and len(set().union(*used)) == sum(map(len, used))  # no plot draws another's marks
    assert [("pass@k" in p, "accuracy by level" in p, "accuracy by subject" in p) for p in plots] == [
        (False, False, False), (True, False, False), (False, True, False), (False, False, True)]  # fmt: skip


def test_interrupted_and_torn_files(folder):
    path = folder / "samples" / "gsm8k" / "qwen.jsonl"
    path.write_text(path.read_text() + '{"id": "p2", "samp')
    (folder / "samples" / "gsm8k" / "gemma.jsonl").unlink()
    found = evaluation_browser.read(folder, "gsm8k", ["llama", "qwen", "gemma"])
    assert [p["by"][1] is None for p in found["problems"]] == [False, False, True]
    assert found["notes"] == [
        "samples/gsm8k/qwen.jsonl: 1 line could not be read, as after an interruption.",
        "samples/gsm8k/gemma.jsonl is not there.", "qwen has 2 of 3 problems.", "gemma has 0 of 3 problems.",
    ]  # fmt: skip
    assert found["problems"][0]["asked"] == [["What is it?", [0]], ["Otherwise?", [1]]]
    assert found["problems"][1]["asked"] == [["What is it?", [0, 1]]]
    opened(folder)


def test_what_is_left_out_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation_browser, "PROBLEMS", 4)
    monkeypatch.setattr(evaluation_browser, "CHARACTERS", 10)
    lines = [line(i, [sample("abcdefghijklm", "1", True)], asked="q") for i in range(6)]
    write_evaluation(tmp_path, {"b": {"x": lines, "y": lines[::-1]}}, {"b": entry({})})
    found = evaluation_browser.read(tmp_path, "b", ["x", "y"])
    assert [p["id"] for p in found["problems"]] == ["p0", "p1", "p2", "p3"]
    assert all(p["by"][1] for p in found["problems"])
    assert found["problems"][0]["by"][0][0][0] == "abcde\n[… 3 characters left out …]\nijklm"
    assert found["notes"] == [
        "The first 4 of 6 problems are here; 8 texts longer than 10 characters are cut in the middle. "
        "Everything is in samples/b/x.jsonl, samples/b/y.jsonl."
    ]
    size = len("q") + 2 * len(found["problems"][0]["by"][0][0][0])
    assert len(evaluation_browser.read(tmp_path, "b", ["x", "y"], 2 * size)["problems"]) == 2
    assert len(evaluation_browser.read(tmp_path, "b", ["x", "y"], 2 * size - 1)["problems"]) == 1
    assert "The first 4 of 6 problems" in evaluation_report.write(tmp_path).read_text()


@pytest.mark.parametrize("odd", [{"benchmarks": {}}, {"benchmarks": {"b": {}}}])
def test_empty_evaluations(tmp_path, odd):
    (tmp_path / "evaluation.json").write_text(json.dumps({"schema": 1, **odd}))
    assert json.loads(opened(tmp_path).scripts["application/json"]) == [
        {"name": b, "policies": [], "problems": []} for b in odd["benchmarks"]
    ]


def test_command_line(folder, capsys):
    written = evaluation_report.write(folder)
    before = written.read_text()
    written.unlink()
    assert evaluation_report.main(["", str(folder)]) == 0 and written.read_text() == before
    assert capsys.readouterr().out == f"{written}\n"


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda f: f.rmdir(), "no such folder"),
        (lambda f: None, "no evaluation.json"),
        (lambda f: (f / "evaluation.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "evaluation.json").write_text('{"schema": 2}'), "`schema` must be 1"),
    ],
)
def test_wrong_folders_are_one_line_and_code_2(tmp_path, make, said, capsys):
    folder = tmp_path / "f"
    folder.mkdir()
    make(folder)
    assert evaluation_report.main(["", str(folder)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and str(folder) in error
    assert evaluation_report.main([""]) == 2


def test_started_as_a_module(tmp_path):
    command = [sys.executable, "-m", "mutualrl.analysis.evaluation_report", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and "no evaluation.json" in run.stderr


DOCUMENT = r"""
class Node {
  constructor(tag) { this.tag = tag; this.children = []; this.nodes = []; this.on = {}; this.parent = null;
    if (tag === "input") this.value = ""; }
  append(...more) {
    for (const n of more) {
      if (n instanceof Node) { this.children.push(n); n.parent = this; }
      this.nodes.push(n instanceof Node ? n : String(n));
    }
    if (this.tag === "select" && this.value === undefined) this.value = this.children[0].value;
  }
  replaceChildren() { this.children = []; this.nodes = []; }
  remove() {
    this.parent.children = this.parent.children.filter(c => c !== this);
    this.parent.nodes = this.parent.nodes.filter(c => c !== this);
  }
  addEventListener(name, f) { this.on[name] = f; }
  set innerHTML(_) { throw new Error("only texts"); }
  set textContent(t) { this.children = []; this.nodes = [t]; }
  get textContent() { return this.nodes.map(n => n instanceof Node ? n.textContent : n).join(""); }
  find(tag) { return this.children.flatMap(c => [...(c.tag === tag ? [c] : []), ...c.find(tag)]); }
}
const input = JSON.parse(require("fs").readFileSync(0, "utf8"));
const place = new Node("div"), held = new Node("script");
place.dataset = {benchmark: "0"};
held.append(input.data);
const document = {createElement: tag => new Node(tag), getElementById: () => held, querySelectorAll: () => [place]};
globalThis.document = document;
"""


def run_script(folder, after):
    """What the page's script leaves for `after` to print, on a document that has the first benchmark's place only."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not here to run the page's script")
    page = opened(folder)
    code = f"{DOCUMENT}\n{page.scripts['']}\n{after}"
    stdin = json.dumps({"data": page.scripts["application/json"]})
    run = subprocess.run([node, "-e", code], input=stdin, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_filters(folder):
    ids = run_script(
        folder,
        """
        const out = {}, rows = () => place.children[2].children.map(d => d.find("strong")[0].textContent);
        const [show, kind, level] = place.find("select"), text = place.find("input")[0];
        for (const option of show.children) {
          show.value = option.value; show.on.change();
          out[option.textContent] = rows().join(" ");
        }
        show.value = "all"; kind.value = "geometry"; kind.on.change(); out.geometry = rows().join(" ");
        kind.value = ""; level.value = "1"; level.on.change(); out.level = rows().join(" ");
        level.value = ""; text.value = " ONERROR=alert "; text.on.input();
        setTimeout(() => { out.text = rows().join(" "); out.count = place.children[1].textContent;
                           console.log(JSON.stringify(out)); }, 400);
        """,
    )
    assert ids == {
        "all problems (3)": "p0 p1 p2",
        "right for nobody (1)": "p2",
        "wrong for llama (2)": "p1 p2", "wrong for qwen (1)": "p0", "wrong for gemma (2)": "p0 p2",
        "right for llama, wrong for qwen (1)": "p0", "right for llama, wrong for gemma (1)": "p0",
        "right for qwen, wrong for llama (1)": "p1",
        "right for llama (1)": "p0", "right for qwen (1)": "p1",
        "truncated: gemma (1)": "p0", "no answer: gemma (1)": "p0", "cannot be judged: gemma (1)": "p1",
        "not done by qwen (1)": "p2",
        "geometry": "p2", "level": "p0 p1", "text": "p1", "count": "1 of 3 problems",
    }  # fmt: skip


def test_an_opened_problem_shows_all_its_samples(folder):
    found = run_script(
        folder,
        """
        const row = place.children[2].children[1], [head] = row.children;
        row.open = true; row.on.toggle(); row.on.toggle();
        console.log(JSON.stringify({
          head: head.textContent, pre: row.find("pre").map(n => n.textContent),
          names: row.find("h4").map(n => n.textContent), facts: row.find("summary").slice(1).map(n => n.textContent),
          tags: row.find("img").length + row.find("script").length,
        }));
        """,
    )
    assert found["head"] == "p1 · algebra, level 1llama ✗qwen ✓gemma ?What is it?"
    assert found["names"] == ["Asked", "Gold", "llama", "qwen", "gemma"]
    assert found["pre"] == ["What is it?", "4", "so it is 5", "so it is 4", EVIL]
    assert found["facts"][:2] == ["✗ 5 · 10 tokens · stop", "✓ 4 · 10 tokens · stop"] and found["tags"] == 0


def test_several_samples_and_many_problems(tmp_path):
    right, wrong = sample("a", "4", True), sample("b", "5", False)
    lines = [line(i, [right, wrong] if i % 2 else [wrong, wrong]) for i in range(205)]
    write_evaluation(tmp_path, {"b": {"x": lines}}, {"b": entry({"x": result(0.25, 0.2, 0.3)})})
    found = run_script(
        tmp_path,
        """
        const list = place.children[2], sizes = [];
        for (;;) {
          const button = list.find("button")[0];
          sizes.push(list.children.length);
          if (!button) break;
          button.on.click();
        }
        console.log(JSON.stringify({sizes, shows: place.find("select")[0].children.map(o => o.textContent),
                                    marks: list.children.slice(0, 2).map(r => r.find("span")[0].textContent)}));
        """,
    )
    assert found["sizes"] == [101, 201, 205] and found["marks"] == ["x ✗ 0/2", "x ◐ 1/2"]
    assert found["shows"] == ["all problems (205)", "never right for x (103)", "right at least once for x (102)",
                              "now right, now wrong for x (102)"]  # fmt: skip
