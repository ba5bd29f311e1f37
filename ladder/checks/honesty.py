"""Properties of what a rung says about itself and does to its surroundings."""

from __future__ import annotations

import torch

from ladder import witness
from ladder.checks.context import Context, Failure, NotRun

GATES = (("prod", "strong"), ("prod", "init"), ("pre", "strong"), ("pre", "init"))  # every gate path of every form


def kernels_launched(ctx: Context) -> None:
    """The kernels that the stages name really launched, and no others but torch's own fills and copies."""
    if ctx.kind == "native":
        raise NotRun("a rung of plain torch on CPU tensors launches no device kernel")
    seen: list[str] = []
    for form, regime in GATES:
        inputs = ctx.draw("witness", cell=ctx.probe._replace(form=form, regime=regime))
        try:
            ctx.supported(inputs)
        except NotRun:
            continue
        if ctx.kind == "cuda":
            ctx.call(inputs)  # compiled and tuned before it is watched
            try:
                seen += witness.on_gpu(lambda: ctx.call(inputs))
            except witness.BlindError as reason:
                raise NotRun(str(reason)) from None
        elif (form, bool(inputs.flags.get("safe_gate"))) not in ctx.exercised:
            ctx.call(inputs)
    if ctx.kind == "emulated":
        seen = ctx.launches()
    if not seen:
        raise Failure("no kernel launched at all")
    if complaint := witness.complaint(ctx.rung.kernels, dict.fromkeys(seen)):
        raise Failure(complaint)


def refusals(ctx: Context) -> None:
    """What the contract leaves out is refused by name, never ignored."""
    from kernels.kda.contract import ContractError, Unsupported

    inputs = ctx.draw("refusals")
    q = inputs.tensors["q"]
    cases = {
        "cu_seqlens": {"cu_seqlens": torch.tensor([0, inputs.case.T], dtype=torch.int32, device=q.device)},
        "state_v_first": {"state_v_first": True},
        "allow_neg_eigval": {"allow_neg_eigval": True},
        "q": {"q": q.clone().requires_grad_()},
    }
    for name, changes in cases.items():
        try:
            ctx.rung.chunk_kda(**{**inputs.call(), **changes})
        except (ContractError, Unsupported) as refusal:
            if name not in str(refusal):
                raise Failure(f"refuses {name} without naming it: {refusal}") from None
        except Exception as error:
            raise Failure(f"{name}: raised {type(error).__name__}, accepted: Unsupported or ContractError that names it") from None
        else:
            what = "a q that requires grad" if name == "q" else name
            raise Failure(f"{what}: accepted and ignored, although the contract refuses it")


def global_state(ctx: Context) -> None:
    """A call changes no global setting of torch: TF32, determinism, default dtype, current device, current stream."""
    inputs = ctx.draw("globals")
    ctx.supported(inputs)
    before = _settings(ctx)
    ctx.call(inputs)
    for name, value in _settings(ctx).items():
        if value != before[name]:
            raise Failure(f"changes {name} from {before[name]} to {value}")


def _settings(ctx: Context) -> dict[str, object]:
    out = {
        "the default dtype": torch.get_default_dtype(),
        "torch.backends.cuda.matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "torch.backends.cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        "the float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "grad mode": torch.is_grad_enabled(),
        "the number of threads": torch.get_num_threads(),
        "the default random state": torch.random.get_rng_state().sum().item(),
    }
    if ctx.kind == "cuda":
        out["the current device"] = torch.cuda.current_device()
        out["the current stream"] = torch.cuda.current_stream(ctx.device)
        out["the CUDA random state"] = torch.cuda.get_rng_state(ctx.device).sum().item()
    return out
