"""A small repository in a temporary folder: two rungs, a commented ladder.yaml."""

from pathlib import Path

import pytest

YAML = """\
# the cases
cases:
  h96: {B: 1, T: 8192, H: 96, K: 128, V: 128, gpu: true}   # the headline

# every rung, oldest first
rungs:
  - number: 1
    slug: baseline
    parent: 1
    idea: fla's forward, stage by stage   # nothing of ours yet
    status: current
    archs: [sm_90a, sm_100a]
    replaces: []

  # the first one that wins
  - number: 2
    slug: fused
    parent: 1
    idea: "scan and output in one kernel: fewer bytes"
    status: won
    archs: [sm_90a, sm_100a]
    replaces: [scan, output]
    # a remark at the end of rung 2

# trailing comment
"""

KERNEL = '''"""002-fused: one kernel. Rung 002 replaces two stages; rung 2 of its parent 001-baseline.

See 002-fused-more, which is another name.
"""
NAME = "002-fused"
'''


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    (tmp_path / "ladder.yaml").write_text(YAML)
    for name, text in (("001-baseline", '"""001-baseline: fla."""\n'), ("002-fused", KERNEL)):
        folder = tmp_path / "ideas" / name
        (folder / "records").mkdir(parents=True)
        (folder / "records" / "bench-x.json").write_text("{}")
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "kernel.pyc").write_bytes(b"\x00")
        (folder / "kernel.py").write_text(text)
        (folder / "NOTES.md").write_text(f"# {name}\n\nold notes\n")
    (tmp_path / "ideas" / "002-fused" / "state_sm90.py").write_text("WARPS = 4\n")
    (tmp_path / "ideas" / "002-fused" / "table.bin").write_bytes(bytes(range(256)))
    return tmp_path


@pytest.fixture
def snapshot():
    def take(root: Path) -> dict[str, bytes]:
        return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}

    return take
