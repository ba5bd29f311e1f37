"""Other people's KDA kernels, called the way their users would, so that a rung is measured against the best there is.

Each adapter is optional: where it cannot run, `absent` says why. An adapter names its gate space and the kernel that
must have launched, because dispatchers have been seen to run another engine than the one asked for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels.kda.inputs import Inputs

Result = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class Rival:
    """kernels: substrings of kernel names, all of which must have launched. gate_space: what it reads as a decay
    ("ln" natural log, "raw" with the gate inside). prepare(inputs) does what need not be timed (allocation of index
    tensors, layout views) and returns the call; its final state is in the ladder's [B,HV,K,V] order or a view of it."""

    name: str
    package: str
    kernels: tuple[str, ...]
    gate_space: str
    declines: Callable[[Inputs], str | None]
    prepare: Callable[[Inputs], Callable[[], Result]]
    needs: tuple[int, int] | None = None  # compute capability that its kernels are written for

    def absent(self, inputs: Inputs) -> str | None:
        """Why it cannot run these inputs here, or None."""
        if importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        device = inputs.tensors["q"].device
        if device.type != "cuda":
            return "needs a GPU"
        if self.needs and torch.cuda.get_device_capability(device) != self.needs:
            return f"written for compute capability {self.needs[0]}.{self.needs[1]}"
        return self.declines(inputs)


def _fla(safe: bool) -> Callable[[Inputs], Callable[[], Result]]:
    def prepare(inputs: Inputs) -> Callable[[], Result]:
        from fla.ops.kda import chunk_kda

        call = inputs.call() | ({} if safe else {"safe_gate": False})  # lower_bound alone selects the safe gate's formula

        def run() -> Result:
            with torch.inference_mode():
                return chunk_kda(**call)

        return run

    return prepare


def _fla_safe_declines(inputs: Inputs) -> str | None:
    return None if inputs.flags["safe_gate"] else "its safe-gate path is for gates in [-5, 0]"


def _cudnn_declines(inputs: Inputs) -> str | None:
    if inputs.form == "prod" and not inputs.flags["safe_gate"]:
        return "has no softplus gate inside"
    if (inputs.case.K, inputs.case.V) != (128, 128):
        return "its engine is for K = V = 128"
    return None


def _cudnn(plan: str) -> Callable[[Inputs], Callable[[], Result]]:
    def prepare(inputs: Inputs) -> Callable[[], Result]:
        from cudnn.linear_attention.ops import kimi_delta_attention

        case, t, flags = inputs.case, inputs.tensors, inputs.flags
        tokens = {name: t[name].flatten(0, 1) for name in ("q", "k", "v", "g", "beta")}
        tokens["cu_seqlens"] = torch.arange(case.B + 1, dtype=torch.int32, device=t["q"].device) * case.T
        options: dict[str, Any] = {"output_final_state": True, "plan_name": plan, "scale": flags.get("scale")}
        if inputs.form == "prod":
            options |= {
                "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "safe_gate": True,
                "gate_lower_bound": flags["lower_bound"], "a_log": t["A_log"],
                "dt_bias": t["dt_bias"].view(case.HV, case.K),
            }  # fmt: skip
        if case.initial_state:
            options["initial_state"] = t["initial_state"].transpose(-1, -2).contiguous()

        def run() -> Result:
            with torch.inference_mode():
                o, state = kimi_delta_attention(**tokens, **options)[:2]
            return o.view(case.B, case.T, case.HV, case.V), state.transpose(-1, -2)

        return run

    return prepare


def _kernel_fun_declines(inputs: Inputs) -> str | None:
    """It forwards what it does not implement to fla, so ask it first (allenai/kernel-fun, src/kernel_fun/kda/ops.py)."""
    from kernel_fun.kda.ops import is_supported

    t = inputs.tensors
    flags = {name: value for name, value in inputs.flags.items() if name not in ("output_final_state", "safe_gate")}
    return is_supported(t["q"], t["v"], initial_state=t.get("initial_state"), **flags)[1]


def _kernel_fun(inputs: Inputs) -> Callable[[], Result]:
    from kernel_fun.kda import chunk_kda

    call = inputs.call() | {"safe_gate": False}
    return lambda: chunk_kda(**call)


def _never(inputs: Inputs) -> str | None:
    return None


ALL = (
    Rival("fla", "fla", ("chunk_gated_delta_rule_fwd_kernel_h", "chunk_kda_fwd_kernel_intra_token_parallel"), "ln or raw",
          _never, _fla(safe=False)),
    Rival("fla-safe", "fla", ("chunk_gated_delta_rule_fwd_kernel_h", "chunk_kda_fwd_kernel_intra_sub_chunk"), "ln or raw",
          _fla_safe_declines, _fla(safe=True)),
    Rival("cudnn-hopper-cuda", "cudnn", ("kda_fused",), "ln or raw", _cudnn_declines, _cudnn("kda_hopper_cuda"), (9, 0)),
    # Without the CuTe DSL it refuses, or later runs the cached kda_hopper_cuda under this plan's name.
    Rival("cudnn-hopper-cute", "cudnn", ("cutlass",), "ln or raw", _cudnn_declines, _cudnn("kda_hopper"), (9, 0)),
    Rival("kernel-fun", "kernel_fun", ("KdaFwdState",), "ln or raw", _kernel_fun_declines, _kernel_fun, (10, 0)),
)  # fmt: skip
