"""Errors against fp64: the figures, the record, the verdict against the rivals, and how the report shows it."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from kernels.kda import oracle
from ladder import loader, precision, report, report_html, report_terminal, rows
from ladder import record as records
from ladder.cells import draw
from tests.report.conftest import made, quick_intervals  # noqa: F401  (fixtures)
from tests.report.synthetic import NOW
from tests.runner.conftest import Forge

PROJECT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
RIGHT = '    return {"o": o, "final_state": S}\n'


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    return Forge(tmp_path)


def measured(forge: Forge, *numbers: int, **options) -> precision.Run:
    run = precision.Run(forge.ladder(), numbers, precision.Options(seed=7, cases=("short",), **options))
    run.execute()
    return run


def test_figures_by_hand():
    exact = torch.zeros(1, 2, 2, 2, dtype=torch.float64)
    exact[0, :, :, 0] = torch.tensor([[3.0, 4.0], [0.0, 5.0]])  # row norms 3, 4, 0, 5; RMS sqrt(50 / 4)
    x = exact.clone()
    x[0, 1, 0, 1] = 0.7  # the row of zeros is off by 0.7, the row of 5 by 0.6
    x[0, 1, 1, 0] += 0.6
    found = precision.relative_errors(x.float(), exact)
    assert found["worst_row"] == pytest.approx(0.7 / math.sqrt(50 / 4)) and found["l2"] == pytest.approx(math.sqrt(0.85 / 50))
    assert precision.relative_errors(exact.float(), exact) == {"worst_row": 0.0, "l2": 0.0}
    x[0, 0, 0, 0] = torch.inf
    assert precision.relative_errors(x, exact) == {"worst_row": None, "l2": None}


def test_errors_are_those_against_the_recurrence(forge):
    """The recorded figures, computed again from the recorded seed, by other means than the judge's."""
    forge.rung("right")
    (record,) = measured(forge, 1).records
    (cell,) = record["precision"]
    inputs = draw(forge.ladder().cells(gpu=False, cases=["short"])[0], cell["seed"], torch.device("cpu"))
    exact, got = oracle.recurrent(**inputs.call()), loader.load(forge.root / "ideas" / "001-right").chunk_kda(**inputs.call())
    for name, x, ref in zip(("o", "final_state"), got, exact):
        difference = x.double() - ref
        rms = ref.square().sum(-1).mean().sqrt()
        worst = (difference.norm(dim=-1) / torch.maximum(ref.norm(dim=-1), rms)).max().item()
        assert cell["errors"]["rung"][name] == {"worst_row": pytest.approx(worst, rel=1e-6),
                                                "l2": pytest.approx((difference.norm() / ref.norm()).item(), rel=1e-6)}  # fmt: skip
        assert 0 < worst < cell["budgets"][name]
    assert list((forge.root / "ideas").rglob("*.json")) == [], "a record of what a CPU measured is kept only where asked for"


def test_record_is_kept_where_it_is_asked_for(forge, tmp_path):
    """One per rung, written after every cell, whole, with what it takes to do it again."""
    forge.rung("right")
    forge.rung("other", parent=1)
    seen, out = [], tmp_path / "out"
    run = precision.Run(forge.ladder(), [1, 2], precision.Options(seed=7, cases=("tiny",), forms=("pre",), records_dir=out))
    run.on_cell = lambda cell: seen.append([(r["number"], len(r["precision"]), r["complete"]) for r in records.read_all(out)[0]])
    run.execute()
    assert [sorted(s) for s in seen] == [[(1, n, False), (2, n, False)] for n in (1, 2)]
    kept, problems = records.read_all(out, "precision")
    assert problems == [] and len(kept) == 2 and all(r["complete"] for r in kept)
    by_number = {r["number"]: r for r in kept}
    assert [by_number[n] for n in (1, 2)] == run.records
    assert {"code_hash", "versions", "device", "commit", "command", "date"} <= by_number[2].keys()
    assert by_number[2]["seeds"] == {"precision": 7} and by_number[2]["parent"] == "001-right"
    cells = by_number[1]["precision"]
    assert {c["regime"] for c in cells} == {"strong", "slow"} and cells[0]["shape"]["HV"] == 2
    assert cells[0]["seed"] != cells[1]["seed"]
    assert cells[0]["errors"]["rung"] == by_number[2]["precision"][0]["errors"]["rung"], "the same code on the same inputs"
    kernel = forge.root / "ideas" / "001-right" / "kernel.py"
    assert records.stale(by_number[1], forge.ladder()) is None
    kernel.write_text(kernel.read_text() + "# changed\n")
    assert "the code has changed" in records.stale(by_number[1], forge.ladder())


