"""What people see."""

import io

from rich.console import Console

from mutualrl.report import Progress, Warnings, results_table, show_end


def test_plain_lines_without_a_terminal():
    out = io.StringIO()
    with Progress("Training", 3, console=Console(file=out)) as bar:
        for done in (1, 2, 3):
            bar.update(done, f"reward {done}")
    # The first unit includes compiling and says nothing of the time left; lines come every few seconds at most.
    assert out.getvalue().splitlines() == ["Training 1/3 reward 1", "Training 3/3 reward 3"]


def test_time_left_is_that_of_the_work_after_the_first_unit(monkeypatch):
    out, clock = io.StringIO(), iter([100.0, 120.0])
    monkeypatch.setattr("mutualrl.report.time.monotonic", lambda: next(clock))
    with Progress("Training", 11, console=Console(file=out)) as bar:
        bar.update(1)
        bar.update(3)
    assert out.getvalue().splitlines() == ["Training 1/11", "Training 3/11, 1:20 left"]


def test_a_bar_on_a_terminal():
    out = io.StringIO()
    with Progress("Training", 3, console=Console(file=out, force_terminal=True, width=100)) as bar:
        bar.update(3, "reward 0.5")
    assert "reward 0.5" in out.getvalue() and "3/3" in out.getvalue()


def test_a_warning_comes_once(caplog):
    warn = Warnings()
    for _ in range(3):
        warn("a/truncated", "a: all cut off")
    assert [r.message for r in caplog.records] == ["a: all cut off"] and warn.counts == {"a/truncated": 3}


def test_table_has_every_kind_and_the_change():
    def result(x):
        return {"accuracy": x, "interval": [x - 0.1, x + 0.1], "n": 20}

    before = {"a": {**result(0.2), "kinds": {"rev": result(0.1), "sort": result(0.3)}}}
    after = {"a": {**result(0.6), "kinds": {"rev": result(0.5), "sort": result(0.7)}}}
    out = io.StringIO()
    Console(file=out, width=120).print(results_table(before, after))
    rows = [line.split("│")[1:-1] for line in out.getvalue().splitlines() if line.startswith("│")]
    assert [[c.strip() for c in row] for row in rows] == [
        ["a", "rev", "20", "0.10 [0.00, 0.20]", "0.50 [0.40, 0.60]", "+0.40"],
        ["", "sort", "20", "0.30 [0.20, 0.40]", "0.70 [0.60, 0.80]", "+0.40"],
        ["", "all", "20", "0.20 [0.10, 0.30]", "0.60 [0.50, 0.70]", "+0.40"],
    ]


def test_the_end_says_what_was_dropped_and_where_things_are(tmp_path, capsys):
    (tmp_path / "summary.json").touch()
    (tmp_path / "exchange.log").mkdir()
    summary = {
        "policies": {"a": {}},
        "seconds": 61.0,
        "exchange": {"dropped": {"a/text/utf8": 2, "b/record/absent": 7}},
    }
    show_end(summary, tmp_path)
    out = " ".join(capsys.readouterr().out.split())
    assert "Dropped or missing between policies: 9 (b/record/absent 7, a/text/utf8 2; all in summary.json)" in out
    assert "1:01 in all" in out and "exchange.log/ what policies published" in out and "held_out.json" not in out
    show_end({**summary, "exchange": {}}, tmp_path)
    assert "Dropped" not in capsys.readouterr().out
