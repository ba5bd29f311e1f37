"""A rung's stages run one by one, with everything that its kernels were given and left: what an emulator needs to repeat them.

Stage by stage: the tensors that the stage's launches touched, as they were before and after it, and each launch. Empty tensors
are filled with NaN first (torch's own deterministic fill), so that memory nobody wrote has known contents.

A Triton launch is kept as it is: PTX, kernel, grid, block, parameters. A CuTe unit launches from compiled host code, which
can be asked what it launches on any machine (`resolve`): kept are the unit's name and its arguments.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from fixture_files import Arrays

ARCH = "sm_90a"
TENSORS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")


@dataclass
class Stage:
    """What is being recorded. buffers: (address, bytes) -> index; contents: each one's last known bytes."""

    arrays: Arrays
    ptx: dict[str, str]
    buffers: list[dict] = field(default_factory=list)
    launches: list[dict] = field(default_factory=list)
    _ids: dict[tuple[int, int], int] = field(default_factory=dict)
    _last: dict[int, bytes] = field(default_factory=dict)
    _tensors: dict[int, Any] = field(default_factory=dict)

    def see(self, tensor) -> int:
        """The buffer of a tensor that a launch is about to touch: the known one, unless torch has changed it since."""
        key, x = (tensor.data_ptr(), _span(tensor) * tensor.element_size()), _host(tensor)
        i = self._ids.get(key)
        if i is None or self._last[i] != x.tobytes():
            i = self._ids[key] = len(self.buffers)
            self.buffers.append({"before": self.arrays.put(x)})
        self._last[i], self._tensors[i] = x.tobytes(), tensor
        return i

    def look(self, touched) -> None:
        """After a launch: what its buffers hold now."""
        for i in touched:
            self._last[i] = _host(self._tensors[i]).tobytes()

    def text(self, ptx: str) -> str:
        key = hashlib.sha256(ptx.encode()).hexdigest()[:24]
        self.ptx[key] = ptx
        return key

    def finish(self, given: dict[str, Any], left: dict[str, Any]) -> dict[str, Any]:
        """names of inputs and outputs per buffer, and what the buffers hold at the end."""
        for names, tensors in (("inputs", given), ("outputs", left)):
            for name, t in tensors.items():
                i = self._ids.get((t.data_ptr(), _span(t) * t.element_size())) if hasattr(t, "data_ptr") and t.numel() else None
                if i is not None:
                    self.buffers[i].setdefault(names, []).append(name)
                    self.buffers[i]["dtype"] = str(t.dtype).removeprefix("torch.")
                    self.buffers[i]["shape"] = list(t.shape)
        for i, b in enumerate(self.buffers):
            b["after"] = self.arrays.put(np.frombuffer(self._last[i], np.uint8))
        return {"buffers": self.buffers, "launches": self.launches}


_open: list[Stage] = []  # the stage being recorded, if any


def _span(t) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def _host(t) -> np.ndarray:
    """The bytes from the tensor's first to its last element."""
    import torch

    return t.detach().as_strided((_span(t),), (1,)).cpu().view(torch.uint8).numpy().copy()


class Launcher:
    """Triton's launcher for one kernel, recorded."""

    def __init__(self, inner, src, metadata) -> None:
        self.inner, self.metadata, self.names, self.signature = inner, metadata, src.fn.arg_names, src.signature

    def __call__(self, gx, gy, gz, stream, function, packed, launch_metadata, enter, leave, *args):
        if not _open or gx * gy * gz == 0:
            return self.inner(gx, gy, gz, stream, function, packed, launch_metadata, enter, leave, *args)
        from emulator.launch import decode, parameter_block
        from emulator.memory import GlobalMemory

        stage, md, ptx = _open[-1], self.metadata, _ptx(self.metadata)
        if md.num_ctas != 1 or md.global_scratch_size or md.profile_scratch_size:
            raise NotImplementedError(f"{md.name}: clusters and scratch memory are not recorded")
        given = [v for n, v in zip(self.names, args, strict=True) if self.signature[n] != "constexpr"]
        tensors = [v for v in given if hasattr(v, "data_ptr") and v.numel()]
        touched = [stage.see(t) for t in tensors]
        values = [
            v.data_ptr() if hasattr(v, "data_ptr") else int(v) if isinstance(v, bool) else 0 if v is None else v for v in given
        ]
        kernel = decode(ptx).kernels[md.name]
        block = parameter_block(kernel, values + [0] * (len(kernel.params) - len(values)), GlobalMemory())
        at = relocations(block, [(t.data_ptr(), _span(t) * t.element_size()) for t in tensors], touched)
        stage.launches.append({"ptx": stage.text(ptx), "kernel": md.name, "grid": [gx, gy, gz],
                               "block": [32 * md.num_warps, 1, 1], "shared": md.shared, "parameters": block.hex(),
                               "relocations": at})  # fmt: skip
        self.inner(gx, gy, gz, stream, function, packed, launch_metadata, enter, leave, *args)
        stage.look(touched)


