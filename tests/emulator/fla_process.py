"""Runs fla's chunk_kda forward on the emulator in this process and prints one JSON line per case. Arguments: arch,
case names."""

import json
import sys
import time
import warnings

import torch
import torch.nn.functional as F

CASES = {
    "plain": {},
    "plain_fp16": dict(dtype="float16"),
    "softplus": dict(gate="softplus", prod=True),
    "safe_tail": dict(gate="safe", prod=True, safe=True, T=70),
    "heads": dict(safe=True, HV=2, V=128, T=65, init=False),
    "wide_fp16": dict(dtype="float16", gate="safe", prod=True, safe=True, K=128, V=128, T=100),
    "wide_softplus": dict(gate="softplus", prod=True, K=128, V=64, T=100, B=2, HV=2),
    "wide_plain": dict(K=128, V=128, T=130),
}


def tensors(B=1, T=128, H=1, HV=None, K=64, V=64, dtype="bfloat16", init=True, gate=None, prod=False, safe=False):
    """Arguments for chunk_kda, and the fp64 log gate and beta they stand for."""
    HV, dt = HV or H, getattr(torch, dtype)
    torch.manual_seed(0)
    q, k = torch.randn(B, T, H, K), torch.randn(B, T, H, K)
    if not prod:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    x = dict(q=q.to(dt), k=k.to(dt), v=torch.randn(B, T, HV, V).to(dt), beta=torch.randn(B, T, HV))
    x["beta"] = x["beta"].to(dt) if prod else x["beta"].sigmoid()
    beta = x["beta"].double().sigmoid() if prod else x["beta"].double()
    if gate:
        x.update(g=torch.randn(B, T, HV, K).to(dt), A_log=torch.rand(HV) * 0.2, dt_bias=torch.rand(HV * K) * 0.2)
        a, raw = x["A_log"].double().exp().view(HV, 1), x["g"].double() + x["dt_bias"].double().view(HV, K)
        g = -5 * torch.sigmoid(a * raw) if gate == "safe" else -a * F.softplus(raw)
        x.update(use_gate_in_kernel=True, **({"lower_bound": -5.0} if gate == "safe" else {}))
    else:
        x["g"] = -torch.rand(B, T, HV, K) * (5 if safe else 1)
        g = x["g"].double()
    x.update(
        initial_state=torch.randn(B, HV, K, V) if init else None,
        output_final_state=True,
        safe_gate=safe,
        use_qk_l2norm_in_kernel=prod,
        use_beta_sigmoid_in_kernel=prod,
    )
    return x, g, beta


def reference(x, g, beta):
    """The recurrence in fp64, token by token."""
    q, k, v = x["q"].double(), x["k"].double(), x["v"].double()
    if x["use_qk_l2norm_in_kernel"]:
        q, k = (t / (t.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    B, T, HV, V = v.shape
    q, k = (t.repeat_interleave(HV // t.shape[2], 2) for t in (q, k))
    S = (
        torch.zeros(B, HV, q.shape[-1], V, dtype=torch.double)
        if x["initial_state"] is None
        else x["initial_state"].double()
    )
    o = []
    for t in range(T):
        S = S * g[:, t].exp()[..., None]
        u = beta[:, t][..., None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + k[:, t][..., None] * u[..., None, :]
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) * q.shape[-1] ** -0.5)
    return torch.stack(o, 1), S


def row_error(a, b):
    """Largest row error, relative to the row's norm or the mean norm, whichever is larger."""
    n = b.norm(dim=-1)
    return ((a.double() - b).norm(dim=-1) / n.clamp(min=n.mean())).max().item()


def main(arch, names):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from emulator.triton_driver import activate

    device = activate(arch)
    from fla.ops.kda import chunk_kda

    emulated = [0.0]
    launch = device.launch

    def timed(*args, **kw):
        start = time.process_time()
        launch(*args, **kw)
        emulated[0] += time.process_time() - start

    device.launch = timed
    for name in names:
        x, g, beta = tensors(**CASES[name])
        emulated[0], first = 0.0, len(device.stats)
        with torch.inference_mode():
            o, state = chunk_kda(**x)
        want_o, want_state = reference(x, g, beta)
        print(
            json.dumps(
                dict(
                    case=name,
                    o=row_error(o, want_o),
                    state=row_error(state, want_state),
                    seconds=emulated[0],
                    kernels=[s["kernel"] for s in device.stats[first:]],
                )
            ),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or list(CASES))
