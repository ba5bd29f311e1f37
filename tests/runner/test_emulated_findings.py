"""A reader who breaks one fence of a copied rung is told the line; what a rung has from fla is told, not held against it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = 'cute.arch.fence_proxy("async.shared", space="cta")'


def ladder(root: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "ladder", *words, "--root", str(root)], cwd=ROOT, text=True, capture_output=True)


def watched(root: Path, number: str) -> dict:
    done = ladder(root, "check", number, "--archs", "sm_90a", "--properties", "emulated: no findings", "--seed", "1",
                  "--device", "cpu", "--json")  # fmt: skip
    (row,) = json.loads(done.stdout)
    assert done.returncode == (row["outcome"] == "failed"), done.stderr
    return row


def test_a_fence_removed_from_a_copied_rung_is_named_at_its_line(tmp_path: Path) -> None:
    shutil.copy(ROOT / "ladder.yaml", tmp_path)
    shutil.copytree(ROOT / "ideas", tmp_path / "ideas", ignore=shutil.ignore_patterns("records", "__pycache__"))
    made = ladder(tmp_path, "idea", "4", "broken-fence")
    assert made.returncode == 0, made.stderr
    number = re.match(r"ideas/0*(\d+)-broken-fence", made.stdout)[1]
    source = tmp_path / made.stdout.split(":")[0] / "state_sm90.py"
    lines = source.read_text().splitlines()
    (removed,) = [i for i, text in enumerate(lines, 1) if FENCE in text]
    lines[removed - 1] = lines[removed - 1].replace(FENCE, "pass")
    source.write_text("\n".join(lines) + "\n")

    row = watched(tmp_path, number)
    assert row["outcome"] == "failed" and row["name"].endswith("broken-fence")
    assert "without fence.proxy.async" in row["reason"] and "CTA (0,0,0)" in row["reason"] and "warp" in row["reason"]
    named = [int(n) for n in re.findall(r"broken-fence/state_sm90\.py:(\d+)", row["reason"])]
    reader, writer = named[:2]
    assert removed < reader <= removed + 4, row["reason"]  # the copy that the fence stood before
    assert "cute.copy" in lines[reader - 1] and "bulk" in row["reason"] and "stmatrix" in row["reason"]
    assert "copy" in lines[writer - 1], lines[writer - 1]


def test_what_fla_reads_and_throws_away_is_told_as_inherited() -> None:
    row = watched(ROOT, "1")
    assert row["outcome"] == "passed"
    assert "inherited from fla" in row["reason"] and "nobody wrote" in row["reason"] and "fla/ops/gla/chunk.py:" in row["reason"]
