"""How far a stage's result may lie from the exact one: a derived radius for every element, whatever tensor core made the sums.

Two machines that run the same instructions on the same bytes part in two places only: approximate functions, each within the
manual's error of the exact value, and tensor-core sums. What they then round to bf16 may fall to either side of a rounding
boundary, and goes on from there. So neither is compared with the other alone: both must lie in a ball around the value that
exact arithmetic gives for the equations of ALGORITHM.md, from the stage's own inputs. A `Ball` is that value and a radius;
every operation adds what the machine's operation may lose:

rounding to a format of p significant bits   2^-p |x| (2^(1-p) where bits are cut, as tf32 operands are), and what may be flushed
fp32 arithmetic                               2^-24 |x| an operation
2^x                                           2 ulp: 2^-22, and ln 2 times the error of the argument
a sum of K products in a tensor core          K / 8 instructions at most. In each, products are exact, and its products and
    the addend are aligned to the largest exponent E and cut below 2^(E-25): at most 17 terms (16 products, the addend) of which
    each loses less than 2^(E-25), then the cut of the result to fp32, 2^-23 of it. With S = sum |a||b| + |c| >= 2^E at every step
    one instruction loses u S, u = 17 * 2^-25 + 2^-23, and n of them n u S (1 + u)^n (emulator/hw/numerics.py: chain_error_bound).
    Products of balls: |A| rB + rA |B| + rA rB beside it.

Which values are rounded where is the union over the rungs (ALGORITHM.md, section 5): each operand of a product counts as rounded
to io where any rung rounds it, A twice for beta folded in, scores' operands always to bf16, products of the inverse as cut to
tf32. An extra rounding only widens the ball. Elements that nothing computes (above the diagonal) must have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LOG2E, LN2 = np.log2(np.e), np.log(2.0)
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "tf32 cut": 2.0**-10, "split": 2.0**-15}
TINY = 2.0**-126  # what an instruction with .ftz may have made zero
SUBNORMAL = {"float16": 2.0**-25}
SUM = 17 * 2.0**-25 + 2.0**-23
CHUNK = 64


@dataclass(frozen=True)
class Ball:
    """Values any machine may hold: |value - mid| <= rad. Both float64, one shape."""

    mid: np.ndarray
    rad: np.ndarray

    def __getitem__(self, at) -> Ball:
        return Ball(self.mid[at], self.rad[at])

    @property
    def most(self) -> np.ndarray:
        return np.abs(self.mid) + self.rad

    @property
    def T(self) -> Ball:
        return Ball(self.mid.T, self.rad.T)

    def rounded(self, kind: str = "float32", times: int = 1) -> Ball:
        b = self
        for _ in range(times):
            b = Ball(b.mid, b.rad + UNIT[kind] * b.most + SUBNORMAL.get(kind, TINY))
        return b

    def off(self, relative, absolute=0.0) -> Ball:
        return Ball(self.mid, self.rad + relative * self.most + absolute)

    def __mul__(self, other) -> Ball:
        o = exact(other)
        return Ball(self.mid * o.mid, np.abs(self.mid) * o.rad + self.rad * o.most).rounded()

    def __add__(self, other) -> Ball:
        o = exact(other)
        return Ball(self.mid + o.mid, self.rad + o.rad).rounded()

    def __sub__(self, other) -> Ball:
        o = exact(other)
        return self + Ball(-o.mid, o.rad)


def exact(x) -> Ball:
    return x if isinstance(x, Ball) else Ball(np.asarray(x, np.float64), np.zeros(np.shape(x)))


def product(a: Ball, b: Ball, c: Ball | None = None) -> Ball:
    """c + a @ b in a tensor core."""
    n = -(-a.mid.shape[-1] // 8)
    mid, rad, size = a.mid @ b.mid, np.abs(a.mid) @ b.rad + a.rad @ b.most, a.most @ b.most + TINY
    if c is not None:
        mid, rad, size = mid + c.mid, rad + c.rad, size + c.most
    return Ball(mid, rad + n * SUM * (1 + SUM) ** n * size + n * 2.0**-149)


def power(x: Ball, extra=0.0) -> Ball:
    """2^x; extra: a further relative error."""
    mid = np.exp2(x.mid)
    return Ball(mid, mid * (np.expm1(LN2 * (x.rad + 2.0**-24 * x.most)) * (1 + 2.0**-22) + 2.0**-22 + extra) + TINY)


# ---- the parts of the algorithm, one chunk of one head: [C, K] and so on -------------------------------------------------


def normalised(x: Ball) -> Ball:
    """x / sqrt(sum x^2 + 1e-6): K additions, then root, reciprocal and products of a few ulps."""
    mid = x.mid / np.sqrt((x.mid**2).sum(-1, keepdims=True) + 1e-6)
    return Ball(mid, np.zeros_like(mid)).off((mid.shape[-1] + 16) * 2.0**-24 + 2.0**-20)


def sigmoid(x: Ball) -> Ball:
    """1 / (1 + 2^(-x log2 e)): the argument's rounding costs |x| 2^-23, the functions a few ulps."""
    mid = 1 / (1 + np.exp(-x.mid))
    return Ball(mid, mid * (x.rad + 2.0**-23 * x.most + 2.0**-20))


