"""The trace: spans of warps that add up, waits and operations with their source, and the command that writes them."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from emulator.cute_host import EmulatedTarget
from emulator.trace import STEPS, Trace, text
from emulator.trace_picture import page, standalone, svg
from ladder import manifest, trace
from ladder.cli import main
from test_cute import operands, run_state

ROOT = Path(__file__).parents[2]


def traced(arch, seed, cta=0):
    trace = Trace(cta)
    run_state(EmulatedTarget(arch, seed=seed, watch=trace), operands(1, 128, 2, 64, 64))
    return trace.launches[0]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("seed", [0, 1])
def test_spans_of_a_state_kernel(arch, seed):
    launch = traced(arch, seed)
    runs = sorted(launch.runs, key=lambda s: s.start)
    # one fragment at a time: the runs of a seeded schedule cover every step of the CTA once
    assert runs[0].start == 0 and runs[-1].end == launch.steps
    assert all(a.end == b.start for a, b in zip(runs, runs[1:]))
    for w in range(launch.warps):
        busy = sorted([s for s in launch.runs + launch.waits if s.warp == w], key=lambda s: s.start)
        assert busy and all(a.end <= b.start for a, b in zip(busy, busy[1:])), w  # nobody runs while waiting
    assert {"mbarrier", "barrier"} & {s.kind for s in launch.waits}
    unit = {"sm_90a": "wgmma", "sm_100a": "tcgen05 mma"}[arch]
    products = [s for s in launch.operations if s.kind == unit]
    assert products and all(s.start <= s.end <= launch.steps for s in products)
    assert any(s.end > s.start for s in products)
    assert all(re.match(r"\w+\.py:\d+", s.where) for s in launch.waits + products), [s.where for s in launch.waits]


def test_the_other_cta_is_another_trace():
    first, second = traced("sm_90a", 3), traced("sm_90a", 3, cta=1)
    assert first.cta == "(0,0,0)" and second.cta != first.cta and second.steps > 0


def test_lockstep_is_traced_too():
    launch = traced("sm_90a", None)
    assert launch.steps == max(s.end for s in launch.runs) and launch.operations


def test_text_and_picture():
    launch = traced("sm_100a", 0)
    lines = text(launch)
    assert STEPS in lines[0] and sum(line.startswith("  warp ") for line in lines) == launch.warps
    assert any("waits on mbarrier" in line and ".py:" in line for line in lines)
    drawn = ElementTree.fromstring(svg(launch))
    words = "".join(drawn.itertext())
    assert STEPS in words and "tcgen05 mma" in words and all(f"warp {w}" in words for w in range(launch.warps))
    space = "{http://www.w3.org/2000/svg}"
    width = float(drawn.get("width"))
    bars = [r for r in drawn.iter(f"{space}rect") if r.get("class") == "b"]
    assert len(bars) > 50 and all(float(r.get("x")) + float(r.get("width")) <= width for r in bars)
    ElementTree.fromstring(standalone([launch, launch]))
    html = page("a <title>", [launch], "counts & more")
    HTMLParser().feed(html)
    assert "a &lt;title&gt;" in html and "counts &amp; more" in html
    assert not re.search(r'(src|href)="', html)  # one file, nothing outside it


def test_command(tmp_path):
    command = [sys.executable, "-m", "ladder", "trace", "2", "--arch", "sm_90a", "--out", str(tmp_path / "t.html")]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "an estimate of work, not a time" in done.stdout and "predicted" in done.stdout and "kda_state" in done.stdout
    assert "<svg" in (tmp_path / "t.html").read_text()


def test_a_file_of_text(tmp_path):
    ladder = manifest.load()
    made = trace.Traced(ladder.rung(2), "sm_90a", ladder.cells(gpu=False)[0], 0, [traced("sm_90a", 0)], [], "")
    trace.write(made, tmp_path / "t.txt")
    assert "waits on" in (tmp_path / "t.txt").read_text()


@pytest.mark.parametrize("option, given, said", [
    ("--out", "t.pdf", r"out: given .*t\.pdf, accepted: .*\.html"),
    ("--arch", "sm_80", "arch: given sm_80, accepted: sm_90a, sm_100a"),
])  # fmt: skip
def test_mistakes(monkeypatch, capsys, option, given, said):
    monkeypatch.setattr(sys, "argv", ["ladder", "trace", "2", option, given])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and re.match(said, capsys.readouterr().err)
