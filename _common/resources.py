"""What a compiled kernel takes (registers, spilled bytes, shared memory) and lacks (wgmma), read from its cubin."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Resources:
    """Per thread: registers, bytes of stack and of local memory. Per CTA: static shared bytes."""

    kernel: str
    registers: int
    stack: int
    local: int
    shared: int

    @property
    def spilled(self) -> int:
        """Bytes per thread outside registers: ptxas puts what it spills on the stack."""
        return self.stack + self.local


_FUNCTION = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_ENTRY = re.compile(r"\.entry ([\w$]+)(.*?)(?=\.entry |\Z)", re.DOTALL)
_SASS = re.compile(r"Function : ([\w$]+)(.*?)(?=Function : |\Z)", re.DOTALL)
_PRODUCT = re.compile(r"\b[HIQB]GMMA\..*")
_FENCE = "WARPGROUP.ARRIVE"
_HOLE = "gdesc[URZ]"  # what stands for a group of products that were removed


def resources(cubin: bytes | Path) -> list[Resources]:
    """One row per kernel of the cubin."""
    return [Resources(name, int(reg), int(stack), int(local), int(shared))
            for name, reg, stack, shared, local in _FUNCTION.findall(_cuobjdump("--dump-resource-usage", cubin))]  # fmt: skip


def wgmma_faults(ptx: str, cubin: bytes | Path) -> list[str]:
    """What ptxas did to the wgmma of each kernel that it should not have, a line each.

    Dropped: it kept fewer than there are in the PTX, or emptied a group. It takes the results of two products in the same registers
    for one value at times; the hardware's answer is then wrong although the PTX is right. Serialised: it put a fence and a wait
    around each product, for want of registers or because a result in flight is touched; right, and slow.
    """
    asked = {kernel: (body.count("wgmma.mma_async"), body.count("wgmma.fence")) for kernel, body in _ENTRY.findall(ptx)}
    if not any(products for products, _ in asked.values()):
        return []
    found = []
    for kernel, body in _SASS.findall(_cuobjdump("-sass", cubin)):
        (wanted, fences), products = asked.get(kernel, (0, 0)), _PRODUCT.findall(body)
        holes = sum(_HOLE in line for line in products)
        kept = len(products) - holes  # more than asked for where a loop was unrolled
        if dropped := max(wanted - kept, holes):
            found.append(f"ptxas dropped {dropped} of {max(wanted, len(products))} wgmma of {kernel}")
        elif body.count(_FENCE) * wanted > fences * kept:
            found.append(f"ptxas serialised the wgmma of {kernel}: {body.count(_FENCE)} fences for {kept} products, {fences} for {wanted} in the PTX")
    return found


def _cuobjdump(what: str, cubin: bytes | Path) -> str:
    """Triton ships it."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin if isinstance(cubin, bytes) else cubin.read_bytes())
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
