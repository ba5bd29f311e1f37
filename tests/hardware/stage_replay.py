"""A recorded stage repeated in the emulator: the same PTX on the same bytes."""

from __future__ import annotations

import re

import numpy as np
from fixture_files import Fixture
from programs.program import aligned
from stage_recorder import ARCH


def replay(stage: dict, fixture: Fixture, watch=None) -> list[np.ndarray]:
    """The bytes (uint8) that each of the stage's buffers holds after all its launches. Raises emulator.EmulatorError."""
    import emulator
    from emulator.memory import GlobalMemory

    held = [aligned(fixture.arrays["stages"].get(b["before"])) for b in stage["buffers"]]
    device = emulator.Device(ARCH, watch=watch)
    device.strict_waits = False
    for launch in stage["launches"]:
        memory, block = GlobalMemory(), bytearray.fromhex(launch["parameters"])
        for offset, i, into in launch["relocations"]:
            memory.add(held[i], f"buffer {i} ({', '.join(names(stage['buffers'][i])) or 'scratch'})")
            block[offset : offset + 8] = (held[i].ctypes.data + into).to_bytes(8, "little")
        device.launch(
            fixture.index["ptx"][launch["ptx"]],
            launch["kernel"],
            launch["grid"],
            launch["block"],
            launch["shared"],
            bytes(block),
            memory=memory,
        )
    return held


def names(buffer: dict) -> list[str]:
    return [*buffer.get("inputs", ()), *buffer.get("outputs", ())]


OPEN = re.compile(r"^\s*(@!?%?\w+\s+)?(\w*mma\w*|\w+\.approx|div\.full|\w+\.full)\b")


def fixed(stage: dict, fixture: Fixture) -> str | None:
    """None where the order of the stage's instructions fixes every rounding, else the first instruction that leaves one open.

    Open are tensor-core sums, approximate functions, and a mul.f32 without a rounding modifier whose result an add or sub
    without one takes: the assembler may contract the two into one fma (PTX ISA, "Rounding Modifiers": no modifier allows it).
    """
    for launch in stage["launches"]:
        products: set[str] = set()
        for line in fixture.index["ptx"][launch["ptx"]].split("\n"):
            line = line.split("//")[0].strip().removeprefix("{").strip()
            if OPEN.match(line) or "mma.sync" in line or "wgmma.mma" in line:
                return line
            if m := re.match(r"(?:@!?%?\w+\s+)?(mul|add|sub)(\.ftz)?\.f32\s+(%?\w+), (.*);", line):
                op, _, result, sources = m.groups()
                if op != "mul" and any(s in products for s in re.findall(r"%\w+", sources)):
                    return line
                if op == "mul":
                    products.add(result)
    return None
