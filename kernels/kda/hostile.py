"""Hostile inputs: problems that break kernels of this kind, each written as one line that draws it again.

A spec is words `knob=value`; a knob that is left out keeps its default:

| knob           | values (default first)                                                                           |
|----------------|--------------------------------------------------------------------------------------------------|
| B T H HV K V   | 1 64 1 H 64 64                                                                                     |
| dtype          | bfloat16, float16: of q, k, v                                                                    |
| gtype, btype   | of g, beta: the form's own (fp32 for pre, dtype for prod), float32, bfloat16, float16, float64   |
| form           | pre (log gate, betas), prod (raw gate, logits, normalisation inside)                             |
| safe           | yes, no: safe_gate (no with form prod: the softplus gate)                                        |
| gate           | slow, strong, mixed, init; LEVEL; uneven:LEVEL; ramp:LEVEL; spike:LEVEL@T; inf@T                 |
| keys           | random, same, near, zero, tiny, long (norm 1.4; with form prod 1e4)                              |
| beta           | random, or a number                                                                              |
| values         | random, zero, 2^N                                                                                |
| state          | none, random, 2^N                                                                                |
| layout         | plain, transposed, expanded, strided, offset, sliced                                             |
| cut            | none, all: also in two parts with the state handed over, cut at tokens around the block sizes    |
| nan            | none, NAME@T: NaN in the first channel of that tensor at token T of batch 0, head 0              |

LEVEL is a natural-log decay per token, constant over channels and tokens; `uneven` gives it to every second channel and
0 to the others; `ramp` runs from 0 to it over 16 tokens, again and again; `spike` gives it to one token; `inf@T` is -inf
at token T in every second channel.

Where fewer than MANY tokens (over all batches and heads) are judged together, each q leans towards its own k or away from
it: a lone token's o is q . k times a vector, and where that product all but cancels, any rounding of q or k is as large as o.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from kernels.kda import inputs
from kernels.kda.cases import Case
from kernels.kda.inputs import Inputs

REGIME = "hostile"
VOID_ABOVE = 0.1  # identical keys make every low-precision inverse err by several hundredths; what is broken errs by more
MANY = 32  # tokens; from here on the rows' common scale bears a q . k that cancels
SIZES = ("B", "T", "H", "HV", "K", "V")
BASES = ("slow", "strong", "mixed", "init")
CHOICES = {
    "dtype": ("bfloat16", "float16"), "form": ("pre", "prod"), "safe": ("yes", "no"),
    "gtype": ("", "float32", "bfloat16", "float16", "float64"), "btype": ("", "float32", "bfloat16", "float16", "float64"),
    "keys": ("random", "same", "near", "zero", "tiny", "long"),
    "layout": ("plain", "transposed", "expanded", "strided", "offset", "sliced"), "cut": ("none", "all"),
}  # fmt: skip


class SpecError(ValueError):
    """A spec that names no problem; one line: knob, given, accepted."""


@dataclass(frozen=True)
class Spec:
    """One hostile problem, up to its seed. Knobs as in the table above."""

    B: int = 1
    T: int = 64
    H: int = 1
    HV: int = 0  # 0: H
    K: int = 64
    V: int = 64
    dtype: str = "bfloat16"
    gtype: str = ""
    btype: str = ""
    form: str = "pre"
    safe: str = "yes"
    gate: str = "slow"
    keys: str = "random"
    beta: str = "random"
    values: str = "random"
    state: str = "none"
    layout: str = "plain"
    cut: str = "none"
    nan: str = "none"

    def __str__(self) -> str:
        words = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return " ".join(words) or "T=64"

    @property
    def case(self) -> Case:
        """Its sizes; the name is the spec itself."""
        return Case(str(self), self.B, self.T, self.H, self.HV or self.H, self.K, self.V, self.dtype, self.state != "none", False)


def parse(text: str) -> Spec:
    """The spec that `text` spells. Raises SpecError."""
    known = {f.name: f for f in fields(Spec)}
    given: dict[str, object] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        if name not in known:
            raise SpecError(f"hostile: given {word!r}, accepted: knob=value with the knobs {', '.join(known)}")
        if name in SIZES:
            if not value.isdigit():
                raise SpecError(f"hostile: {name}: given {value!r}, accepted: a number")
            given[name] = int(value)
        elif name in CHOICES and value not in CHOICES[name]:
            raise SpecError(f"hostile: {name}: given {value!r}, accepted: {', '.join(filter(None, CHOICES[name]))}")
        else:
            given[name] = value
    return Spec(**given)


def make(text: str, seed: int, device: torch.device | str = "cpu") -> Inputs:
    """Draw the problem that a spec names. The same seed gives the same values on one device type. Raises SpecError."""
    spec = parse(text)
    base = spec.gate if spec.gate in BASES else "slow"
    if spec.form == "prod" or spec.gate in BASES:
        base = "init" if spec.safe == "no" else base
    x = inputs.make(spec.case, base, spec.form, seed, device)
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    t, flags = dict(x.tensors), dict(x.flags)
    flags["safe_gate"] = spec.safe == "yes"
    if spec.gate not in BASES:
        t["g"] = _gate(spec, t, flags)
    t["k"] = _keys(spec, t["k"], generator)
    if spec.B * spec.T * spec.H < MANY:
        t["q"] = _leaning(t["q"], t["k"])
    if spec.beta != "random":
        t["beta"] = _beta(spec, t["beta"])
    t["v"] = _scaled(spec.values, t["v"])
    if spec.state != "none":
        t["initial_state"] = _scaled(spec.state, t["initial_state"])
    for name, dtype in (("g", spec.gtype), ("beta", spec.btype)):
        if dtype:
            t[name] = t[name].to(getattr(torch, dtype))
    t = {name: LAYOUTS[spec.layout](name, tensor) for name, tensor in t.items()}
    if spec.nan != "none":
        name, token = _at(spec.nan)
        if name not in ("q", "k", "v", "g", "beta") or token >= spec.T:
            raise SpecError(f"hostile: nan: given {spec.nan!r}, accepted: q, k, v, g or beta @ a token below T = {spec.T}")
        t[name][(0, token, 0, 0)[: t[name].dim()]] = torch.nan
    return replace(x, case=spec.case, regime=REGIME, tensors=t, flags=flags)


def _at(text: str) -> tuple[str, int]:
    name, _, token = text.partition("@")
    if not token.isdigit():
        raise SpecError(f"hostile: given {text!r}, accepted: something@token")
    return name, int(token)


def _gate(spec: Spec, t: dict[str, torch.Tensor], flags: dict) -> torch.Tensor:
    """g of one of the shapes in the module's table, raw for form prod."""
    kind, _, rest = spec.gate.rpartition(":")
    g = torch.zeros(t["g"].shape, dtype=torch.float64, device=t["g"].device)
    try:
        if spec.gate.startswith("inf@"):
            g -= 0.01
            g[:, _at(spec.gate)[1], :, ::2] = -torch.inf
        elif kind == "uneven":
            g[..., 1::2] = float(rest)
        elif kind == "ramp":
            g += (float(rest) * (torch.arange(spec.T, device=g.device) % 16) / 15)[:, None, None]
        elif kind == "spike":
            g -= 0.01
            g[:, _at(rest)[1]] = float(rest.partition("@")[0])
        else:
            g += float(spec.gate)
    except (ValueError, IndexError):
        raise SpecError(f"hostile: gate: given {spec.gate!r}, accepted: {', '.join(BASES)}, LEVEL, uneven:LEVEL, "
                        "ramp:LEVEL, spike:LEVEL@T, inf@T (LEVEL a number, T a token)") from None  # fmt: skip
    return (_raw(g, t, flags) if spec.form == "prod" else g).to(t["g"].dtype)


