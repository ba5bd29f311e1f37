"""Device check and timing of one compiled state kernel against a torch reference. Not collected by pytest.

    python gpu_state.py MODULE.so --K 128 --V 128 --dtype bfloat16 [--no-h0] [--no-ht] [--time] [--cases small|all]

Prints one line per case: relative errors of o and ht (2-norm), worst chunk of o, bitwise rerun; then one per timed shape.
Exit 1 where an error exceeds the rounding of the io dtype or a rerun differs.
"""

import argparse
import ctypes
import os
import statistics
import sys

import torch

if "CUTE_DSL_RUNTIME" in os.environ:
    ctypes.CDLL(os.environ["CUTE_DSL_RUNTIME"], mode=ctypes.RTLD_GLOBAL)
import tvm_ffi  # noqa: E402

C = 64
SMALL = [(1, 64, 2), (1, 128, 1), (2, 192, 3), (1, 200, 2), (2, 1, 1)]
LARGE = [(2, 1000, 5), (1, 8192, 4), (3, 577, 70)]
TIMED = {
    "h96": (1, 8192, 96), "h64": (1, 8192, 64), "t8192_h24": (1, 8192, 24), "t2048_h12": (1, 2048, 12),
    "b8_h16_t4096": (8, 4096, 16), "t32768_h32": (1, 32768, 32),
}


def inputs(B, T, HV, K, V, dtype, seed=0):
    """Operands as fla's intra stage leaves them: g2 chunk-local cumulative, w and kg decayed, Aqk lower triangular."""
    gen = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, device="cuda", generator=gen)

    # a channel keeps from nearly all of its state to nearly nothing over a chunk
    step = -(randn(B, T, HV, K) + 2 * randn(HV, K) - 5.5).exp()
    pad = (-T) % C
    step = torch.nn.functional.pad(step, (0, 0, 0, 0, 0, pad))
    g2 = step.view(B, -1, C, HV, K).cumsum(2).reshape(B, -1, HV, K)[:, :T].contiguous()
    w = (randn(B, T, HV, K) * (g2.exp2() * 0.3 / K**0.5)).to(dtype)
    kg = (randn(B, T, HV, K) * (0.3 / K**0.5)).to(dtype)
    qg = (randn(B, T, HV, K) * g2.exp2()).to(dtype)
    u = randn(B, T, HV, V).to(dtype)
    row = torch.arange(T, device="cuda").view(T, 1) % C
    aqk = (randn(B, T, HV, C) * 0.2 * (row >= torch.arange(C, device="cuda"))[None, :, None, :]).to(dtype)
    h0 = randn(B, HV, K, V)
    return qg, w, kg, u, aqk, g2, h0


def reference(qg, w, kg, u, aqk, g2, h0, scale):
    """The recurrence in fp64 with the kernel's roundings of h and v' to the io dtype; o is left unrounded."""
    B, T, HV, K = qg.shape
    io, h = qg.dtype, h0.double()
    out = torch.empty(B, T, HV, u.shape[-1], device="cuda", dtype=torch.float64)
    for s in range(0, T, C):
        e = min(s + C, T)
        x = [t[:, s:e].transpose(1, 2).double() for t in (qg, w, kg, u, aqk)]
        hb = h.float().to(io).double()
        v = (x[3] - x[1] @ hb).float().to(io).double()
        out[:, s:e] = (scale * (x[0] @ hb) + x[4][..., : e - s] @ v).transpose(1, 2)
        h = g2[:, e - 1].double().exp2().unsqueeze(-1) * h + x[2].transpose(-1, -2) @ v
    return out, h


def main():
    p = argparse.ArgumentParser()
    p.add_argument("so")
    p.add_argument("--K", type=int, default=128)
    p.add_argument("--V", type=int, default=128)
    p.add_argument("--dtype", default="bfloat16")
    p.add_argument("--no-h0", action="store_true")
    p.add_argument("--no-ht", action="store_true")
    p.add_argument("--time", action="store_true")
    p.add_argument("--cases", default="all", choices=["small", "all", "none"])
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--shapes", default=",".join(TIMED), help="names of the shapes to time, by comma")
    a = p.parse_args()
    fn = tvm_ffi.load_module(a.so)["kda_state"]
    dtype = getattr(torch, a.dtype)
    limit = 4e-3 if dtype == torch.bfloat16 else 6e-4
    name, bad = "/".join(a.so.split("/")[-2:]), False

    def call(x, o, ht, scale):
        qg, w, kg, u, aqk, g2, h0 = x
        fn(qg, w, kg, u, aqk, g2, None if a.no_h0 else h0, o, None if a.no_ht else ht, scale)

    def outputs(B, T, HV):
        o = torch.full((B, T, HV, a.V), float("nan"), device="cuda", dtype=dtype)
        return o, torch.full((B, HV, a.K, a.V), float("nan"), device="cuda")

    for B, T, HV in {"none": [], "small": SMALL, "all": SMALL + LARGE}[a.cases]:
        x = inputs(B, T, HV, a.K, a.V, dtype, seed=T + HV)
        scale = a.K**-0.5
        o, ht = outputs(B, T, HV)
        call(x, o, ht, scale)
        torch.cuda.synchronize()
        want, state = reference(*x[:6], torch.zeros_like(x[6]) if a.no_h0 else x[6], scale)
        norm = torch.linalg.vector_norm
        diff = norm(o.double() - want, dim=(0, 2, 3)) / norm(want, dim=(0, 2, 3))
        err = ((o.double() - want).norm() / want.norm()).item()
        err_h = 0.0 if a.no_ht else ((ht.double() - state).norm() / state.norm()).item()
        o2, ht2 = outputs(B, T, HV)
        call(x, o2, ht2, scale)
        torch.cuda.synchronize()
        same = torch.equal(o, o2) and (a.no_ht or torch.equal(ht, ht2))
        ok = err < limit and err_h < limit and same
        bad |= not ok
        print(f"{name} B{B} T{T} HV{HV}: o {err:.2e} worst token {diff.max().item():.2e} ht {err_h:.2e} "
              f"rerun {'same' if same else 'DIFFERS'} {'ok' if ok else 'FAIL'}", flush=True)

    if a.time:
        flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        for case in a.shapes.split(","):
            B, T, HV = TIMED[case]
            x = inputs(B, T, HV, a.K, a.V, dtype)
            o, ht = outputs(B, T, HV)
            times = []
            for _ in range(a.rounds + 3):
                flush.zero_()
                t0, t1 = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                t0.record()
                call(x, o, ht, 0.1)
                t1.record()
                torch.cuda.synchronize()
                times.append(t0.elapsed_time(t1))
            times = sorted(times[3:])
            moved = B * T * HV * 2 * (3 * a.K + 2 * a.V + C)
            med = statistics.median(times)
            print(f"{name} {case}: {med:.4f} ms (min {times[0]:.4f}, max {times[-1]:.4f}), "
                  f"{moved / med / 1e9:.2f} TB/s, floor {moved / 4.26e9:.4f}", flush=True)
            del x, o, ht
    sys.exit(bad)


if __name__ == "__main__":
    main()