def test_a_callee_cannot_spoil_the_inputs_of_the_next(forge):
    spoils = (RIGHT, '    x["v"].zero_()\n' + RIGHT)
    alone = measured(forge, forge.rung("right")).records[0]["precision"]
    forge.rung("spoils", spoils, parent=1)
    both = measured(forge, 2, 1)
    assert both.records[1]["precision"] == alone


@pytest.mark.parametrize(("edit", "said", "failed"), [
    ((RIGHT, '    return {"o": o * float("nan"), "final_state": S}\n'), None, False),
    ((RIGHT, '    return {"o": o[:, 1:], "final_state": S}\n'),
     "ValueError: o: returned (2, 63, 1, 16), accepted: (2, 64, 1, 16)", True),
    ((RIGHT, '    raise RuntimeError("lost\\nits way")\n'), "RuntimeError: lost its way", True),
    ((RIGHT, "    import kernels.kda.budget as b; b.row_errors = lambda x, e: x[..., 0] * 0\n" + RIGHT),
     "RuntimeError: no error counts here: a callee replaces kernels.kda.budget.row_errors", True),
    (("    return None\n", '    return "q: given K = 32"\n'), "the rung declines it: q: given K = 32", False),
])  # fmt: skip
def test_what_goes_wrong_is_the_rungs_own_row(forge, edit, said, failed):
    from kernels.kda import budget

    forge.rung("right")
    forge.rung("wrong", edit, parent=1)
    real = budget.row_errors
    try:
        run = measured(forge, 1, 2)
    finally:
        budget.row_errors = real
    right, wrong = (r["precision"][0] for r in run.records)
    assert right["errors"]["rung"]["o"]["worst_row"] > 0 and right["absent"] == {}
    if said:
        assert "rung" not in wrong["errors"] and wrong["absent"]["rung"] == said
    else:
        assert wrong["errors"]["rung"]["o"] == {"worst_row": None, "l2": None} and wrong["errors"]["rung"]["final_state"]["l2"] > 0
    assert run.failures == ([f"002-wrong short/slow/pre: {said}"] if failed else [])
    row = rows.precision_rows(run.records[1])[0]
    assert row["verdict"] == ("not run" if said else "no rival") and row["within_budget"] is (None if said else False)


def cell_of(rung: float | None, budget: float = 1e-2, **rivals) -> dict:
    """A cell in which every figure of a callee has one value."""
    def same(e):
        return {t: {"worst_row": e, "l2": e} for t in ("o", "final_state")}

    return {"case": "h96", "regime": "slow", "form": "prod", "seed": 1, "budgets": {"o": budget, "final_state": budget},
            "errors": {"rung": same(rung)} | {n.replace("_", "-"): same(e) for n, e in rivals.items()}, "absent": {}}  # fmt: skip


def record_of(ladder, number, *cells, device="NVIDIA H200", **changes):
    record = records.new("precision", ladder, ladder.rung(number), {"name": device, "arch": "sm_90a"}, precision=list(cells))
    return record | changes


@pytest.mark.parametrize(("cell", "verdict", "best", "within"), [
    (cell_of(2e-3, fla=2e-3, fla_safe=3e-3, cudnn_hopper_cuda=4e-3), "no worse", ("fla", 2e-3), True),
    (cell_of(2e-3, fla=3e-3, fla_safe=3e-3, cudnn_hopper_cuda=1.9e-3), "worse", ("cudnn-hopper-cuda", 1.9e-3), True),
    (cell_of(2e-3, fla=2e-3, kernel_fun=1e-4), "no worse", ("fla", 2e-3), True),
    (cell_of(2.004e-3, fla=2e-3), "no worse", ("fla", 2e-3), True),  # the same three digits
    (cell_of(2.006e-3, fla=2e-3), "worse", ("fla", 2e-3), True),
    (cell_of(2e-3, fla=None, fla_safe=2e-3), "no worse", ("fla-safe", 2e-3), True),
    (cell_of(None, fla=2e-3), "worse", ("fla", 2e-3), False),
    (cell_of(2e-3, kernel_fun=1e-3), "no rival", (None, None), True),
    (cell_of(2e-3, 1e-3, fla=3e-3), "no worse", ("fla", 3e-3), False),
    (cell_of(2e-3, None, fla=3e-3), "no worse", ("fla", 3e-3), None),
])  # fmt: skip
def test_verdict_against_the_best_of_flas_and_cudnns(cell, verdict, best, within):
    record = {"number": 3, "rung": "003-x", "device": {"name": "d", "arch": "sm_90a"}, "date": NOW.isoformat(), "precision": [cell]}
    (row,) = rows.precision_rows(record)
    assert (row["verdict"], row["within_budget"]) == (verdict, within)
    assert [(f["best_rival"], f["best_rival_error"]) for f in row["figures"]] == [best] * 4
    assert "rung" not in row["rivals"] and json.loads(json.dumps(row)) == row


