"""A ladder of one honest rung and one that cheats; both are plain torch, so that they run on any device."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ladder import manifest

RUNGS = Path(__file__).parent / "rungs"
CASES = {"tiny": {"B": 1, "T": 128, "H": 1, "HV": 2, "K": 32, "V": 32, "gpu": False, "regimes": ["slow"], "forms": ["pre"]},
         "tiny_state": {"B": 1, "T": 128, "H": 1, "HV": 2, "K": 32, "V": 32, "initial_state": True, "gpu": False,
                        "regimes": ["slow"], "forms": ["pre"]}}  # fmt: skip
NOTES = "## What changed\n\n| file | change |\n|---|---|\n| `kernel.py` | everything |\n| `honest.py` | |\n"


@pytest.fixture
def cheat(tmp_path: Path):
    """cheat(name, arch="cpu", **entry): the ladder with 001-honest and 002-<name>."""

    def build(name: str, arch: str = "cpu", gpu: bool = False, **entry: object) -> manifest.Ladder:
        rungs = []
        for number, slug, source in ((1, "honest", "honest"), (2, name.replace("_", "-"), name)):
            folder = tmp_path / "ideas" / f"{number:03d}-{slug}"
            (folder / "records").mkdir(parents=True)
            (folder / "kernel.py").write_text((RUNGS / f"{source}.py").read_text())
            (folder / "honest.py").write_text((RUNGS / "honest.py").read_text())
            (folder / "NOTES.md").write_text(NOTES)
            rungs.append({"number": number, "slug": slug, "parent": 1, "idea": slug, "status": "draft", "archs": [arch],
                          **(entry if number == 2 else {})})  # fmt: skip
        cases = {case: {**sizes, "gpu": gpu} for case, sizes in CASES.items()}
        (tmp_path / "ladder.yaml").write_text(yaml.safe_dump({"cases": cases, "rungs": rungs}, sort_keys=False))
        return manifest.load(tmp_path)

    return build
