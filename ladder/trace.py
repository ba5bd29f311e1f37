"""`trace`: one call of a rung in the emulator: who did what when, and how much work it was, beside the rung's prediction."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder.files import replace_text
from ladder.manifest import Cell, Ladder, ManifestError, Rung

FORMATS = (".html", ".svg", ".txt")


@dataclass(frozen=True)
class Traced:
    """Timelines (emulator.trace.Launch) and counts (emulator.counters.Launch) of one call's launches."""

    rung: Rung
    arch: str
    cell: Cell
    seed: int
    timelines: list[Any]
    counts: list[Any]
    prediction: str

    @property
    def title(self) -> str:
        return f"{self.rung.name} on {self.arch}, {self.cell}, interleaving {self.seed}"


def run(ladder: Ladder, number: int, case: str, arch: str | None, seed: int) -> Traced:
    """Call the rung twice: once in the emulator's default schedule to count, once in an interleaving to trace.

    Makes the emulator this process's device. Raises ManifestError for what ladder.yaml does not hold.
    """
    from ladder.check import probe_cell

    rung = ladder.rung(number)
    archs = [a for a in rung.archs if a != "cpu"]
    arch = arch or next(iter(archs), None)
    if arch not in archs:
        raise ManifestError(f"arch: given {arch}, accepted: {', '.join(archs) or 'none, the rung has no compiled kernels'}")
    cell = probe_cell(ladder.cells(gpu=False, cases=[case]))
    from ladder.worker import emulate

    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    device = emulate(arch)
    import torch

    from emulator.counters import Counters
    from emulator.trace import Trace
    from kernels.kda.contract import Unsupported
    from ladder.cells import draw
    from ladder.loader import load

    loaded, inputs = load(ladder.folder(rung)), draw(cell, seed, torch.device("cpu"))
    counters, trace = Counters(), Trace()
    for device.seed, device.watch in ((None, counters), (seed, trace)):
        try:
            with torch.no_grad():
                loaded.chunk_kda(**inputs.call())
        except Unsupported as reason:
            raise ManifestError(f"case: given {case}, which {rung.name} declines: {reason}") from None
    return Traced(rung, arch, cell, seed, trace.launches, counters.launches, prediction(ladder.folder(rung)))


def prediction(folder: Path) -> str:
    """What the rung's notes predict, "" where there is nothing."""
    try:
        notes = (folder / "NOTES.md").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"^## Prediction\n(.*?)(?=^## |\Z)", notes, re.M | re.S)
    return found[1].strip() if found else ""


def work(t: Traced) -> str:
    """Counts of every launch per head and chunk, beside the rung's prediction."""
    from emulator.counters import table

    from kernels.kda.contract import CHUNK

    case = t.cell.case
    parts = case.B * case.HV * -(-case.T // CHUNK)
    lines = ["predicted (NOTES.md):", *(f"  {line}" for line in t.prediction.splitlines())] if t.prediction else ["predicted: nothing in NOTES.md"]
    lines.append("")
    for launch in t.counts:
        lines += table(launch, parts, "head and chunk")
    return "\n".join(lines)


def summary(t: Traced) -> str:
    """Per launch and warp, how long it ran and on what it waited."""
    from emulator.trace import text

    return "\n".join("\n".join(text(launch)[: launch.warps + 1]) for launch in t.timelines if launch.telling)


def write(t: Traced, path: Path) -> None:
    """The whole trace as a page, a picture or text, by the file's ending; replaces the file at once or not at all."""
    from emulator import trace_picture
    from emulator.trace import text

    if path.suffix == ".html":
        content = trace_picture.page(t.title, t.timelines, work(t))
    elif path.suffix == ".svg":
        content = trace_picture.standalone([x for x in t.timelines if x.telling] or t.timelines)
    else:
        content = "\n".join(line for launch in t.timelines for line in [*text(launch), ""])
    replace_text(path, content)