def test_one_figure_of_four_is_enough_to_be_worse():
    for tensor, measure in rows.MEASURES:
        cell = cell_of(2e-3, fla=2e-3)
        cell["errors"]["rung"][tensor][measure] = 2.01e-3
        record = {"number": 3, "rung": "003-x", "device": {}, "date": NOW.isoformat(), "precision": [cell]}
        (row,) = rows.precision_rows(record)
        worse = [(f["tensor"], f["measure"]) for f in row["figures"] if f["worse"]]
        assert row["verdict"] == "worse" and worse == [(tensor, measure)]


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda c: c["errors"].pop("rung"), "precision.0: .*'rung' in exactly one of them"),
    (lambda c: c["absent"].update(rung="declines"), "precision.0: .*'rung' in exactly one of them"),
    (lambda c: c["errors"]["fla"].pop("o"), "precision.0: .*no o of 'fla'"),
    (lambda c: c["errors"]["fla"]["o"].update(l2=-1.0), "precision.0.errors.fla.o.l2: Input should be greater than or equal to 0"),
    (lambda c: c["errors"]["fla"]["o"].pop("l2"), "precision.0.errors.fla.o.l2: Field required"),
    (lambda c: c.pop("seed"), "precision.0.seed: Field required"),
    (lambda c: c["budgets"].update(k=1.0), "precision.0.budgets.k"),
])  # fmt: skip
def test_a_corrupt_record_is_one_line(made, tmp_path, spoil, message):
    ladder, *_ = made(statuses=["current"])
    cell = cell_of(2e-3, fla=3e-3)
    good = record_of(ladder, 1, copy.deepcopy(cell))
    spoil(cell)
    records.write(tmp_path / "good.json", good)
    assert records.read(tmp_path / "good.json") == good
    records.write(tmp_path / "bad.json", record_of(ladder, 1, cell))
    with pytest.raises(records.RecordError, match=f"^bad.json: corrupt record: {message}") as error:
        records.read(tmp_path / "bad.json")
    assert "\n" not in str(error.value)


def test_the_newest_current_measurement_speaks(made):
    ladder, _, bench, _ = made(statuses=["current", "won"])
    old = record_of(ladder, 2, cell_of(2e-3, fla=3e-3), date="2026-03-01T10:00:00+00:00", code_hash="then")
    new = record_of(ladder, 2, cell_of(4e-3, fla=3e-3), date="2026-03-01T11:00:00+00:00", code_hash="now")
    changed = lambda hash_: lambda r: "changed" if r["code_hash"] == hash_ else None  # noqa: E731
    assert [r["verdict"] for r in report.precision([new, old], ladder, changed(""))] == ["worse"]
    assert [r["verdict"] for r in report.precision([new, old], ladder, changed("now"))] == ["no worse"]
    assert [(r["stale"], r["stale_reason"]) for r in report.precision([new], ladder, changed("now"))] == [(True, "changed")]
    table = report.rows([*bench, new], ladder, changed(""))
    with_one = [r for r in table if r["precision"]]
    assert [(r["rung"], r["case"], r["regime"], r["form"]) for r in with_one] == [(2, "h96", "slow", "prod")]
    assert with_one[0]["precision"]["verdict"] == "worse" and with_one[0]["precision"]["rivals"]["fla"]["o"]["l2"] == 3e-3


def test_best_shows_the_verdict_of_the_best_rung_while_it_is_current(made):
    from ladder import best

    ladder, _, bench, _ = made(statuses=["current", "won"])
    measured = record_of(ladder, 2, cell_of(4e-3, fla=3e-3), code_hash="now")
    for why, expected in ((lambda r: None, "worse"), (lambda r: "changed" if r["kind"] == "precision" else None, None)):
        cells = best.standing([*bench, measured], ladder, why)["cells"]
        assert [c["precision"] for c in cells if (c["case"], c["regime"], c["form"]) == ("h96", "slow", "prod")] == [expected]
        assert sum(c["precision"] is not None for c in cells) == (expected is not None)


@pytest.fixture
def shown(tmp_path):
    """A ladder of two rungs with precision records on disk, the second one stale."""
    from tests.report.synthetic import Plan, make

    ladder = make(tmp_path, Plan(["current", "won"]))
    absent = {"rung": "the rung declines it: gates", "cudnn-hopper-cuda": "has no softplus"}
    declined = cell_of(1e-3, fla=1e-3) | {"regime": "init", "absent": absent}
    del declined["errors"]["rung"]
    for number, cells in ((1, [cell_of(4.5e-3, fla=3e-3, cudnn_hopper_cuda=5e-3), declined]), (2, [cell_of(1e-3, fla=2e-3)])):
        record = record_of(ladder, number, *cells, date=NOW.isoformat())
        records.write(ladder.folder(ladder.rung(number)) / "records" / "precision-1.json", record)
    return ladder, lambda r: "the code has changed" if r["number"] == 2 and r["kind"] == "precision" else None


