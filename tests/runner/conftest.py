"""Small ladders in a temporary folder, whose rungs are plain torch on CPU tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ladder import manifest

HERE = Path(__file__).parent
SMALL = {
    "tiny": {"B": 1, "T": 128, "H": 1, "HV": 2, "K": 32, "V": 32, "gpu": False, "regimes": ["slow", "strong"]},
    "short": {"B": 2, "T": 64, "H": 1, "K": 32, "V": 16, "gpu": False, "regimes": ["slow"], "forms": ["pre"]},
}  # fmt: skip
CORRECT = (HERE / "torch_rung.py").read_text()


class Forge:
    """Builds a ladder rung by rung; each rung is the correct torch one, edited."""

    def __init__(self, root: Path) -> None:
        self.root, self.rungs = root, []
        (root / "ideas").mkdir()

    def rung(self, slug: str, *edits: tuple[str, str], source: str = CORRECT, parent: int | None = None, arch: str = "cpu") -> int:
        """Add a rung whose kernel.py is `source` with each (old, new) replaced once; returns its number."""
        for old, new in edits:
            assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in the source"
            source = source.replace(old, new)
        number = len(self.rungs) + 1
        parent = parent or number
        self.rungs.append({"number": number, "slug": slug, "parent": parent, "idea": slug, "status": "draft", "archs": [arch]})
        folder = self.root / "ideas" / f"{number:03d}-{slug}"
        (folder / "records").mkdir(parents=True)
        (folder / "kernel.py").write_text(source)
        (folder / "NOTES.md").write_text("## What changed\n\n| file | change |\n|---|---|\n| `kernel.py` | the idea |\n")
        (self.root / "ladder.yaml").write_text(yaml.safe_dump({"cases": SMALL, "rungs": self.rungs}, sort_keys=False))
        return number

    def ladder(self) -> manifest.Ladder:
        return manifest.load(self.root)


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    return Forge(tmp_path)
