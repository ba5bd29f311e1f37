"""What every rung promises: `chunk_kda` with fla 0.6's keyword names and meaning, and nothing silently different.

A rung is a sequence of stages over named tensors. `kda_op` turns it into the public function: it binds the call to a
`Problem` (shapes, dtypes, strides, devices and flags, never values, so that a call can be captured in a CUDA graph),
refuses by name what the contract or the rung does not cover, and runs the stages.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from _common.cache import ALIGNMENT, Alike

CHUNK = 64  # tokens per chunk of the chunked form (ALGORITHM.md); g2, Aqk and Akk are relative to it
FLOATS = (torch.bfloat16, torch.float16)
DEVICES = ("cuda", "cpu")
FLAGS = ("scale", "output_final_state", "l2norm", "use_gate", "beta_sigmoid", "safe_gate", "lower_bound")  # of bind
_KEPT = 256  # distinct call signatures remembered per operator


class ContractError(ValueError):
    """The call itself is wrong: a missing argument, a shape or a dtype that no rung could accept."""


class Unsupported(NotImplementedError):
    """The call is meaningful, but this rung (or the whole ladder) does not implement it."""


@dataclass(frozen=True, eq=False)
class Problem:
    """One KDA forward problem, as far as shapes, dtypes, layouts, alignment, devices and flags tell; no values.

    A rung gets the same object for calls alike in all of these (for as long as it is remembered), so that what the rung derives from
    it can be kept under it: two problems are equal only if they are the same object.
    loose: the tensors that are not row-major, or begin elsewhere than on ALIGNMENT bytes.

    gate: "log" (g is the natural-log decay), "softplus" (g is raw; -exp(A_log) * softplus(g + dt_bias)) or
    "safe" (g is raw; lower_bound * sigmoid(exp(A_log) * (g + dt_bias))). All three give natural-log decays <= 0.
    safe_gate: the caller's promise that natural-log decays lie in [-5, 0] (implied by gate "safe").
    """

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    dtypes: Mapping[str, torch.dtype]
    device: torch.device
    scale: float
    gate: str
    lower_bound: float | None
    safe_gate: bool
    l2norm: bool
    beta_sigmoid: bool
    initial_state: bool
    output_final_state: bool
    loose: frozenset[str] = frozenset()

    @property
    def io_dtype(self) -> torch.dtype:
        """The type of q, k, v and o."""
        return self.dtypes["q"]

    @property
    def NT(self) -> int:
        """Number of chunks per sequence."""
        return -(-self.T // CHUNK)


@dataclass(frozen=True)
class Stage:
    """One step of a rung.

    run(problem, x) reads tensors from x (the call's tensors by argument name, then what earlier stages left) and
    returns the entries it adds or replaces; it must not write into the call's own tensors.
    kernels: substrings of the names of the device kernels that it launches.
    """

    name: str
    kernels: tuple[str, ...]
    run: Callable[[Problem, dict[str, Any]], dict[str, Any]]


def shapes(B: int, T: int, H: int, HV: int, K: int, V: int) -> dict[str, tuple[int, ...]]:
    """What each tensor of the call has to look like."""
    return {
        "q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V), "g": (B, T, HV, K), "beta": (B, T, HV),
        "initial_state": (B, HV, K, V), "A_log": (HV,), "dt_bias": (HV * K,),
    }  # fmt: skip


def bind(tensors: Mapping[str, torch.Tensor | None], *, scale: float | None, output_final_state: bool, l2norm: bool,
         use_gate: bool, beta_sigmoid: bool, safe_gate: bool, lower_bound: float | None) -> Problem:  # fmt: skip
    """The Problem that these arguments pose. Raises ContractError (one line: argument, given, accepted)."""
    given = {name: t for name, t in tensors.items() if t is not None}
    for name in ("q", "k", "v", "g", "beta"):
        if not isinstance(given.get(name), torch.Tensor):
            raise ContractError(f"{name}: given {type(tensors.get(name)).__name__}, accepted: a torch.Tensor")
    for name, rank in (("q", 4), ("v", 4)):
        if given[name].dim() != rank:
            raise ContractError(f"{name}: given shape {tuple(given[name].shape)}, accepted: {rank} dimensions")
    (B, T, H, K), (HV, V) = given["q"].shape, given["v"].shape[2:]
    if min(B, T, H, K, HV, V) < 1:
        raise ContractError(f"q, v: given shapes {tuple(given['q'].shape)}, {tuple(given['v'].shape)}, accepted: "
                            "every dimension at least 1")  # fmt: skip
    if HV % H:
        raise ContractError(f"v: given HV = {HV} value heads for H = {H}, accepted: a multiple of H")
    for name, shape in shapes(B, T, H, HV, K, V).items():
        if name not in given:
            continue
        t = given[name]
        if t.layout != torch.strided or t.device.type not in DEVICES:
            raise ContractError(f"{name}: given {t.layout} on {t.device}, accepted: a strided tensor on a CUDA device, or on "
                                "the CPU where the emulator runs")  # fmt: skip
        if name == "dt_bias" and tuple(t.shape) == (HV, K):
            continue
        if tuple(t.shape) != shape:
            raise ContractError(f"{name}: given shape {tuple(t.shape)}, accepted: {shape}")
        if not t.dtype.is_floating_point:
            raise ContractError(f"{name}: given dtype {t.dtype}, accepted: a floating-point type")
        if t.device != given["q"].device:
            raise ContractError(f"{name}: given on {t.device}, accepted: the device of q, {given['q'].device}")
        if t.requires_grad and torch.is_grad_enabled():
            raise Unsupported(f"{name}: given a tensor that requires grad, accepted: forward only (use torch.no_grad)")
    for name, value in (("scale", scale), ("lower_bound", lower_bound)):
        if value is not None and (not isinstance(value, int | float) or not math.isfinite(value)):
            raise ContractError(f"{name}: given {_brief(value)}, accepted: None or a finite number")
    _check_dtypes(given)
    _check_gate(given, use_gate, safe_gate, lower_bound)
    return Problem(
        B=B, T=T, H=H, HV=HV, K=K, V=V,
        dtypes=MappingProxyType({name: t.dtype for name, t in given.items()}),
        device=given["q"].device, scale=K**-0.5 if scale is None else float(scale),
        gate=("safe" if safe_gate else "softplus") if use_gate else "log",
        lower_bound=lower_bound, safe_gate=safe_gate, l2norm=l2norm, beta_sigmoid=beta_sigmoid,
        initial_state="initial_state" in given, output_final_state=output_final_state,
        loose=frozenset(name for name, t in given.items() if not _dense(t)),
    )  # fmt: skip


def _dense(t: torch.Tensor) -> bool:
    return t.is_contiguous() and not t.data_ptr() % ALIGNMENT


def _check_dtypes(given: Mapping[str, torch.Tensor]) -> None:
    if given["q"].dtype not in FLOATS:
        raise ContractError(f"q: given dtype {given['q'].dtype}, accepted: {FLOATS}")
    for name in ("k", "v"):
        if given[name].dtype != given["q"].dtype:
            raise ContractError(f"{name}: given dtype {given[name].dtype}, accepted: that of q, {given['q'].dtype}")
    for name in ("initial_state", "A_log", "dt_bias"):
        if name in given and given[name].dtype != torch.float32:
            raise ContractError(f"{name}: given dtype {given[name].dtype}, accepted: torch.float32")


def _check_gate(given: Mapping[str, torch.Tensor], use_gate: bool, safe_gate: bool, lower_bound: float | None) -> None:
    if use_gate and "A_log" not in given:
        raise ContractError("A_log: given None, accepted: [HV] fp32 when use_gate_in_kernel=True")
    if not use_gate:
        for name in ("A_log", "dt_bias"):
            if name in given:
                raise ContractError(f"{name}: given with use_gate_in_kernel=False, accepted: None")
        if lower_bound is not None:
            raise ContractError(f"lower_bound: given {lower_bound} with use_gate_in_kernel=False, accepted: None")
    elif safe_gate and (lower_bound is None or not -5.0 <= lower_bound < 0.0):
        raise ContractError(f"lower_bound: given {lower_bound}, accepted: [-5, 0) when safe_gate=True")
    elif not safe_gate and lower_bound is not None:
        raise ContractError(f"lower_bound: given {lower_bound} with safe_gate=False, accepted: None")


class Accepted:
    """The problems that an operator has accepted, by what tells them apart. It holds no tensor."""

    def __init__(self, unsupported: Callable[[Problem], str | None]) -> None:
        self.unsupported = unsupported
        self.problems: OrderedDict[tuple, Problem] = OrderedDict()  # by signature
        self.latest: dict[tuple, tuple[Alike, Problem]] = {}  # of a kind of call, the last

    def problem(self, tensors: dict[str, torch.Tensor | None], flags: tuple) -> Problem:
        """The problem that a call poses, the same object for calls alike. Raises ContractError and Unsupported."""
        given = [t for t in tensors.values() if t is not None]
        kind = (flags, tensors["initial_state"] is None, tensors["A_log"] is None, tensors["dt_bias"] is None, torch.is_grad_enabled())
        try:
            alike, problem = self.latest[kind]
            if alike(given):
                return problem
        except (AttributeError, KeyError, RuntimeError, TypeError):  # a new kind; else no dense tensor, or a flag without hash
            pass
        signature = self.signature(tensors, flags)
        problem = self.problems.get(signature) if signature else None
        if problem is None:
            problem = self.admit(signature, tensors, flags)
        if len(self.latest) >= _KEPT:
            self.latest.clear()
        self.latest[kind] = Alike(given), problem
        return problem

    def signature(self, tensors: Mapping[str, torch.Tensor | None], flags: tuple) -> tuple | None:
        """None for what only `bind` can say something about."""
        grad = torch.is_grad_enabled()
        try:
            signature = (flags, *[
                None if t is None else (t.size(), t.dtype, t.device, _dense(t), grad and t.requires_grad)
                for t in tensors.values()])  # fmt: skip
            hash(signature)
        except (AttributeError, RuntimeError, TypeError):  # no dense tensor, or a flag that cannot be hashed
            return None
        return signature

    def admit(self, signature: tuple | None, tensors: dict[str, torch.Tensor | None], flags: tuple) -> Problem:
        problem = bind(tensors, **dict(zip(FLAGS, flags, strict=True)))
        if reason := self.unsupported(problem):
            raise Unsupported(reason)
        self.problems[signature] = problem
        if len(self.problems) > _KEPT:
            self.problems.popitem(last=False)
        return problem


def kda_op(stages: tuple[Stage, ...], unsupported: Callable[[Problem], str | None]) -> Callable[..., Any]:
    """The public `chunk_kda` of a rung made of `stages`, which declines the problems for which `unsupported` gives a
    reason. The returned function's docstring states the contract."""
    accepted = Accepted(unsupported)

    def chunk_kda(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
        scale: float | None = None, initial_state: torch.Tensor | None = None, output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False, use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False, safe_gate: bool = False, lower_bound: float | None = None,
        A_log: torch.Tensor | None = None, dt_bias: torch.Tensor | None = None, **refused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """KDA forward: S = diag(exp g) S; S += beta k (v - k^T S)^T; o = scale * q^T S, token by token per value head.

        q, k [B,T,H,K] and v [B,T,HV,V] in bf16 or fp16 (HV a multiple of H: value head i reads q, k head i // (HV/H));
        g [B,T,HV,K], natural-log decay, or raw with use_gate_in_kernel (then A_log [HV] and dt_bias [HV*K], fp32):
        softplus gate -exp(A_log) * softplus(g + dt_bias), with safe_gate lower_bound * sigmoid(exp(A_log) * (g + dt_bias));
        beta [B,T,HV], or its logits with use_beta_sigmoid_in_kernel; scale defaults to K ** -0.5;
        initial_state [B,HV,K,V] fp32. use_qk_l2norm_in_kernel: x / sqrt(sum x^2 + 1e-6) on q and k.
        safe_gate with a pre-computed g is the caller's promise that g lies in [-5, 0].
        Returns (o [B,T,HV,V] in q's dtype, final state [B,HV,K,V] fp32 or None); both fresh at each call.
        Raises ContractError for a malformed call and Unsupported, naming the argument, for what is not implemented.
        """
        if refused:
            _refuse(refused)
        tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state, "A_log": A_log, "dt_bias": dt_bias}
        flags = (scale, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
                 safe_gate, lower_bound)  # fmt: skip
        problem = accepted.problem(tensors, flags)
        if dt_bias is not None and dt_bias.dim() == 2:
            tensors["dt_bias"] = dt_bias.reshape(-1)
        x = run_stages(stages, problem, tensors)
        return x["o"], x["final_state"] if output_final_state else None

    return chunk_kda


def _refuse(keywords: Mapping[str, Any]) -> None:
    for name, value in keywords.items():
        if value is not None and value is not False:
            raise Unsupported(f"{name}: given {_brief(value)}, not implemented by the ladder; accepted: leave it out")


def dense(problem: Problem, x: Mapping[str, Any], *names: str) -> list[torch.Tensor | None]:
    """The call's own tensors of these names, row-major and on ALIGNMENT bytes: copies where they are not (problem.loose)."""
    if not problem.loose:
        return [x[name] for name in names]
    return [x[name].clone(memory_format=torch.contiguous_format) if name in problem.loose else x[name] for name in names]


def run_stages(stages: tuple[Stage, ...], problem: Problem, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Every tensor by name after `stages` have run in order on `tensors`, on their device, whichever is current."""
    if problem.device.type == "cuda" and problem.device.index != torch.cuda.current_device():
        with torch.cuda.device(problem.device):  # Triton launches on the current device, and scratch is allocated there
            return run_stages(stages, problem, tensors)
    x = dict(tensors)
    for stage in stages:
        x.update(stage.run(problem, x))
    return x


def _brief(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, torch.Tensor) else repr(value)