def test_the_terminal_shows_it(shown):
    ladder, stale = shown
    text = io.StringIO()
    report_terminal.show(ladder, Console(file=text, width=200), stale=stale, now=NOW)
    lines = text.getvalue().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("NVIDIA H200, form prod: error relative to fp64"))
    table = [line.split() for line in lines[start:] if line.startswith((" 001    h96", " 002    h96"))]
    assert table[0] == ["001", "h96", "slow", *["4.50e-03", "(1.500x)"] * 4, "yes", "worse", "0", "min"]
    assert table[1] == ["001", "h96", "init", "–", "–", "–", "–", "–", "not", "run", "0", "min"]
    assert table[2][-3:] == ["stale", "0", "min"] and "worse" not in table[2]
    assert any("no error of cudnn-hopper-cuda: has no softplus" in line for line in lines)
    assert any("no error of a rung: the rung declines it: gates" in line for line in lines)
    assert any(line.startswith("stale 002: the code has changed") for line in lines)


def test_the_page_shows_it(shown):
    ladder, stale = shown
    page = report_html.render(ladder, stale, NOW)
    section = page[page.index('<section id="precision">') : page.index('<section id="checks">')]
    assert section.count("4.50e-03") == 4 and section.count("1.500x") == 4 and 'title="fla: 3.00e-03"' in section
    assert '<span class="badge b-loss">worse</span>' in section and '<span class="badge b-stale">stale</span>' in section
    assert "the rung declines it: gates" in section and "no worse" not in section
    assert "001-rung-a/precision-1.json" in page


def test_a_page_without_errors_has_no_such_section(made):
    ladder, _, _, stale = made(statuses=["current"])
    assert 'id="precision"' not in report_html.render(ladder, stale, NOW)


def test_the_page_is_drawn_well(shown, tmp_path):
    from ladder import doctor
    from tests.report.test_page import assert_good, expected_plots, opened

    if doctor.browser() is None:
        pytest.skip("no Chromium on this machine")
    ladder, stale = shown
    assert_good(opened(report_html.render(ladder, stale, NOW), tmp_path), expected_plots(2, 1, stages=4 + 18))


IMPOSTOR = """
from dataclasses import replace
from kernels.kda import rivals
rivals.ALL += (replace(rivals.ALL[0], name="fla-impostor", kernels=("another_kernel",)),)
from ladder.cli import main
main()
"""


def test_a_real_rung_and_fla_in_the_emulator(forge, tmp_path):
    """The command in a process of its own: rung 001 and both ways of fla's on executed PTX, cudnn with its reason, and a
    rival under whose name another kernel runs."""
    forge.rung("fla", source=(PROJECT / "ideas" / "001-baseline" / "kernel.py").read_text(), arch="sm_90a")
    path = forge.root / "ladder.yaml"
    case = {"B": 1, "T": 64, "H": 1, "K": 32, "V": 16, "gpu": False, "regimes": ["slow"], "forms": ["pre"]}
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"cases": {"one": case}}))
    done = subprocess.run([sys.executable, "-c", IMPOSTOR, "precision", "1", "--root", str(forge.root), "--rivals", "--json",
                           "--seed", "4", "--records", str(tmp_path / "out")], env=ENV, capture_output=True, text=True, timeout=500)  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    (record,), problems = records.read_all(tmp_path / "out", "precision")
    assert problems == [] and record["complete"] and record["device"]["arch"] == "sm_90a" and "emulated" in record["device"]["name"]
    (cell,) = record["precision"]
    assert set(cell["errors"]) == {"rung", "fla", "fla-safe"} and cell["errors"]["rung"] == cell["errors"]["fla-safe"]
    assert cell["errors"]["fla"] != cell["errors"]["fla-safe"], "another kernel for the diagonal blocks"
    assert cell["absent"]["fla-impostor"].startswith("another kernel ran: another_kernel expected, launched ")
    assert all(cell["absent"][name] for name in ("cudnn-hopper-cuda", "cudnn-hopper-cute", "kernel-fun"))
    assert row["within_budget"] and row["verdict"] in ("no worse", "worse") and row["absent"] == cell["absent"]
    assert all(1e-4 < f["ours"] < 2e-2 for f in row["figures"])


def test_over_budget_is_a_failure_of_the_command(forge):
    forge.rung("coarse", (RIGHT, '    return {"o": (o * 1.05).to(io), "final_state": S}\n'))
    done = subprocess.run([sys.executable, "-m", "ladder", "precision", "--root", str(forge.root), "--cases", "short"],
                          env=ENV, capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 1 and "seed" in done.stderr
    assert any(line.split()[-5:-4] == ["no"] and "short" in line for line in done.stdout.splitlines()), done.stdout
