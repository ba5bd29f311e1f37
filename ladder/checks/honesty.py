"""Properties of what a rung says about itself and does to its surroundings."""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import contextmanager

import torch

from ladder import tamper, witness
from ladder.checks.context import Context, Failure, NotRun, same
from ladder.judge import starved

SETTLE_S = 0.2  # long enough for work that was left to something else to be done, or begun
THREAD_S = 20.0  # a thread that the call started is waited for, up to this
FLA_KERNELS = {  # stage -> how the names of fla's kernels for it begin
    "normalise": ("l2norm_fwd", "fused_beta_sigmoid"), "gate": ("cumsum", "kda_gate"),
    "intra": ("chunk_kda_fwd_kernel_intra", "chunk_kda_fwd_kernel_inter"), "wu": ("recompute_w_u",),
    "scan": ("chunk_gated_delta_rule_fwd",), "output": ("chunk_gla_fwd",),
}  # fmt: skip
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
            if starved(error):
                raise
            raise Failure(f"{name}: raised {type(error).__name__}, accepted: Unsupported or ContractError that names it") from None
        else:
            what = "a q that requires grad" if name == "q" else name
            raise Failure(f"{what}: accepted and ignored, although the contract refuses it")


def global_state(ctx: Context) -> None:
    """A call changes no global setting: TF32, determinism, default dtype, autograd, environment, current device, stream."""
    inputs = ctx.draw("globals")
    ctx.supported(inputs)
    for turned in (False, True):  # a rung that sets what is set already shows at the other value
        with _turned(turned):
            before = _settings(ctx)
            try:
                ctx.rung.chunk_kda(**inputs.call())  # with autograd as the caller has it
                after = _settings(ctx)
            finally:
                torch.set_grad_enabled(True)
        for name, value in after.items():
            if value != before.get(name):
                raise Failure(f"changes {name} from {before.get(name)} to {value}")


@contextmanager
def _turned(turned: bool):
    """Settings of torch that a rung might touch, all at their usual or all at their other value."""
    deterministic = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    benchmark, fill = torch.backends.cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory
    if turned:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = not benchmark
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        torch.backends.cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory = benchmark, fill


def finished_when_returned(ctx: Context) -> None:
    """Without a GPU, what a call returns is whole at that moment: no thread goes on writing it (`second stream` on a GPU)."""
    if ctx.kind == "cuda":
        raise NotRun("on a GPU a call returns before its kernels have run; `second stream` sees work elsewhere")
    inputs = ctx.draw("finished")
    ctx.supported(inputs)
    before = set(threading.enumerate())
    outputs = ctx.call(inputs)
    kept = tuple(None if t is None else t.clone() for t in outputs)
    time.sleep(SETTLE_S)
    for thread in set(threading.enumerate()) - before:
        thread.join(THREAD_S)
    same("after the call returned (something goes on writing it in the background)", outputs, kept)


def own_code(ctx: Context) -> None:
    """The rung runs no other rung's code, and keeps no kernel of fla's stages that it says it replaces."""
    ctx.base()
    if files := ctx.foreign():
        raise Failure(f"runs code of another rung: opened {', '.join(files[:3])}")
    for stage in ctx.replaces:
        if kept := [k for k in ctx.rung.kernels if k.startswith(FLA_KERNELS.get(stage, "\0"))]:
            raise Failure(f"says it replaces the stage {stage}, but launches fla's {', '.join(kept)}")


def patches_nothing(ctx: Context) -> None:
    """Neither its import nor a call replaces a function of the runner, of torch or of the clock."""
    ctx.base()
    if complaint := tamper.complaint(ctx.trusted):
        raise Failure(complaint)


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
        "deterministic algorithms' filling of fresh memory": torch.utils.deterministic.fill_uninitialized_memory,
        "garbage collection": gc.isenabled(),
        **{f"the environment variable {name}": value for name, value in os.environ.items()},
    }
    if ctx.kind == "cuda":
        out["the current device"] = torch.cuda.current_device()
        out["the current stream"] = torch.cuda.current_stream(ctx.device)
        out["the CUDA random state"] = torch.cuda.get_rng_state(ctx.device).sum().item()
    return out