def _ptx(metadata) -> str:
    from triton.runtime.cache import get_cache_manager

    files = get_cache_manager(metadata.hash).get_group(f"{metadata.name}.json")
    return Path(next(p for n, p in files.items() if n.endswith(".ptx"))).read_text()


def relocations(block: bytes, spans: list[tuple[int, int]], buffers: list[int]) -> list[list[int]]:
    """[offset in the block, buffer, offset in the buffer] of every 8-byte word that is an address inside one of `spans`."""
    found = []
    for offset in range(0, len(block) - 7, 8):
        word = int.from_bytes(block[offset : offset + 8], "little")
        for (start, nbytes), i in zip(spans, buffers, strict=True):
            if start <= word < start + nbytes:
                found.append([offset, i, word - start])
                break
    return found


def hook_triton() -> None:
    """Record the launches of whatever driver is active; before the first launch."""
    from triton.runtime import driver

    inner = driver.active.launcher_cls
    driver.active.launcher_cls = lambda src, metadata: Launcher(inner(src, metadata), src, metadata)


class Target:
    """A target whose units are recorded."""

    def __init__(self, inner) -> None:
        self.inner, self.arch = inner, inner.arch

    def load(self, unit):
        from _common.codehash import ROOT
        from _common.cute import compile_unit

        function, artifact = self.inner.load(unit), compile_unit(unit)
        name = {
            "name": unit.name,
            "source": str(unit.source.resolve().relative_to(ROOT)),
            "params": list(unit.params),
            "key": unit.key,
        }

        def run(*args):
            if not _open:
                return function(*args)
            stage = _open[-1]
            touched, kept = [], []
            for a in args:
                if hasattr(a, "data_ptr") and a.numel():
                    touched.append(stage.see(a))
                    kept.append({"buffer": touched[-1], "shape": list(a.shape), "dtype": str(a.dtype).removeprefix("torch.")})
                    if not a.is_contiguous():
                        raise NotImplementedError(f"{unit}: a strided argument is not recorded")
                elif hasattr(a, "data_ptr"):
                    kept.append({"empty": list(a.shape), "dtype": str(a.dtype).removeprefix("torch.")})
                else:
                    kept.append({"value": a})
            stage.launches.append({"ptx": stage.text(artifact.ptx.read_text()), "unit": name, "arguments": kept})
            function(*args)
            stage.look(touched)

        return run


def record(rung, inputs, device: str, arrays: Arrays, ptx: dict[str, str], warm: bool = False) -> dict[str, Any]:
    """Every stage of a loaded rung (ladder.loader) on drawn inputs, under the installed target. warm: once unrecorded first,
    so that what is compiled or tuned at a first call is not in the record."""
    import torch

    from ladder.cells import problem_of

    problem = problem_of(inputs)
    if reason := rung.unsupported(problem):
        return {"unsupported": reason}
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    with torch.no_grad():
        if warm:
            rung.chunk_kda(**{n: t.to(device) if hasattr(t, "to") else t for n, t in inputs.call().items()})
        tensors = {n: inputs.tensors.get(n) for n in TENSORS}
        x = {n: t if t is None else t.to(device) for n, t in tensors.items()}
        problem = replace(problem, device=torch.device(device))
        stages = []
        for stage in rung.stages:
            _open.append(Stage(arrays, ptx))
            try:
                left = stage.run(problem, x)
                stages.append({"name": stage.name, **_open[-1].finish(x, left)})
            finally:
                _open.pop()
            x.update(left)
    return {"stages": stages, "inputs": {n: arrays.put(_host(t)) for n, t in tensors.items() if t is not None}}


def resolve(launch: dict, buffers: list[dict]) -> list[dict]:
    """A CuTe unit's call as the launches its host code makes. Needs the unit compiled here; raises RuntimeError where the
    rung's code has changed since the call."""
    import torch

    from _common.codehash import ROOT
    from _common.cute import Unit
    from emulator.cute_host import EmulatedTarget

    u = launch["unit"]
    unit = Unit(u["name"], ROOT / u["source"], ARCH, tuple((k, v) for k, v in u["params"]))
    if unit.key != u["key"]:
        raise RuntimeError(f"{unit}: compiled from other code here ({unit.key}) than what ran ({u['key']})")
    target, found = EmulatedTarget(ARCH), []
    args, spans, ids = [], [], []
    for a in launch["arguments"]:
        if "buffer" in a:
            args.append(torch.zeros(a["shape"], dtype=getattr(torch, a["dtype"])))
            spans.append((args[-1].data_ptr(), args[-1].nbytes))
            ids.append(a["buffer"])
        elif "empty" in a:
            args.append(torch.zeros(a["empty"], dtype=getattr(torch, a["dtype"])))
        else:
            args.append(a["value"])

    def note(ptx, kernel, grid, block, shared, params, cluster, memory):
        if tuple(cluster) != (1, 1, 1):
            raise NotImplementedError(f"{unit}: clusters are not recorded")
        found.append({"ptx": launch["ptx"], "kernel": kernel, "grid": list(grid), "block": list(block), "shared": shared,
                      "parameters": params.hex(), "relocations": relocations(params, spans, ids)})  # fmt: skip

    target.device.launch = note
    target.load(unit)(*args)
    return found
