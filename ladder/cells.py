"""Small helpers around one drawn cell: the problem it poses, seeds that differ by purpose, and its time floor."""

from __future__ import annotations

import hashlib
from typing import Any

from ladder.manifest import Cell


def problem_of(inputs: Any) -> Any:
    """The contract's Problem for drawn inputs, as the rung's own wrapper would bind it."""
    from kernels.kda.contract import bind

    names = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
    f = inputs.flags
    return bind(
        {name: inputs.tensors.get(name) for name in names}, scale=f.get("scale"),
        output_final_state=f.get("output_final_state", False), l2norm=f.get("use_qk_l2norm_in_kernel", False),
        use_gate=f.get("use_gate_in_kernel", False), beta_sigmoid=f.get("use_beta_sigmoid_in_kernel", False),
        safe_gate=f.get("safe_gate", False), lower_bound=f.get("lower_bound"))  # fmt: skip


def draw(cell: Cell, seed: int, device: Any) -> Any:
    """Inputs of a cell (kernels.kda.inputs.Inputs)."""
    from kernels.kda import inputs

    return inputs.make(cell.case, cell.regime, cell.form, seed, device)


def seed_for(seed: int, *purpose: Any) -> int:
    """A seed derived from the run's seed and a purpose: the same in every process, different for every purpose."""
    text = ":".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") >> 1


def shape_of(cell: Cell) -> dict[str, Any]:
    """The cell's sizes, as records keep them."""
    return {n: getattr(cell.case, n) for n in ("B", "T", "H", "HV", "K", "V", "dtype", "initial_state")}


def floor_ms(cell: Cell, copy_gbps: float) -> float:
    """The least time any kernel can take: the case's bytes, once each, at the measured copy rate."""
    from kernels.kda.cases import floor_bytes

    return floor_bytes(cell.case, cell.form) / (copy_gbps * 1e9) * 1e3
