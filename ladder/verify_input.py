"""SentryWard's view of a launch of the state kernel, taken from the launch itself.

The unit's own host code runs on CPU tensors against the emulator's stand-in runtime, with a device that records
launches instead of running them. The tensor maps and scalars in the recorded parameter block, the grid, the block and
the dynamic shared memory are then written as SentryWard reads them; an address becomes the name of the tensor there.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Any

import torch

from _common.cute import Unit
from emulator.cute_host import EmulatedTarget
from emulator.hw import tensormap
from emulator.launch import decode

SCHEMA = "spverify.kernel-input/v1"
CHUNK = 64
INPUTS = ("qg", "w", "kg", "u", "aqk", "g2", "h0")  # in the order of the kernel's and the reference's arguments
OUTPUTS = ("o", "ht")
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """Extents of a launch: T tokens, B batches, HV heads; K and V as the unit was built for."""

    T: int
    B: int = 1
    HV: int = 1
    K: int = 128
    V: int = 64

    def tensors(self, io: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
        """Uninitialised tensors by name: only their layouts and addresses are looked at."""
        B, T, HV, K, V = self.B, self.T, self.HV, self.K, self.V
        widths = {"qg": K, "w": K, "kg": K, "u": V, "aqk": CHUNK, "o": V}
        found = {name: torch.empty(B, T, HV, width, dtype=io) for name, width in widths.items()}
        found["g2"] = torch.empty(B, T, HV, K)
        return found | {name: torch.empty(B, HV, K, V) for name in ("h0", "ht")}


@dataclass(frozen=True)
class Launch:
    """A recorded launch of `ptx`: what SentryWard is told of it (`input`), which parameter `scale` is, the shape."""

    ptx: str
    shape: Shape
    input: dict[str, Any]
    scale: int


class _Recorder:
    """Stands where the emulator's device does; keeps the launches."""

    def __init__(self, arch: str) -> None:
        self.arch, self.launches = arch, []

    def launch(self, ptx, kernel, grid, block, smem, params, cluster, memory=None):
        self.launches.append((ptx, kernel, grid, block, smem, params, cluster))


def record(unit: Unit, shape: Shape) -> Launch:
    """The launch that the unit's host function makes at `shape`."""
    tensors = shape.tensors(getattr(torch, dict(unit.params)["dtype"]))
    recorder = _Recorder(unit.arch)
    order = (*INPUTS, *OUTPUTS)
    EmulatedTarget(unit.arch, device=recorder).load(unit)(*(tensors[name] for name in order), shape.K**-0.5)
    ((ptx, kernel, grid, block, smem, params, cluster),) = recorder.launches
    declared = decode(ptx).kernels[kernel].params
    names = {tensor.data_ptr(): name for name, tensor in tensors.items()}
    maps, arguments, pointers, scale = [], [], [], -1
    for index, p in enumerate(declared):
        raw = params[p.offset : p.offset + p.size]
        if p.size == 128:
            maps.append(_tensor_map(index, raw, names))
        elif p.type == "f32":
            scale = index
            arguments.append({"parameter": index, "offset": 0, "type": "f32", "value": struct.unpack("<f", raw)[0]})
        else:
            for offset, width in _reads(ptx, p.name):
                value = int.from_bytes(raw[offset : offset + width], "little")
                where = {"parameter": index, "offset": offset}
                if width == 8 and value in names:
                    pointers.append(where | {"type": "pointer", "space": "global", "object": names[value]})
                else:
                    arguments.append(where | {"type": f"u{8 * width}", "value": value})
    content = {
        "schema": SCHEMA, "declarations": pointers, "arguments": arguments, "tma_descriptors": maps,
        "launch": {"grid_dim": list(grid), "block_dim": list(block), "cluster_dim": list(cluster),
                   "dynamic_shared_bytes": smem},
    }  # fmt: skip
    return Launch(ptx, shape, content, scale)


def _reads(ptx: str, parameter: str) -> list[tuple[int, int]]:
    """(offset, bytes) of every `ld.param` of a parameter."""
    found = set()
    load = re.compile(rf"ld\.param(?:\.v(\d))?\.[a-z](\d+)\s[^;]*\[{parameter}(?:\+(\d+))?\]")
    for vector, bits, offset in load.findall(ptx):
        width = int(bits) // 8
        found |= {(int(offset or 0) + i * width, width) for i in range(int(vector or 1))}
    return sorted(found)


def _tensor_map(parameter: int, raw: bytes, names: dict[int, str]) -> dict[str, Any]:
    m = tensormap.decode(raw)
    return {
        "parameter": parameter, "object": names[m.address], "element_type": m.dtype, "rank": m.rank,
        "global_shape": list(m.dims), "global_strides_bytes": list(m.strides), "box_shape": list(m.box),
        "element_strides": list(m.estrides), "swizzle": m.swizzle, "interleave": "none", "oob_fill": m.fill,
    }  # fmt: skip


def equality_binding(launch: Launch) -> dict[str, Any]:
    """Which of the reference's arguments and results is which tensor; for one head, one batch, one V tile."""
    tensors = launch.shape.tensors()

    def allocation(name: str) -> str:
        return f"6:global{len(name)}:{name}"

    def facts(name: str) -> tuple[list[int], list[int], int]:
        """Shape without the heads and batches, strides in bytes, bytes of an element."""
        t = tensors[name].squeeze()
        return list(t.shape), [s * t.element_size() for s in t.stride()], t.element_size()

    def layout(name: str) -> dict[str, Any]:
        shape, strides, size = facts(name)
        return {"shape": shape, "element_bytes": size, "source_offset": 0, "target_offset": 0,
                "source_strides_bytes": strides, "target_strides_bytes": strides}  # fmt: skip

    def argument(name: str) -> dict[str, Any]:
        dtype = str(tensors[name].dtype).removeprefix("torch.")
        return {"name": name, "allocation": allocation(name), "shape": facts(name)[0], "dtype": dtype}

    def output(name: str) -> dict[str, Any]:
        shape, strides, size = facts(name)
        return {"left_allocation": allocation(name), "right_allocation": allocation(name), "shape": shape,
                "left_strides_bytes": strides, "right_strides_bytes": strides, "element_bytes": size,
                "left_offset": 0, "right_offset": 0}  # fmt: skip

    names = {name: allocation(name) for name in INPUTS}
    side = {"layouts": {a: layout(n) for n, a in names.items()}, "allocations": {a: a for a in names.values()}}
    return {
        "reference": {
            "arguments": [argument(n) for n in INPUTS] + [{"name": "scale", "parameter": launch.scale}],
            "outputs": [{"allocation": allocation(n), "shape": facts(n)[0]} for n in OUTPUTS],
        },
        "outputs": {"kind": "dense_tensors", "tensors": [output(n) for n in OUTPUTS]},
        "left_inputs": side, "right_inputs": side,
    }  # fmt: skip
