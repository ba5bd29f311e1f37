"""`from ladder import chunk_kda`: one call for users, which runs the best rung for its arguments.

The rule. Among the rungs of ladder.yaml that are current or won, fail no check in the records, are written for the
device's architecture and do not decline the problem, the records decide (`ladder.best.pick`): the least time at the
nearest measured case, else the highest number. If there is none, fla's own chunk_kda runs, with the arguments as they
came, and what it raises is raised. Shapes, dtypes, strides and flags decide, never values, so that a call can be
captured; the records are read once per process and a choice is made once per kind of call.

The logger `kda_ladder` says at level INFO which kernel was chosen, and why, once for each choice.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels.kda.contract import ContractError, Problem, Unsupported, bind
from ladder.manifest import ROOT

log = logging.getLogger("kda_ladder")
CHOICES_KEPT = 256  # kinds of call remembered
FLA_ALSO = ("chunk_size", "transpose_state_layout")  # keywords of fla 0.6 that its signature does not name


def dispatcher(root: Path = ROOT) -> Callable[..., Any]:
    """The public `chunk_kda` over the ladder in `root`; nothing is read before its first call."""
    choices: OrderedDict[tuple, Callable[..., Any]] = OrderedDict()  # kind of call -> what runs it; holds no tensor
    knowledge = functools.cache(lambda: _Knowledge(root))

    def decide(key: tuple, tensors: dict[str, Any], flags: dict[str, Any], more: dict[str, Any]) -> Callable[..., Any]:
        run, said = _choose(knowledge, tensors, flags, more)
        log.info(said)
        if key:
            choices[key] = run
        if len(choices) > CHOICES_KEPT:
            choices.popitem(last=False)
        return run

    def chunk_kda(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
        scale: float | None = None, initial_state: torch.Tensor | None = None, output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False, safe_gate: bool = False, lower_bound: float | None = None,
        A_log: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None, **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """KDA forward by the best rung for these arguments; fla 0.6's keywords and meaning (kernels/kda/contract.py).

        q, k [B,T,H,K] and v [B,T,HV,V] in bf16 or fp16; g [B,T,HV,K], natural-log decay, or raw with
        use_gate_in_kernel (then A_log [HV] and dt_bias [HV*K], fp32); beta [B,T,HV]; initial_state [B,HV,K,V] fp32.
        Returns (o [B,T,HV,V] in q's dtype, final state [B,HV,K,V] fp32 or None).

        Which kernel runs: of the rungs that are current or won, fail no check, are written for this GPU and take the
        problem, the one with the least recorded time at the nearest measured case: least sum of |log2| of the ratios
        of T, B x HV, K and V, among cells of the same gate kind; the geometric mean of strong and slow gates, which no
        argument tells apart. Without a current record, the highest-numbered of them. Without such a rung (`more` holds
        fla's other keywords; a tensor requires grad; sizes that no rung takes), fla's chunk_kda.
        Logger `kda_ladder`, level INFO, says which, once for each kind of call.

        Raises ContractError for a malformed call and for tensors that are not on a CUDA device (unless an emulated
        target is installed, _common/target.py), Unsupported for a keyword that fla does not know either.
        """
        if more:
            more = {name: value for name, value in more.items() if value is not None and value is not False}
        state = initial_state
        try:
            key = (
                q.shape, v.shape, q.dtype, g.dtype, beta.dtype, q.device, scale, output_final_state, use_qk_l2norm_in_kernel,
                use_gate_in_kernel, use_beta_sigmoid_in_kernel, safe_gate, lower_bound, state is None, A_log is None,
                dt_bias is None, tuple(more),
                torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, g, beta, state, A_log, dt_bias)),
                None if q.is_contiguous() and k.is_contiguous() and v.is_contiguous() and g.is_contiguous() and beta.is_contiguous()
                and (state is None or state.is_contiguous())
                else (q.stride(), k.stride(), v.stride(), g.stride(), beta.stride(), state is not None and state.stride()),
            )  # fmt: skip
            run = choices.get(key)
        except (AttributeError, RuntimeError, TypeError):  # something that is no tensor, or no flag: bind says what
            key, run = (), None
        if run is None:
            tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta,
                       "initial_state": state, "A_log": A_log, "dt_bias": dt_bias}  # fmt: skip
            run = decide(key, tensors, {
                "scale": scale, "output_final_state": output_final_state, "l2norm": use_qk_l2norm_in_kernel,
                "use_gate": use_gate_in_kernel, "beta_sigmoid": use_beta_sigmoid_in_kernel, "safe_gate": safe_gate,
                "lower_bound": lower_bound}, more)  # fmt: skip
        return run(q, k, v, g, beta, scale, state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
                   use_beta_sigmoid_in_kernel, safe_gate, lower_bound, A_log, dt_bias, **more)  # fmt: skip

    return chunk_kda


class _Knowledge:
    """What the files say: the ladder, current times, and the rungs that fail a check."""

    def __init__(self, root: Path) -> None:
        from ladder import best, manifest, report

        self.ladder = manifest.load(root)
        records, problems = report.load(self.ladder)
        for problem in problems:
            log.warning("unreadable record: %s", problem)
        self.times = best.timed(records, self.ladder)
        self.failing = report.failing_rungs(report.check_rows(records, self.ladder))


def _choose(knowledge: Callable[[], _Knowledge], tensors: dict[str, Any], flags: dict[str, Any],
            more: dict[str, Any]) -> tuple[Callable[..., Any], str]:  # fmt: skip
    """(what runs the call, the log line). Raises ContractError, Unsupported."""
    from ladder import best

    problem, passed_over = None, []
    try:
        problem = bind(tensors, **flags)
    except Unsupported as error:
        passed_over = [str(error)]
    arch, device = _where(tensors["q"].device)
    if more:
        problem, passed_over = None, [f"{', '.join(more)}: not implemented by the rungs"]
    runnable, names = {}, {}
    if problem is not None:
        runnable, names, passed_over = _eligible(knowledge(), problem, arch)
    call = _told(tensors, flags, device or f"an emulated {arch}")
    if runnable:
        number, why = best.pick(problem, arch, device, runnable, knowledge().times)
        return runnable[number], f"chunk_kda: {names[number]} for {call}: {why}"
    return _fla(more), f"chunk_kda: fla's chunk_kda for {call}: no rung takes it ({'; '.join(passed_over)})"


def _where(device: torch.device) -> tuple[str, str | None]:
    """(architecture, name) of the device that tensors on `device` are for; the name is None for an emulated target."""
    from _common import target

    if device.type == "cuda":
        from ladder.timing import device_arch

        return device_arch(device), torch.cuda.get_device_name(device)
    try:
        installed = target.current()
    except RuntimeError:  # no GPU either
        installed = None
    if installed is None or isinstance(installed, target.Cuda):
        raise ContractError(f"q: given on {device}, accepted: a CUDA device (without a GPU, `python -m ladder check` runs the "
                            "rungs in the emulator)")  # fmt: skip
    return installed.arch, None


def _eligible(known: _Knowledge, problem: Problem, arch: str) -> tuple[dict[int, Callable], dict[int, str], list[str]]:
    """(chunk_kda by rung number, names, why the others are passed over)."""
    from ladder import autotune, loader, report

    if problem.device.type == "cuda":
        autotune.use_recorded(torch.cuda.get_device_name(problem.device))  # fla's kernels as they were measured
    runnable, names, reasons = {}, {}, []
    for rung in known.ladder.rungs.values():
        if rung.status not in report.BAR_STATUS:
            continue
        reason = "fails a check" if rung.number in known.failing else f"not for {arch}" if arch not in rung.archs else None
        if reason is None:
            try:
                loaded = loader.load(known.ladder.folder(rung))
                reason = loaded.unsupported(problem)
            except loader.LoadError as error:
                reason = str(error)
        if reason is None:
            runnable[rung.number], names[rung.number] = loaded.chunk_kda, f"rung {rung.name}"
        else:
            reasons.append(f"{rung.number:03d}: {reason}")
    return runnable, names, reasons


def _fla(more: dict[str, Any]) -> Callable[..., Any]:
    """fla's chunk_kda, taking the positional arguments of ours. Raises Unsupported for a keyword that it does not know."""
    from fla.ops.kda import chunk_kda

    known = (*inspect.signature(chunk_kda).parameters, *FLA_ALSO)
    if unknown := [name for name in more if name not in known]:
        raise Unsupported(f"{', '.join(unknown)}: not a keyword of fla's chunk_kda; accepted: leave it out")

    def run(q, k, v, g, beta, scale, initial_state, output_final_state, l2norm, use_gate, beta_sigmoid, safe_gate, lower_bound,
            A_log, dt_bias, **more):  # fmt: skip
        return chunk_kda(
            q=q, k=k, v=v, g=g, beta=beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=l2norm, use_gate_in_kernel=use_gate, use_beta_sigmoid_in_kernel=beta_sigmoid,
            safe_gate=safe_gate, lower_bound=lower_bound, A_log=A_log, dt_bias=dt_bias, **more)  # fmt: skip

    return run


def _told(tensors: dict[str, Any], flags: dict[str, Any], where: str) -> str:
    (B, T, H, K), (HV, V) = tensors["q"].shape, tensors["v"].shape[2:]
    gate = ("safe" if flags["safe_gate"] else "softplus") if flags["use_gate"] else "log"
    dtype = str(tensors["q"].dtype).removeprefix("torch.")
    return f"B={B} T={T} H={H} HV={HV} K={K} V={V} {dtype}, gate {gate}, on {where}"


chunk_kda = dispatcher()
