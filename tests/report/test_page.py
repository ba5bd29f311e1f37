"""Opens the page in a headless Chromium at laptop width and asks it, from inside, whether all is drawn and fits."""

import html
import json
import re
import subprocess
from pathlib import Path

import pytest

from ladder import doctor, files, record, report_html
from tests.report.synthetic import NOW, Plan, make

CHECK = (Path(__file__).parent / "selfcheck.js").read_text()
CATCH = """<script>window.__errors = [];
addEventListener("error", (e) => __errors.push(String(e.message || (e.target && e.target.outerHTML))), true);
addEventListener("unhandledrejection", (e) => __errors.push(String(e.reason)));
for (const f of ["error", "warn"]) {
  const was = console[f];
  console[f] = (...a) => { __errors.push(a.join(" ")); was(...a); };
}
</script>"""
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--window-size=1366,900",
)

needs_browser = pytest.mark.skipif(doctor.browser() is None, reason="no Chromium on this machine")


def opened(page: str, tmp_path: Path) -> dict:
    """What the page says of itself once loaded, plus what the browser wrote to its console."""
    file = tmp_path / "page.html"
    page = page.replace("<head>", "<head>" + CATCH, 1).replace("</body>", f"<script>{CHECK}</script></body>", 1)
    file.write_text(page, encoding="utf-8")
    command = [doctor.browser(), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="selfcheck">(\{.*?)</pre>', done.stdout, re.S)
    assert found, f"the page did not finish loading: {done.stderr[-800:]}"
    out = json.loads(html.unescape(found.group(1)))
    out["console"] = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return out


def assert_good(out: dict, plots: int) -> None:
    assert out["errors"] == [] and out["console"] == []
    assert out["plots"] == plots and out["undrawn"] == []
    assert out["overflow"] == []
    assert out["clipped"] == []
    assert out["contrast"] == []
    assert out["unlabelled"] == []
    assert out["themed"] and out["ages"]
    for table in out["behaviour"]:
        assert all(table.values()), table


def expected_plots(rungs: int, devices: int, stages: int) -> int:
    """Per device: 2 forms x (heat map, rung heat map, 7 climbs, 4 floors), stage plots, 2 verdicts a rung. Checks."""
    return devices * (2 * (1 + 1 + 7 + 4) + stages + 2 * rungs) + 1


@needs_browser
@pytest.mark.parametrize(
    "plan",
    [
        {"statuses": ["current", "won", "falsified", "won", "draft"], "stale": {2}, "failing": {4}},
        {"statuses": ["current"]},
        {
            "statuses": ["current", "won"],
            "devices": [("NVIDIA H200", "sm_90a"), ("NVIDIA B200", "sm_100a")],
            "rivals": False,
        },
    ],
    ids=["every state", "one rung", "two devices, no rival"],
)
def test_page(made, tmp_path, plan):
    ladder, p, _, stale = made(**plan)
    out = opened(report_html.render(ladder, stale, NOW), tmp_path)
    assert_good(out, expected_plots(len(p.statuses), len(p.devices), stages=4 + 18))


@needs_browser
@pytest.mark.parametrize(
    "plan, plots",
    [({"statuses": []}, 0), ({"statuses": ["draft"], "unbenched": {1}}, 1)],
    ids=["empty", "checked only"],
)
def test_page_without_timings(made, tmp_path, plan, plots):
    ladder, _, _, stale = made(**plan)
    assert_good(opened(report_html.render(ladder, stale, NOW), tmp_path), plots)


@needs_browser
@pytest.mark.slow
def test_page_of_a_long_ladder(made, tmp_path):
    ladder, p, _, stale = made(statuses=["current"] + ["won", "falsified"] * 9)
    assert_good(opened(report_html.render(ladder, stale, NOW), tmp_path), expected_plots(19, 1, stages=22))


@needs_browser
def test_the_page_check_sees_faults(made, tmp_path):
    """The check itself must be able to fail: each planted fault is found."""
    ladder, _, _, stale = made(statuses=["current"])
    page = report_html.render(ladder, stale, NOW)
    faults = (
        '<p style="width: 1500px">wide</p><svg data-plot aria-label="bare" width="300" height="100"></svg>'
        '<svg data-plot aria-label="out" viewBox="0 0 100 50" width="100"><circle cx="99" cy="20" r="9"/></svg>'
        '<small class="dim" style="color: #bbb; background: #fff">pale</small><script>console.error("said")</script>'
    )
    out = opened(page.replace("</main>", faults + "</main>"), tmp_path)
    assert out["errors"] == ["said"] and len(out["console"]) == 1
    assert any("wide" in x for x in out["overflow"]) and any(x.startswith("bare") for x in out["undrawn"])
    assert any(x.startswith("out: circle") for x in out["clipped"]) and any("pale" in x for x in out["contrast"])


def test_page_is_self_contained_and_escaped(made):
    ladder, _, _, stale = made(statuses=["current"] + ["won"] * 7)
    page = report_html.render(ladder, stale, NOW)
    assert not re.search(r'(?:src|href)="(?!#|data:)', page) and "@import" not in page and "url(" not in page
    assert "<b>ampersands" not in page and "&lt;b&gt;ampersands &amp; angle&lt;/b&gt;" in page


def test_page_says_why_a_rung_is_falsified_and_what_is_stale(made):
    ladder, _, _, stale = made(statuses=["current", "won", "falsified", "won", "draft"], stale={2}, failing={4})
    page = report_html.render(ladder, stale, NOW)
    assert "falsified: the extra barrier costs more than the overlap gains: 1.08x at h96" in page
    assert "36 of 180</b> <span>rows are stale" in page
    assert "Rungs that fail a check are left out (004)" in page
    assert "row 63 of o changes when token 64 changes" in page and "needs a GPU" in page
    best = re.search(r"<h3>Best rung against the best rival</h3>.*?<h3>Speed", page, re.S).group(0)
    assert set(re.findall(r"<small>(\d+) / ", best)) == {"001"}, (
        "002 is stale, 003 falsified, 004 fails, 005 is a draft"
    )


def test_page_is_replaced_in_one_step(made, tmp_path, monkeypatch):
    ladder, _, _, _ = made(statuses=["draft"], unbenched={1})
    target = tmp_path / "out" / "report.html"
    assert report_html.write(target, ladder) == target
    first = target.read_text()
    monkeypatch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError):
        report_html.write(target, ladder)
    assert target.read_text() == first and [p.name for p in target.parent.iterdir()] == ["report.html"]


def test_a_record_with_only_what_the_schema_demands(tmp_path):
    """Optional fields may be absent: the record's own module makes the rest."""
    ladder = make(tmp_path, Plan(["current"], unbenched={1}))
    rung = ladder.rung(1)
    times = [0.5, 0.51, 0.49, 0.5]
    cell = {"case": "h96", "regime": "slow", "form": "pre", "floor_ms": 0.2}
    cell["samples_ms"] = dict.fromkeys(("rung", "parent", "control"), times)
    cell["clocks"] = dict.fromkeys(cell["samples_ms"], "events")
    rec = record.new("bench", ladder, rung, {"name": "bare", "arch": "sm_90a"}, cells=[cell])
    record.write(record.path_for(ladder.folder(rung) / "records", rec), rec)
    page = report_html.render(ladder)
    assert "<h2>bare</h2>" in page and "0.500" in page and "unfinished run" in page


def test_matrix_spreads_what_has_no_architecture_and_drops_what_never_ran():
    def row(arch, prop, outcome, reasons=()):
        return {"rung": 1, "arch": arch, "device": "H200", "property": prop, "outcome": outcome, "reasons": list(reasons)} | {
            "date": NOW.isoformat(), "stale": False, "runs": {}}

    matrix = report_html._matrix([row("-", "notes", "passed"), row("sm_90a", "oracle", "failed", ["off by 2"]),
                                  row("sm_100a", "oracle", "not run", ["this GPU is sm_90a"])])
    assert matrix["columns"] == [(1, "sm_90a", "H200")] and matrix["rungs"] == [(1, 1)]
    assert [(name, cells[0]["outcome"]) for name, cells in matrix["lines"]] == [("notes", "passed"), ("oracle", "failed")]
    assert matrix["not_run"] == [("sm_100a", "H200", "this GPU is sm_90a", [1])]
    alone = report_html._matrix([row("-", "notes", "passed")])
    assert alone["columns"] == [(1, "-", "H200")]
