"""What a compiled kernel takes: registers, spilled bytes and shared memory, read from its cubin."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Resources:
    """Per thread: registers, stack and local (spilled) bytes. Per CTA: static shared bytes."""

    kernel: str
    registers: int
    stack: int
    local: int
    shared: int


_FUNCTION = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


def resources(cubin: bytes | Path) -> list[Resources]:
    """One row per kernel of the cubin, by cuobjdump (Triton ships it)."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin if isinstance(cubin, bytes) else cubin.read_bytes())
        file.flush()
        dump = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
    return [Resources(name, int(reg), int(stack), int(local), int(shared))
            for name, reg, stack, shared, local in _FUNCTION.findall(dump)]  # fmt: skip
