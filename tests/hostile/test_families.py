"""Every family passes for a right rung, and each catches the fault that it is made for (public ones, most of them)."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from kernels.kda import hostile
from ladder import checks
from ladder.check import Options, Run
from ladder.manifest import ManifestError
from tests.faults.conftest import ENV

FAMILIES = [name for name in checks.ALL if name.startswith("hostile: ")]
CUMSUM = "        G = g.clamp_min(-104.0).cumsum(2)  # exp is 0 in fp32 from there on; sums of -inf would give NaN\n"
DECAY = "        decay = pairwise_decay(G)\n"
SOLVE = "        v_new = torch.linalg.solve_triangular(eye + Akk, corrected, upper=False, unitriangular=True)\n"
STATE = "        S = G[:, :, -1].exp()[..., None] * S"
BODY = "    io = p.io_dtype\n"
OP = "chunk_kda = kda_op(STAGES, unsupported)\n"
PREPARE = "    operands = prepare(\n        x[\"q\"], x[\"k\"], x[\"v\"], x[\"g\"], x[\"beta\"]"
ANCHOR = ("        n = G[:, :, G.shape[2] // 2, None]\n        up, down = (G - n).exp(), (n - G).exp()\n"
          "        decay = (up[:, :, :, None] * down[:, :, None])"
          " * torch.ones(G.shape[2], G.shape[2]).tril()[..., None]\n")
FAULTS = {
    # name: (edits, family, what its failure says)
    "one anchor per chunk": ([(DECAY, ANCHOR)], "gates", r"`T=130 gate=-2.5: o: NaN or Inf"),
    "exponential of the cumsum": ([(DECAY, "        decay = (G.exp()[:, :, :, None] / G.exp()[:, :, None]) * "
                                           "torch.ones(G.shape[2], G.shape[2]).tril()[..., None]\n")],
                                  "gates", r"`(gate=-5|safe=no gate=uneven:-8)`?: .*NaN or Inf|NaN or Inf"),
    "sums of -inf": ([(CUMSUM, "        G = g.cumsum(2)\n")], "gates", r"gate=inf@20: o: NaN or Inf in \d+ of \d+ rows"),
    "inverse by powers": ([(SOLVE, "        N, inverse = -Akk.bfloat16().float(), eye\n        for _ in range(6):\n"
                                   "            inverse = (inverse @ (eye + N)).bfloat16().float()\n            N = N @ N\n"
                                   "        v_new = inverse @ corrected\n")],
                          "keys", r"keys=same.*(row error|NaN or Inf)"),
    "last decay from row 63": ([(STATE, "        if p.T % CHUNK and start + CHUNK > p.T:\n            G = G.clone()\n"
                                        "            G[:, :, -1] -= 0.3\n" + STATE)], "sizes", r"final_state: row error"),
    "heads in another order": ([(BODY, BODY + "    x = {**x, 'g': x['g'].flip(2), 'beta': x['beta'].flip(2), 'v': x['v'].flip(2)} "
                                              "if p.HV == 3 * p.H else x\n")], "sizes", r"HV=6.*row error"),
    "strides ignored": ([(BODY, BODY + "    x = {**x, 'v': x['v'].as_strided(x['v'].shape, torch.empty(x['v'].shape).stride())}\n")],
                        "views", r"layout=(transposed|strided|sliced).*(row error|NaN)"),
    "state strides ignored": ([(BODY, BODY + "    x = {**x, 'initial_state': None if x['initial_state'] is None else x['initial_state']"
                                             ".as_strided(x['initial_state'].shape, torch.empty(x['initial_state'].shape).stride())}\n")],
                              "views", r"layout=(transposed|strided|sliced).*(row error|NaN)"),
    "fp16 gate read as fp32": ([(BODY, BODY + "    x = {**x, 'g': x['g'].float() * (0.9 if x['g'].dtype == torch.float16 else 1)}\n")],
                               "dtypes", r"gtype=float16.*row error"),
    "NaN crosses heads": ([(BODY, BODY + "    x = {**x, 'v': x['v'] + 0 * x['v'].sum(2, keepdim=True)}\n")],
                          "NaN", r"NaN in one token reaches another head"),
    "NaN goes back in time": ([(BODY, BODY + "    x = {**x, 'v': x['v'] + 0 * x['v'].sum(1, keepdim=True)}\n")],
                              "NaN", r"NaN in one token reaches an earlier chunk"),
    "NaN is swallowed": ([(BODY, BODY + "    x = {**x, 'v': x['v'].nan_to_num()}\n")],
                         "NaN", r"nan=v@70.*NaN in a token's v does not show"),
    "state written V x K": ([("    return {\"o\": o, \"final_state\": S}\n",
                              "    return {\"o\": o, \"final_state\": S.transpose(2, 3).reshape(S.shape)}\n")],
                            "splits", r"final_state: row error"),
    "cut only at chunks": ([("    S = operands.state.clone()\n", "    S = operands.state.clone() * (1 if p.T % CHUNK in (0, 8) else 0.9)\n")],
                           "splits", r"cut at token 1: "),
    "beta beyond 1": ([(BODY, BODY + "    x = {**x, 'beta': x['beta'] if p.beta_sigmoid else x['beta'].clamp(max=1)}\n")],
                      "keys", r"beta=2.*row error"),
    "values beyond fp16": ([(BODY, BODY + "    x = {**x, 'v': x['v'].half().to(io)}\n")], "values", r"values=2\^100.*NaN or Inf"),
    "refuses late": ([(OP, "from kernels.kda.contract import Unsupported\n_op = kda_op(STAGES, unsupported)\n\n\ndef chunk_kda(**kw):\n"
                           "    out = _op(**kw)\n    if out[0].isnan().any() or kw['k'].abs().max() == 0:\n"
                           "        raise Unsupported('k: zero')\n    return out\n")],
                     "keys", r"refused by its values \(its shapes are accepted\): k: zero"),
    "accepts anything": ([(OP, "_op = kda_op(STAGES, unsupported)\n\n\ndef chunk_kda(**kw):\n    kw['beta'] = kw['beta'].float()\n"
                               "    return _op(**kw)\n")], "malformed calls", r"malformed calls are not refused: .*beta of integers"),
}  # fmt: skip


def rows_of(ladder, **options):
    return Run(ladder, [1], Options(device="cpu", seed=7, **options)).execute()


def test_right_rung_passes_every_family(forge):
    forge.rung("right")
    rows = rows_of(forge.ladder(), properties=FAMILIES)
    assert [row["reason"] for row in rows if row["outcome"] != "passed"] == []
    counts = {row["property"].removeprefix("hostile: "): row["hostile"] for row in rows}
    for name, (core, more) in hostile.FAMILIES.items():
        assert counts[name] == {"passed": len(core + more), "refused": 0, "inherited": 0, "failed": 0}
    assert counts["malformed calls"]["refused"] > 100 and counts["malformed calls"]["passed"] == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(forge, fault):
    edits, family, message = FAULTS[fault]
    forge.rung("faulty", *edits)
    (row,) = rows_of(forge.ladder(), properties=[f"hostile: {family}"])
    assert row["outcome"] == "failed" and row["hostile"]["failed"] > 0, row
    assert re.search(message, row["reason"]), row["reason"]


def test_refusals_are_counted_as_such(forge):
    forge.rung("narrow", ("    return None\n", "    return f'v: given V = {p.V}, accepted: 64' if p.V != 64 else None\n"))
    (row,) = rows_of(forge.ladder(), properties=["hostile: sizes"])
    assert row["outcome"] == "passed" and row["hostile"]["refused"] >= 10 and "refused" in row["reason"]


def test_nothing_is_inherited_by_a_rung_without_flas_stages(forge):
    """Even the fault known of fla fails here: inheriting is not an excuse that a rung can claim."""
    forge.rung("own", (CUMSUM, "        G = g.cumsum(2)\n"))
    (row,) = rows_of(forge.ladder(), hostile=["safe=no gate=inf@20"])
    assert row["outcome"] == "failed" and row["hostile"] == {"passed": 0, "refused": 0, "inherited": 0, "failed": 1}


def test_a_case_is_replayed_from_the_command_line(forge):
    forge.rung("faulty", *FAULTS["sums of -inf"][0])
    args = [sys.executable, "-m", "ladder", "check", "1", "--root", str(forge.root), "--json", "--seed", "7",
            "--hostile", "safe=no gate=inf@20; gate=-5"]  # fmt: skip
    done = subprocess.run(args, env=ENV, capture_output=True, text=True, timeout=300)
    (row,) = json.loads(done.stdout)
    assert done.returncode == 1 and row["property"] == "hostile: given"
    assert row["hostile"] == {"passed": 1, "refused": 0, "inherited": 0, "failed": 1}
    assert row["reason"].startswith("1 of 2 hostile cases fail: `safe=no gate=inf@20: o: NaN or Inf")


def test_a_mistake_in_a_spec_is_one_line(forge):
    forge.rung("right")
    with pytest.raises(ManifestError, match=r"gate: given 'loud', accepted: slow"):
        rows_of(forge.ladder(), hostile=["gate=loud"])