def log2_decays(g: np.ndarray, a_log: float | None, bias: np.ndarray | None, lower_bound: float | None) -> Ball:
    """Log2 decay of each token [T, K]: of the natural one as given, or from the raw gate (softplus or safe)."""
    if a_log is None:
        return exact(g) * LOG2E
    x = g + bias
    size, a = np.abs(g) + np.abs(bias), np.exp(a_log)
    if lower_bound is not None:  # lower_bound sigmoid(a x), with a and the argument to 2^-20 of their parts
        return sigmoid(Ball(a * x, 2.0**-19 * a * size)) * (lower_bound * LOG2E)
    slope, mid = 1 / (1 + np.exp(-x)), np.log1p(np.exp(x))
    # 2^ and lg2: the exponential's error passes on with weight slope; 1 + e^x is rounded, lg2 errs by 2^-22 absolutely below 2
    rad = slope * (2.0**-20 * (1 + np.abs(x)) + 2.0**-23 * size) + 2.0**-21 * np.maximum(1, mid)
    return Ball(mid, rad).off(2.0**-20) * (-a * LOG2E)


def cumulated(decay: Ball) -> Ball:
    """G of (3) along the first axis: at most C additions in any order, and one factor."""
    size = np.cumsum(decay.most, 0)
    return Ball(np.cumsum(decay.mid, 0), np.cumsum(decay.rad, 0) + (len(size) + 6) * 2.0**-24 * size)


