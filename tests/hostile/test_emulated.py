"""The ladder's own rungs against hostile inputs, their compiled kernels executed in the emulator.

Fast: the first rung and the newest of each kind of intra stage, a few cases each in one process. Slow: every rung of
ladder.yaml on every architecture it claims, every family of `check` as far as it runs under the emulator, then the
longer list below.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kernels.kda import hostile
from ladder import checks, manifest
from tests.faults.conftest import ENV

LADDER = manifest.load(manifest.ROOT)
SEATS = [(number, arch) for number in LADDER.numbers() for arch in LADDER.rung(number).archs]
FAMILIES = [name for name in checks.ALL if name.startswith("hostile: ")]
FEW = {
    1: "gate=-5; safe=no gate=inf@20; T=1; T=70 V=192",
    4: "gate=-5; keys=same gate=0 beta=1; T=17 dtype=float16 gtype=bfloat16; T=33 V=96",
}  # fmt: skip
# The emulator takes seconds for a chunk: fewer tokens than `check` uses on a GPU, and no head dimension beyond 256.
LONG = [
    text.replace("@70", "@66").replace("T=130", "T=70").replace("T=200", "T=70")
    for core, more in hostile.FAMILIES.values() for text in more
    if not any(word in text for word in ("V=512", "K=256", "K=512", "gate=inf@70"))
]  # fmt: skip


def check(number: int, arch: str, *args: str, timeout: float = 600) -> list[dict]:
    command = [sys.executable, "-m", "ladder", "check", str(number), "--device", "cpu", "--archs", arch, "--json", *args]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=timeout)
    assert done.stdout.startswith("["), done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", FEW)
def test_a_few_cases(number):
    (row,) = check(number, "sm_90a", "--hostile", FEW[number])
    assert row["outcome"] == "passed", f"{row['reason']} (--seed {row['seed']})"
    inherited = "inf@" in FEW[number]
    assert row["hostile"]["inherited"] == inherited and row["hostile"]["passed"] + row["hostile"]["refused"] == 4 - inherited
    if inherited:
        assert "inherited `safe=no gate=inf@20: fla's gate stage; fla's chunk_kda: o: NaN or Inf" in row["reason"]


def test_tf32_with_identical_keys_is_inherited():
    """By rungs that keep fla's intra stage. 004 has one of its own and is right."""
    case = ("--hostile", "T=2 dtype=float16 gate=-0.5 keys=same beta=1 state=2^8", "--seed", "6")
    for number, kind in ((3, "inherited"), (4, "passed")):
        (row,) = check(number, "sm_90a", *case)
        assert row["outcome"] == "passed" and row["hostile"][kind] == 1, row
        assert ("fla's intra stage; fla's chunk_kda: final_state: row error" in row["reason"]) == (kind == "inherited")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("number", "arch"), SEATS)
def test_families(number, arch):
    rows = check(number, arch, "--properties", ",".join(FAMILIES), timeout=7000)
    assert len(rows) == len(FAMILIES)
    assert [f"{row['property']}: {row['reason']}" for row in rows if row["outcome"] != "passed"] == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("number", "arch"), SEATS)
def test_long_list(number, arch):
    (row,) = check(number, arch, "--hostile", "; ".join(dict.fromkeys(LONG)), "--time-limit", "7000", timeout=7100)
    assert row["outcome"] == "passed", row["reason"]
