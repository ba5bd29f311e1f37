"""Ladders of plain-torch rungs with statuses and records, and the synthetic ladders of the report's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ladder import record as records
from tests.report.conftest import made, quick_intervals  # noqa: F401  (fixtures)
from tests.runner.conftest import CORRECT, Forge

RIGHT = '    return {"o": o, "final_state": S}\n'
SHAPE = {"B": 1, "T": 128, "H": 1, "HV": 2, "K": 32, "V": 32}


class Ladder(Forge):
    """Forge whose rungs have a status, and add their number to o, so that one sees which of them ran."""

    def add(self, status: str = "current", *edits: tuple[str, str], arch: str = "cpu") -> int:
        number = len(self.rungs) + 1
        told = (RIGHT, f'    return {{"o": o + {number}, "final_state": S}}\n')
        self.rung(f"rung-{number}", told, *edits, source=CORRECT, parent=1, arch=arch)
        self.rungs[-1]["status"] = status
        (self.root / "ladder.yaml").write_text(yaml.safe_dump({"cases": {"tiny": SHAPE | {"gpu": True}}, "rungs": self.rungs}))
        return number

    def time(self, number: int, times: dict[tuple[str, str, str], float], device: str = "NVIDIA H200", arch: str = "cpu",
             shapes: dict[str, dict[str, int]] | None = None) -> Path:  # fmt: skip
        """Record milliseconds by (case, regime, form) for a rung as it stands. shapes: of each case, what differs from SHAPE."""
        cells = [{"case": case, "regime": regime, "form": form, "floor_ms": 1.0, "shape": SHAPE | (shapes or {}).get(case, {}),
                  "samples_ms": dict.fromkeys(("rung", "parent", "control"), [ms] * 3),
                  "clocks": dict.fromkeys(("rung", "parent", "control"), "graph")}
                 for (case, regime, form), ms in times.items()]  # fmt: skip
        return self._record("bench", number, {"name": device, "arch": arch}, cells=cells)

    def fail(self, number: int) -> Path:
        row = {"rung": number, "arch": "cpu", "property": "oracle", "outcome": "failed", "reason": "row error"}
        return self._record("check", number, {"name": "here", "arch": "cpu"}, rows=[row])

    def _record(self, kind: str, number: int, device: dict[str, str], **fields) -> Path:
        ladder = self.ladder()
        folder = ladder.folder(ladder.rung(number)) / "records"
        record = records.new(kind, ladder, ladder.rung(number), device, **fields)
        return records.create(records.path_for(folder, record), record)


@pytest.fixture
def rungs(tmp_path: Path) -> Ladder:
    return Ladder(tmp_path)