def scores(x: Ball, k: Ball, G: Ball) -> Ball:
    """sum_c x_ic k_jc 2^(G_ic - G_jc), j <= i, of (8) and (9), around any anchor: two factors 2^(+-(G - a)) whose arguments are
    at most |G_i - G_j| + 128 large, each times x or k and rounded to bf16. Elements above the diagonal are zero."""
    C, K = G.mid.shape
    i, j = np.tril_indices(C)
    gap = G.mid[i] - G.mid[j]
    relative = 2 * (UNIT["bfloat16"] + 2.0**-22 + 2.0**-23 + LN2 * 2.0**-24 * (np.abs(gap) + 128)) + LN2 * (G.rad[i] + G.rad[j])
    factor = Ball(np.exp2(gap), np.exp2(gap) * np.expm1(relative) + 2.0**-60)
    xk = Ball(x.mid[i] * k.mid[j], np.abs(x.mid[i]) * k.rad[j] + x.rad[i] * k.most[j])
    size = xk.most * factor.most
    rad = np.abs(xk.mid) * factor.rad + xk.rad * factor.most
    n = -(-K // 8) + 4  # and a few partial sums in fp32; an elementwise sum in fp32 loses less
    out = Ball(np.zeros((C, C)), np.zeros((C, C)))
    out.mid[i, j] = (xk.mid * factor.mid).sum(-1)
    out.rad[i, j] = rad.sum(-1) + max(n * SUM * (1 + SUM) ** n, K * 2.0**-24) * size.sum(-1)
    return out


def inverse(L: Ball) -> Ball:
    """(I + L)^-1 by (13), operands cut to tf32. Forward substitution of a block in fp32 loses less than its levels here."""
    C = len(L.mid)
    rows, cols = np.indices((C, C))
    D, s = exact(np.eye(C)), 1
    while s < C:
        here = ((rows ^ cols) >= s) & ((rows ^ cols) < 2 * s) & (rows > cols)
        Ls = Ball(np.where(here, L.mid, 0), np.where(here, L.rad, 0))
        step = product(product(D.rounded("tf32 cut"), Ls.rounded("tf32 cut")).rounded("tf32 cut"), D.rounded("tf32 cut"))
        step = Ball(np.where(here, step.mid, 0), np.where(here, step.rad, 0))
        D = D - step
        D = Ball(D.mid, np.where(rows >= cols, D.rad, 0))
        s *= 2
    return D


def prepared(q: Ball, k: Ball, v: Ball, G: Ball, beta: Ball, scale: float, io: str) -> dict[str, Ball]:
    """Aqk, Akk, w, u, qg, kg of one chunk, (8) to (12)."""
    C = len(G.mid)
    L = scores(k, k, G) * beta.mid[:, None]
    L = L.off((beta.rad / np.maximum(np.abs(beta.mid), 1e-30))[:, None]).rounded("split")
    strict = np.tril(np.ones((C, C)), -1) > 0
    A = inverse(Ball(np.where(strict, L.mid, 0), np.where(strict, L.rad, 0)))
    return {
        "Aqk": (scores(q, k, G) * scale).rounded(io, 2),
        "Akk": A.rounded(io),
        **decayed(q, k, v, G, beta, A.rounded(io, 2), io),
    }


def decayed(q: Ball, k: Ball, v: Ball, G: Ball, beta: Ball, A: Ball, io: str) -> dict[str, Ball]:
    """w, u, qg, kg, (11) and (12), with A as the operand that it is."""
    b, decay = Ball(beta.mid[:, None], beta.rad[:, None]), power(G)
    last = Ball(G.mid[-1:] - G.mid, np.where(G.rad > 0, G.rad[-1:] + G.rad, 0))
    return {
        "w": product(A, ((k * b).rounded(io) * decay).rounded(io, 2)).rounded(io),
        "u": product(A, (v * b).rounded(io)).rounded(io),
        "qg": (q * decay).rounded(io, 2), "kg": (k * power(last)).rounded(io, 2),
    }  # fmt: skip


def stepped(S: Ball, x: dict[str, Ball], last: Ball, scale: float, io: str, keys_first: bool = False) -> tuple[Ball, Ball, Ball]:
    """(o, v', next S) of one chunk, (14) to (16). keys_first: v' = A io(beta (v - kG S)), as 006 has it."""
    s = S.rounded(io)
    if keys_first:
        r = (x["v"] - product(x["kG"], s)) * Ball(x["beta"].mid[:, None], x["beta"].rad[:, None])
        written = product(x["Akk"], r.rounded(io))
    else:
        written = x["u"] - product(x["w"], s)
    operand = written.rounded(io)
    o = product(x["Aqk"], operand, product(x["qg"], s) * scale).rounded(io, 2)
    decay = power(last)
    return o, written, product(x["kg"].T, operand, S * Ball(decay.mid.T, decay.rad.T)).rounded()


# ---- the stages ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """A stage's inputs by name (float64, [B,T,H,K] and so on) and what the call says: scale, lower bound, the io dtype."""

    x: dict[str, np.ndarray]
    scale: float
    lower_bound: float | None
    io: str

    def heads(self):
        """(b, value head, q/k head, chunk slices)."""
        k, v = self.x["k"] if "k" in self.x else self.x["w"] if "w" in self.x else self.x["q"], self.x.get("v", self.x.get("g2"))
        for b in range(k.shape[0]):
            for hv in range(v.shape[2]):
                yield b, hv, hv // (v.shape[2] // k.shape[2]), [slice(c, c + CHUNK) for c in range(0, k.shape[1], CHUNK)]


def balls(stage: str, given: Given) -> dict[str, Ball]:
    """For every output of a stage its ball, in the output's shape. Where mid is NaN nothing is computed. Raises KeyError for
    a stage without a derivation."""
    return {"normalise": _normalise, "gate": _gate, "intra": _intra, "wu": _wu, "scan": _scan, "output": _output, "prep": _prep,
            "state": _state, "forward": _forward}[stage](given)  # fmt: skip


class _Outputs:
    """Collects chunks of heads into whole tensors."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, tuple, Ball]] = []

    def put(self, name: str, at: tuple, ball: Ball) -> None:
        self.parts.append((name, at, ball))

    def tensors(self, shapes: dict[str, tuple]) -> dict[str, Ball]:
        out: dict[str, Ball] = {}
        for name, at, ball in self.parts:
            whole = out.setdefault(name, Ball(np.full(shapes[name], np.nan), np.zeros(shapes[name])))
            whole.mid[at], whole.rad[at] = ball.mid, ball.rad
        return out


def _below(ball: Ball) -> Ball:
    """Nothing is computed above the diagonal."""
    return Ball(np.where(np.tril(np.ones(ball.mid.shape)) > 0, ball.mid, np.nan), ball.rad)


def _normalise(g: Given) -> dict[str, Ball]:
    out = {n: normalised(exact(g.x[n])).rounded(g.io) for n in ("q", "k")}
    return out | ({"beta": sigmoid(exact(g.x["beta"]))} if "beta" in g.x else {})


def _decays(g: Given, b: int, hv: int) -> Ball:
    """Log2 decays of one head, [T, K]."""
    x = g.x["g"][b, :, hv]
    if "A_log" not in g.x:
        return log2_decays(x, None, None, None)
    bias = g.x["dt_bias"].reshape(-1, x.shape[1])[hv] if "dt_bias" in g.x else np.zeros(x.shape[1])
    return log2_decays(x, float(g.x["A_log"][hv]), bias, g.lower_bound)


def _gate(g: Given) -> dict[str, Ball]:
    B, T, HV, K = g.x["g"].shape
    out = _Outputs()
    for b in range(B):
        for hv in range(HV):
            decay = _decays(g, b, hv)
            for c in range(0, T, CHUNK):
                out.put("g2", (b, slice(c, c + CHUNK), hv), cumulated(decay[c : c + CHUNK]))
    return out.tensors({"g2": (B, T, HV, K)})


def _inputs(g: Given, b: int, hv: int, h: int, c: slice) -> tuple[Ball, ...]:
    return tuple(
        exact(g.x[n][b, c, h if n in "qk" else hv]) if n in g.x else exact(np.zeros((CHUNK, 1)))
        for n in ("q", "k", "v", "g2", "beta")
    )


def _shapes(g: Given) -> dict[str, tuple]:
    like = g.x["g2"] if "g2" in g.x else g.x["g"] if "g" in g.x else g.x["w"]
    (B, T, HV, K), V = like.shape, g.x["v" if "v" in g.x else "u" if "u" in g.x else "v_new" if "v_new" in g.x else "k"].shape[3]
    keys, chunks = (B, T, HV, K), T // CHUNK
    return {"w": keys, "qg": keys, "kg": keys, "u": (B, T, HV, V), "v_new": (B, T, HV, V), "o": (B, T, HV, V),
            "Aqk": (B, T, HV, CHUNK), "Akk": (B, T, HV, CHUNK), "gl": (B, chunks, HV, K), "fade": (B, chunks, HV),
            "h": (B, chunks, HV, K, V),
            "final_state": (B, HV, K, V)}  # fmt: skip


def _intra(g: Given) -> dict[str, Ball]:
    out = _Outputs()
    for b, hv, h, chunks in g.heads():
        for c in chunks:
            for name, ball in prepared(*_inputs(g, b, hv, h, c), g.scale, g.io).items():
                out.put(name, (b, c, hv), _below(ball) if name in ("Aqk", "Akk") else ball)
    return out.tensors(_shapes(g))


def _wu(g: Given) -> dict[str, Ball]:
    out = _Outputs()
    for b, hv, h, chunks in g.heads():
        for c in chunks:
            for name, ball in decayed(*_inputs(g, b, hv, h, c), exact(g.x["Akk"][b, c, hv]), g.io).items():
                out.put(name, (b, c, hv), ball)
    return out.tensors(_shapes(g))


def _raw(g: Given, b: int, hv: int, h: int) -> tuple[Ball, Ball, Ball, Ball]:
    """q, k, beta of one head and its log2 decays, normalised where the call asks for it."""
    q, k, beta = (exact(g.x[n][b, :, i]) for n, i in (("q", h), ("k", h), ("beta", hv)))
    if "A_log" in g.x:  # form prod
        q, k, beta = normalised(q).rounded(g.io), normalised(k).rounded(g.io), sigmoid(beta)
    return q, k, beta, _decays(g, b, hv)


def _prep(g: Given) -> dict[str, Ball]:
    out = _Outputs()
    for b, hv, h, chunks in g.heads():
        q, k, beta, decay = _raw(g, b, hv, h)
        for n, c in enumerate(chunks):
            G = cumulated(decay[c])
            for name, ball in prepared(q[c], k[c], exact(g.x["v"][b, c, hv]), G, beta[c], g.scale, g.io).items():
                out.put(name, (b, c, hv), ball)  # Aqk is written whole, with zeros above its diagonal
            out.put("gl", (b, n, hv), G[-1])
            peak = Ball(decay[c].mid.max(1), decay[c].rad.max(1))  # of normalised keys: no token grows the state
            out.put("fade", (b, n, hv), cumulated(peak)[-1].off(2.0**-20, 2.0**-20))
    return out.tensors(_shapes(g))


def _walk(g: Given, b: int, hv: int, chunk_of, chunks, out: _Outputs, keys_first: bool = False) -> None:
    x = g.x
    S = exact(x["initial_state"][b, hv] if "initial_state" in x else np.zeros(_shapes(g)["final_state"][2:]))
    for n, c in enumerate(chunks):
        out.put("h", (b, n, hv), S.rounded(g.io))
        operands, last = chunk_of(n, c)
        o, written, S = stepped(S, operands, last, g.scale, g.io, keys_first)
        out.put("o", (b, c, hv), o)
        out.put("v_new", (b, c, hv), written.rounded(g.io))
    out.put("final_state", (b, hv), S)


def _state(g: Given) -> dict[str, Ball]:
    out, x = _Outputs(), g.x
    B, T, HV, _ = x["w"].shape
    for b in range(B):
        for hv in range(HV):

            def chunk_of(n, c, b=b, hv=hv):
                last = x["gl"][b, n, hv] if "gl" in x else x["g2"][b, c, hv][-1]
                # scan alone has neither qg nor Aqk, and no o: any will do
                return {m: exact(x[m][b, c, hv]) if m in x else exact(np.zeros((CHUNK, CHUNK if m == "Aqk" else x["w"].shape[3])))
                        for m in ("w", "u", "kg", "qg", "Aqk")}, exact(last[None])  # fmt: skip

            _walk(g, b, hv, chunk_of, [slice(c, c + CHUNK) for c in range(0, T, CHUNK)], out)
    return out.tensors(_shapes(g))


_scan = _state


def _output(g: Given) -> dict[str, Ball]:
    """o from the states as they stand: q 2^G rounded to io, Aqk's lower triangle as it is."""
    out, x = _Outputs(), g.x
    B, T, HV, _ = x["g2"].shape
    for b in range(B):
        for hv in range(HV):
            for n in range(T // CHUNK):
                c, h = slice(n * CHUNK, n * CHUNK + CHUNK), hv // (HV // x["q"].shape[2])
                qg = (exact(x["q"][b, c, h]) * power(exact(x["g2"][b, c, hv]))).rounded(g.io, 2)
                Aqk, rows = x["Aqk"][b, c, hv], np.arange(CHUNK)
                Aqk = exact(np.where(rows[:, None] >= rows, Aqk, 0.0))
                o = product(Aqk, exact(x["v_new"][b, c, hv]), product(qg, exact(x["h"][b, n, hv])) * g.scale)
                out.put("o", (b, c, hv), o.rounded(g.io, 2))
    return out.tensors(_shapes(g))


def _forward(g: Given) -> dict[str, Ball]:
    out = _Outputs()
    for b, hv, h, chunks in g.heads():
        q, k, beta, decay = _raw(g, b, hv, h)

        def chunk_of(n, c, q=q, k=k, beta=beta, decay=decay, b=b, hv=hv):
            G, v = cumulated(decay[c]), exact(g.x["v"][b, c, hv])
            x = prepared(q[c], k[c], v, G, beta[c], g.scale, g.io)
            return x | {"v": v, "beta": beta[c], "kG": (k[c] * power(G)).rounded(g.io, 3)}, G[-1:]

        _walk(g, b, hv, chunk_of, chunks, out, keys_first=True)
    return {n: t for n, t in out.tensors(_shapes(g)).items() if n in ("o", "final_state")}
