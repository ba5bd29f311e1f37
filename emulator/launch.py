"""Launching kernels: parameter blocks, devices and the public `run`."""

from __future__ import annotations

import functools
import struct
from collections import OrderedDict

import numpy as np

from . import ptx as decoder
from .engine import Machine, batch_size, threads
from .errors import EmulatorError
from .memory import GlobalMemory

_PACK = {
    ("u", 8): "<Q",
    ("u", 4): "<I",
    ("u", 2): "<H",
    ("u", 1): "<B",
    ("s", 8): "<q",
    ("s", 4): "<i",
    ("s", 2): "<h",
    ("s", 1): "<b",
    ("f", 4): "<f",
    ("f", 8): "<d",
    ("b", 8): "<Q",
    ("b", 4): "<I",
    ("b", 2): "<H",
    ("b", 1): "<B",
}
KEPT_BYTES = 1 << 29  # registers and memories of machines kept for the next launch


@functools.lru_cache(maxsize=64)
def decode(text):
    """Decoded module of a PTX text; the same text is decoded once per process."""
    return decoder.decode(text)


_bound = OrderedDict()  # machines by what they were made for, the most recently used last


def bound(text, kernel, block, smem, arch, cluster, ctas):
    """The machine that runs `ctas` CTAs of a kernel of PTX `text`, made once for as long as there is room for it: binding
    its instructions takes longer than a small launch."""
    module = decode(text)
    entry = module.kernels[kernel]
    batch = batch_size(module, entry, block, smem, ctas, cluster)
    key = text, kernel, block, smem, batch, arch, cluster
    machine = _bound.pop(key, None)
    _bound[key] = machine = machine or Machine(module, entry, block, smem, batch, arch, cluster)
    room = KEPT_BYTES
    for other in reversed(list(_bound)):
        room -= _bound[other].bytes
        if room < 0 and other != key:
            del _bound[other]
    return machine


def triple(x):
    """A launch dimension as three ints."""
    t = (x,) if isinstance(x, int) else tuple(x)
    return (tuple(int(v) for v in t) + (1, 1, 1))[:3]


def parameter_block(kernel, values, memory):
    """Bytes of the kernel's parameters. Tensors and arrays are registered in `memory` and passed as addresses; ints
    and floats are packed by the declared type; bytes are taken as they are. Raises EmulatorError naming the
    parameter that does not fit."""
    if len(values) != len(kernel.params):
        raise EmulatorError(f"{kernel.name} takes {len(kernel.params)} parameters, {len(values)} were given")
    end = max((p.offset + p.size for p in kernel.params), default=0)
    block = bytearray(end)
    for p, v in zip(kernel.params, values):
        if isinstance(v, (bytes, bytearray)):
            raw = bytes(v)
        else:
            if hasattr(v, "data_ptr") or isinstance(v, np.ndarray):
                v = memory.add(v, f"parameter {p.name}")
            try:
                fmt = _PACK[p.type[0], p.size]
                v = float(v) if p.type[0] == "f" else int(v)
                raw = struct.pack(fmt.lower() if fmt[0] != "f" and v < 0 else fmt, v)
            except (KeyError, struct.error, TypeError, ValueError) as e:
                raise EmulatorError(
                    f"parameter {p.name} of {kernel.name} is .{p.type} ({p.size} bytes): cannot hold {v!r}: {e}"
                )
        if len(raw) != p.size:
            raise EmulatorError(f"parameter {p.name} of {kernel.name} has {p.size} bytes, {len(raw)} were given")
        block[p.offset : p.offset + p.size] = raw
    return bytes(block)


class Device:
    """An emulated GPU: an architecture, the memory that kernels may touch, a schedule seed and watchers.

    arch    "sm_90a", "sm_100a" or "sm_103a"
    seed    None for the fixed lockstep schedule, or an int: every warp on its own, in a random (repeatable) order
    watch   an emulator.watch.Watch, told of every memory access and synchronisation event
    strict_waits  True: using a result of tcgen05.ld before tcgen05.wait::ld is an error. False (for code whose compiler
            leaves that to the assembler's register tracking, as Triton 3.9 does): the load happens at the first use,
            and `stats` lists the PTX lines under "early_uses"
    stats   list of one dict per launch: kernel name, grid, block, warp instructions executed by opcode
    """

    def __init__(self, arch="sm_90a", seed=None, watch=None):
        if arch.removesuffix("a") not in ("sm_90", "sm_100", "sm_103"):
            raise ValueError(f"arch: {arch!r}, accepted sm_90a, sm_100a, sm_103a")
        self.arch, self.seed, self.watch = arch, seed, watch
        self.memory = GlobalMemory()
        self.stats = []
        self.strict_waits = True
        self.on_launch = None  # called with (kernel name, grid, memory) before each Triton launch

    def launch(self, text, kernel, grid, block, smem, params, cluster=(1, 1, 1), memory=None):
        """Run one kernel of PTX `text` to completion. params: a list (see parameter_block) or the whole block as
        bytes."""
        module = decode(text)
        if kernel is None and len(module.kernels) == 1:
            kernel = next(iter(module.kernels))
        if kernel not in module.kernels:
            raise EmulatorError(f"no kernel {kernel!r} in the module; it has {', '.join(module.kernels) or 'none'}")
        entry, memory = module.kernels[kernel], memory if memory is not None else self.memory
        raw = bytes(params) if isinstance(params, (bytes, bytearray)) else parameter_block(entry, list(params), memory)
        grid, block, cluster = triple(grid), triple(block), triple(cluster)
        machine = bound(text, kernel, block, int(smem), self.arch, cluster, threads(grid))
        machine.begin(grid, raw, memory, self.seed, self.watch, self.strict_waits)
        if self.watch:
            self.watch.launch(machine)
        try:
            machine.run()
        finally:
            machine.memory = machine.watch = None  # what the launch was given lives no longer than it
        self.stats.append(_statistics(machine))
        return machine


def _statistics(machine):
    by_opcode = {}
    for ins, n in zip(machine.kernel.code, machine.counts):
        if n:
            by_opcode[ins.opcode] = by_opcode.get(ins.opcode, 0) + n
    return {
        "kernel": machine.kernel.name,
        "grid": machine.grid,
        "block": machine.block,
        "shared": machine.shared_size,
        "early_uses": sorted(machine.kernel.code[pc].line for pc in machine.early_uses),
        "warp_instructions": sum(machine.counts),
        "by_opcode": by_opcode,
    }


def run(ptx, kernel=None, grid=1, block=32, smem=0, params=(), *, arch="sm_90a", seed=None, watch=None, cluster=1):
    """Execute a kernel of a PTX text on the CPU; results appear in the tensors or arrays given as parameters.

    ptx     PTX text                          kernel  name of the entry (may be None if the module has one)
    grid, block, cluster  int or up to three  smem    dynamic shared memory, bytes
    params  numpy arrays and CPU torch tensors (passed as pointers), ints, floats, or bytes for by-value structs
    Raises UnsupportedInstruction, MemoryFault, ProtocolError, Deadlock or PtxSyntaxError (all EmulatorError).
    """
    return Device(arch, seed, watch).launch(ptx, kernel, grid, block, smem, params, cluster)