def _raw(g: torch.Tensor, t: dict[str, torch.Tensor], flags: dict) -> torch.Tensor:
    """Raw gate values whose decay is about g: the gate functions turned around, ends at +-1e4."""
    a = t["A_log"].double().exp()[:, None]
    if flags["safe_gate"]:
        raw = torch.logit(g / flags["lower_bound"]) / a
    else:
        y = -g / a
        raw = torch.where(y > 30, y, torch.log(torch.expm1(y)))
    raw = raw - t["dt_bias"].double().view(g.shape[2], g.shape[3])
    return torch.nan_to_num(raw.clamp(-1e4, 1e4), posinf=1e4, neginf=-1e4)


def _keys(spec: Spec, k: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if spec.keys in ("same", "near"):
        k = k[:, :1].expand_as(k)
        if spec.keys == "near":
            noise = torch.randn(k.shape, generator=generator, device=k.device, dtype=torch.float32)
            k = (k.float() * (1 + 1e-2 * noise)).to(k.dtype)
        return k.contiguous()
    factor = {"random": 1.0, "zero": 0.0, "tiny": 2.0**-12, "long": 1.4 if spec.form == "pre" else 1e4}[spec.keys]
    return (k.float() * factor).to(k.dtype)


def _leaning(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q of the same length and dtype, leaning towards k, or away from it if it already does: by 1 / sqrt(K), what is usual
    of a random cosine, so that no cosine is less than about that."""
    x, unit = q.double(), torch.nn.functional.normalize(k.double(), dim=-1)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    side = torch.where((x * unit).sum(-1, keepdim=True) < 0, -1.0, 1.0)
    return (length * torch.nn.functional.normalize(x + side * length * unit / q.shape[-1] ** 0.5, dim=-1)).to(q.dtype)


def _beta(spec: Spec, beta: torch.Tensor) -> torch.Tensor:
    try:
        value = float(spec.beta)
    except ValueError:
        raise SpecError(f"hostile: beta: given {spec.beta!r}, accepted: random, or a number") from None
    if spec.form == "prod":
        value = {0.0: -1e4, 1.0: 1e4}.get(value, value)
    return torch.full_like(beta, value)


def _scaled(how: str, x: torch.Tensor) -> torch.Tensor:
    if how == "random":
        return x
    base, _, power = how.partition("^")
    if how != "zero" and not (base == "2" and power.lstrip("-").isdigit()):
        raise SpecError(f"hostile: values, state: given {how!r}, accepted: random, zero, 2^N")
    return (x.double() * (0.0 if how == "zero" else 2.0 ** int(power))).to(x.dtype)


def _transposed(name: str, x: torch.Tensor) -> torch.Tensor:
    """Stored with its two inner dimensions (or heads and tokens, for four of them) exchanged."""
    if x.dim() < 2:
        return x
    a, b = (2, 3) if name == "initial_state" else (1, 2)
    return x.transpose(a, b).contiguous().transpose(a, b)


def _expanded(name: str, x: torch.Tensor) -> torch.Tensor:
    """Every sequence the first one: a batch stride of 0."""
    return x if x.dim() < 3 else x[:1].expand_as(x)


def _strided(name: str, x: torch.Tensor) -> torch.Tensor:
    """Every second element of a buffer whose others are NaN."""
    buffer = torch.full((*x.shape, 2), torch.nan, dtype=x.dtype, device=x.device)
    buffer[..., 0] = x
    return buffer[..., 0]


def _offset(name: str, x: torch.Tensor) -> torch.Tensor:
    """Dense, but one element past an aligned address."""
    buffer = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype, device=x.device)
    buffer[1:] = x.flatten()
    return buffer[1:].view(x.shape)


def _sliced(name: str, x: torch.Tensor) -> torch.Tensor:
    """The middle of a wider last dimension, as a slice of one projection's output is."""
    buffer = torch.full((*x.shape[:-1], 3 * x.shape[-1]), torch.nan, dtype=x.dtype, device=x.device)
    buffer[..., x.shape[-1] : 2 * x.shape[-1]] = x
    return buffer[..., x.shape[-1] : 2 * x.shape[-1]]


LAYOUTS: dict[str, Callable[[str, torch.Tensor], torch.Tensor]] = {
    "plain": lambda name, x: x, "transposed": _transposed, "expanded": _expanded, "strided": _strided,
    "offset": _offset, "sliced": _sliced,
}  # fmt: skip

# What each family of `check` runs. The first tuple also where a call takes seconds (the emulator), the second elsewhere.
LEVELS = ("0", "-1e-3", "-0.1", "-0.5", "-1", "-2", "-2.5", "-3", "-4", "-5")
FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gates": (
        ("gate=-5", "safe=no gate=uneven:-8", "form=prod gate=0"),
        (*(f"T=130 gate={x}" for x in LEVELS), *(f"T=130 safe=no gate={x}" for x in ("0", "-1", "-5", "-27.6", "-90", "-1e4")),
         *(f"T=130 form=prod gate={x}" for x in LEVELS), *(f"T=130 form=prod safe=no gate={x}" for x in ("0", "-1", "-20")),
         "T=130 gate=uneven:-5", "T=130 safe=no gate=uneven:-27.6", "T=130 safe=no gate=uneven:-100",
         "T=130 gate=ramp:-5", "T=130 safe=no gate=ramp:-12", "T=130 safe=no gate=spike:-100@20", "safe=no gate=inf@20",
         "T=130 safe=no gate=inf@70", "T=130 HV=4 H=2 gate=strong", "T=130 HV=4 H=2 gate=mixed", "T=130 K=128 V=128 gate=-5")),
    "keys": (
        ("keys=same gate=0 beta=1", "form=prod keys=zero gate=strong"),
        ("T=130 keys=same gate=0 beta=1", "T=130 keys=same gate=-1e-3", "T=130 keys=near gate=0 beta=1", "T=130 keys=zero",
         "T=130 keys=tiny", "T=130 keys=long gate=-0.1", "T=130 keys=same gate=-1 beta=2", "T=130 beta=0", "T=130 beta=1",
         "T=130 beta=2 gate=-0.5", "T=130 form=prod keys=same", "T=130 form=prod keys=zero", "T=130 form=prod keys=tiny",
         "T=130 form=prod keys=long", "T=130 form=prod beta=0", "T=130 form=prod beta=1", "T=130 safe=no keys=same gate=0 beta=1",
         "T=130 K=128 V=128 keys=same gate=0 beta=1")),
    "values": (
        ("values=2^100 state=2^100",),
        ("T=130 values=zero", "T=130 values=zero state=random", "T=130 values=2^100", "T=130 values=2^-100", "T=130 state=2^100",
         "T=130 state=2^-100", "T=130 values=2^120 gate=strong", "T=130 dtype=float16 values=2^10 state=2^8",
         "T=130 dtype=float16 values=2^-10", "T=130 state=zero", "T=130 gate=0 state=2^20",
         "T=256 gate=-0.35 state=2^126", "T=320 gate=-0.15 values=zero state=random")),
    "sizes": (
        ("T=1", "T=65 K=128 V=64 H=1 HV=2 state=random"),
        (*(f"T={n}" for n in (2, 3, 15, 16, 17, 31, 32, 33, 48, 63, 65, 127, 128, 129, 191, 193)),
         *(f"T={n} safe=no gate=init" for n in (1, 15, 16, 17, 63, 65, 129)), *(f"T={n} form=prod gate=strong" for n in (1, 17, 63, 65)),
         *(f"T=70 H=2 HV={n}" for n in (4, 6, 8)), "T=70 H=3 HV=3", "B=3 T=70", "B=2 T=1 H=1 HV=4",
         *(f"T=70 K={k} V={v} state=random" for k in (64, 128) for v in (64, 128, 192, 256, 512)),
         "T=70 K=32 V=32", "T=70 K=256 V=64", "T=70 K=96 V=64", "T=70 V=1", "T=70 V=16", "T=70 V=96", "T=70 K=512", "T=70 K=1")),
    "dtypes": (
        ("dtype=float16 gtype=bfloat16 btype=float16",),
        (*(f"T=70 dtype={d} gtype={g}" for d in ("bfloat16", "float16") for g in ("float32", "bfloat16", "float16")),
         *(f"T=70 dtype={d} btype={b}" for d in ("bfloat16", "float16") for b in ("float32", "bfloat16", "float16")),
         *(f"T=70 form=prod gate=strong dtype={d} gtype={g} btype={b}" for d in ("float16", "bfloat16")
           for g in ("float32", "bfloat16", "float16") for b in ("float32", "bfloat16")),
         "T=70 gtype=float64", "T=70 btype=float64", "T=70 dtype=float16", "T=70 dtype=bfloat16")),
    "views": (
        ("layout=offset state=random form=prod",),
        tuple(f"B=2 T=70 H=2 HV=4 state=random {form} layout={layout}" for layout in CHOICES["layout"]
              for form in ("gate=mixed", "gate=strong form=prod"))),
    "NaN": (
        ("T=70 H=2 nan=g@66 layout=plain",),
        tuple(f"B=2 T=200 H=2 HV=4 nan={name}@70 {more}" for name in ("q", "k", "v", "g", "beta")
              for more in ("gate=slow", "gate=strong form=prod", "safe=no gate=init"))),
    "splits": (
        ("T=65 K=64 V=128 state=random cut=all",),
        ("T=200 K=64 V=128 state=random cut=all", "T=200 K=128 V=64 state=random gate=mixed form=prod cut=all",
         "T=200 H=1 HV=2 safe=no gate=init cut=all")),
}  # fmt: skip
