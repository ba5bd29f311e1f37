"""`from ladder import chunk_kda`: one call for users, which runs the best rung for its arguments.

The rule. Among the rungs of ladder.yaml that are current or won, fail no check in the records, are written for the
device's architecture and do not decline the problem, the records decide (`ladder.best.pick`): the least time at the
nearest measured case, else the highest number. If there is none, fla's own chunk_kda runs, with the arguments as they
came, and what it raises is raised. Shapes, dtypes, layouts and flags decide, never values, so that a call can be captured.

The contract's own `kda_op` tells calls apart, and a choice is made once for each kind: a later call costs a look-up more
than the rung's. The records are read once per process. The logger `kda_ladder` says at level INFO which kernel runs, and why.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kernels.kda.contract import ContractError, Problem, Stage, Unsupported, kda_op, run_stages
from ladder.manifest import ROOT, Rung

log = logging.getLogger("kda_ladder")
FLA_ALSO = ("A_log", "dt_bias", "chunk_size", "transpose_state_layout")  # keywords of fla 0.6 that its signature does not name


def dispatcher(root: Path = ROOT) -> Callable[..., Any]:
    """The public `chunk_kda` over the ladder in `root`; nothing is read before its first call."""
    chosen: WeakKeyDictionary[Problem, tuple[Stage, ...]] = WeakKeyDictionary()  # kinds of call that kda_op remembers
    knowledge = functools.cache(lambda: _Knowledge(root))
    say = functools.lru_cache(256)(log.info)

    def decline(p: Problem) -> str | None:
        """Choose for a kind of call not seen before; why no rung takes it, or None."""
        stages, said = _choose(knowledge(), p)
        if stages is None:
            return said
        chosen[p] = stages
        say(said)
        return None

    best = kda_op((Stage("best", (), lambda p, x: run_stages(chosen[p], p, x)),), decline)

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
        try:
            return best(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
                        use_beta_sigmoid_in_kernel, safe_gate, lower_bound, A_log, dt_bias, **more)  # fmt: skip
        except Unsupported as error:
            reason = str(error)
        arch, device = _where(q.device)
        fla = _fla(more)
        say(f"chunk_kda: fla's chunk_kda for q {tuple(q.shape)}, v {tuple(v.shape)} on {device or f'an emulated {arch}'}: {reason}")
        return fla(
            q=q, k=k, v=v, g=g, beta=beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, safe_gate=safe_gate, lower_bound=lower_bound,
            A_log=A_log, dt_bias=dt_bias, **more)  # fmt: skip

    return chunk_kda


class _Knowledge:
    """What the files say: the rungs that may run, the current times, and the rungs that fail a check."""

    def __init__(self, root: Path) -> None:
        from ladder import best, manifest, report

        self.ladder = manifest.load(root)
        records, problems = report.load(self.ladder)
        for problem in problems:
            log.warning("unreadable record: %s", problem)
        self.times = best.timed(records, self.ladder)
        self.failing = report.failing_rungs(report.check_rows(records, self.ladder))
        self.rungs = [rung for rung in self.ladder.rungs.values() if rung.status in report.BAR_STATUS]
        self.loaded = functools.cache(self._load)

    def _load(self, rung: Rung) -> Any:
        """The imported rung, or one line that says why it cannot be."""
        from ladder import loader

        try:
            return loader.load(self.ladder.folder(rung))
        except loader.LoadError as error:
            return str(error)

    def refuses(self, rung: Rung, p: Problem, arch: str) -> str | None:
        """Why a rung cannot run this problem on a device of `arch`, or None."""
        if rung.number in self.failing:
            return "fails a check"
        if arch not in rung.archs:
            return f"not written for {arch}"
        loaded = self.loaded(rung)
        return loaded if isinstance(loaded, str) else loaded.unsupported(p)


def _choose(known: _Knowledge, p: Problem) -> tuple[tuple[Stage, ...] | None, str]:
    """(stages of the best rung, the line to log), or (None, why no rung takes the problem). Raises ContractError."""
    from ladder import autotune, best

    arch, device = _where(p.device)
    if device:
        autotune.use_recorded(device)  # fla's kernels as they were when the rungs were timed
    refused = {rung: known.refuses(rung, p, arch) for rung in known.rungs}
    eligible = {rung.number: rung for rung, reason in refused.items() if reason is None}
    if not eligible:
        return None, "no rung takes it: " + ("; ".join(f"{r.number:03d} {why}" for r, why in refused.items()) or "none is current")
    number, why = best.pick(p, arch, device, eligible, known.times)
    call = (f"B={p.B} T={p.T} H={p.H} HV={p.HV} K={p.K} V={p.V} {str(p.io_dtype).removeprefix('torch.')}, gate {p.gate}, "
            f"on {device or f'an emulated {arch}'}")  # fmt: skip
    return known.loaded(eligible[number]).stages, f"chunk_kda: rung {eligible[number].name} for {call}: {why}"


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


def _fla(more: dict[str, Any]) -> Callable[..., Any]:
    """fla's chunk_kda. Raises Unsupported for a keyword that it would silently ignore."""
    from fla.ops.kda import chunk_kda

    known = (*inspect.signature(chunk_kda).parameters, *FLA_ALSO)
    if unknown := [name for name in more if name not in known]:
        raise Unsupported(f"{', '.join(unknown)}: not a keyword of fla's chunk_kda; accepted: leave it out")
    return chunk_kda


chunk_kda = dispatcher()
