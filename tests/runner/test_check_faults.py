"""Each planted fault is caught by the property made for it, with a message that says what is wrong."""

from __future__ import annotations

import re

import pytest

from ladder import check, checks
from ladder.check import Options, Run
from ladder.judge import Judge

EMPTY = "    o = torch.empty(p.B, p.T, p.HV, p.V, dtype=io, device=x[\"q\"].device)\n"
WRITE = "        o[:, rows] = out.transpose(1, 2).to(io)\n"
RETURN = '    return {"o": o, "final_state": S}\n'
UNITS = "UNITS = ()\n"
OP = "chunk_kda = kda_op(STAGES, unsupported)\n"
AQK = '        Aqk = torch.einsum("bhik,bhijk,bhjk->bhij", q, decay, k)\n'
BODY = "    io = p.io_dtype\n"
WRAPPED = "_op = kda_op(STAGES, unsupported)\n"

FAULTS = {
    "drops-lower-left": ((AQK, AQK + "        Aqk[..., Aqk.shape[-2] // 2 :, : Aqk.shape[-1] // 2] = 0\n"),
                         "oracle", r"o: row error .* exceeds the budget"),
    "stale-buffer": ((EMPTY, "    o = KEPT.setdefault((p.B, p.T, p.HV, p.V, io), torch.empty(p.B, p.T, p.HV, p.V, dtype=io))\n"),
                     "first output survives", r"o: both calls returned the same buffer"),
    "future-token": ((BODY, BODY + '    x = {**x, "v": x["v"] + 0.25 * x["v"].roll(-1, 1)}\n'),
                     "causality", r"reads future tokens: changing only tokens \d+ onward changes o before token"),
    "last-row": ((WRITE, "        n = out.shape[2] - (start + CHUNK >= p.T)\n"
                         "        o[:, start : start + n] = out[:, :, :n].transpose(1, 2).to(io)\n"),
                 "every row written", r"o: \d+ of \d+ rows still hold the poison .* first at .* = \(0, 127, 0\)"),
    "cached-by-shape": ((RETURN, "    key = (p.B, p.T, p.V, io)\n    if key not in KEPT:\n        KEPT[key] = (o, S)\n"
                                 "    o, S = (t.clone() for t in KEPT[key])\n" + RETURN),
                        "first output survives", r"returned the first call's values"),
    "cached-by-address": ((RETURN, "    key = (x['q'].data_ptr(), p.T)\n    KEPT[key] = KEPT.get(key, (o, S))\n"
                                   "    o, S = (t.clone() for t in KEPT[key])\n" + RETURN),
                          "reused input memory", r"cached by address"),
    "previous-answer": ((RETURN, "    KEPT['now'] = (o, S)\n    o, S = KEPT.get('before', (o, S))\n"
                                 "    KEPT['before'] = KEPT['now']\n" + RETURN),
                        "first output survives", r"returned the first call's values"),
    "wrong-state": ((RETURN, '    return {"o": o, "final_state": S * 1.05}\n'), "oracle", r"final_state: row error"),
    "one-wrong-row": ((RETURN, "    o[-1, 63, -1] *= 1.5\n" + RETURN), "oracle", r"o: row error .* token 63"),
    "zeros-for-skipped": ((RETURN, "    o[:, -1] = 0\n" + RETURN), "oracle", r"o: row error .* token (63|127)"),
    "nan-for-skipped": ((RETURN, "    o[:, -1] = torch.nan\n" + RETURN), "oracle", r"o: NaN or Inf in \d+ of \d+ rows"),
    "mutates-input": ((BODY, BODY + '    x["k"].mul_(1.0009765625 * 1.01)\n'), "inputs untouched", r"writes into the caller's k"),
    "mutates-state": (("    S = operands.state.clone()\n", "    S = operands.state.clone()\n    if p.initial_state:\n"
                       '        x["initial_state"].zero_()\n'), "inputs untouched", r"writes into the caller's initial_state"),
    "last-bit-noise": ((RETURN, "    o.view(torch.int16)[0, 9, 0, 3] ^= torch.randint(2, ()).short()\n" + RETURN),
                       "reruns bitwise equal", r"o of rerun \d+ on the same inputs: 1 of \d+ elements differ \(first at \(0, 9, 0, 3\)"),
    "leaks": ((BODY, BODY + '    KEPT.setdefault("leak", []).append(torch.ones(1 << 18))\n'),
              "memory flat", r"leaks (0\.9|1\.)\d* MiB of host memory a call"),
    "matmul-precision": ((BODY, BODY + "    torch.set_float32_matmul_precision('medium')\n"),
                      "global state", r"changes .*(allow_tf32 from False to True|matmul precision from highest to medium)"),
    "wrong-dtype": ((RETURN, '    return {"o": o.float(), "final_state": S}\n'), "oracle", r"o: returned .* torch.float32 .* accepted"),
    "lazy": ((OP, WRAPPED + "class Later(torch.Tensor):\n    pass\n\n\ndef chunk_kda(**kw):\n    o, S = _op(**kw)\n"
                  "    return o.as_subclass(Later), S\n"), "oracle", r"o: returned a Later, accepted: a plain torch.Tensor"),
    "ignores-cu-seqlens": ((OP, WRAPPED + "\n\ndef chunk_kda(*, cu_seqlens=None, **kw):\n    return _op(**kw)\n"),
                           "refusals", r"cu_seqlens: accepted and ignored"),
    "state-not-handed-over": (("    S = operands.state.clone()\n", "    S = torch.zeros_like(operands.state)\n"),
                              "two halves", r"halves joined at token 64: .*row error"),
    "dtype-missing-from-key": ((BODY, '    io = KEPT.setdefault((p.K, p.V), p.io_dtype)\n'),
                               "alternating shapes and dtypes", r"o: returned .* torch.bfloat16 .* accepted: .* torch.float16"),
    "crash": ((BODY, BODY + "    import os; os.abort()\n"), "oracle", r"process died \(killed by SIGABRT\)"),
    "hang": ((BODY, BODY + "    while True: pass\n"), "oracle", r"hangs: no answer within 3 s"),
    "raises": ((BODY, BODY + "    raise RuntimeError('no such tile')\n"), "oracle", r"RuntimeError: no such tile"),
}  # fmt: skip


def outcomes(ladder, number, properties=(), **options):
    run = Run(ladder, [number], Options(properties=properties, device="cpu", seed=7, **options))
    return run.execute()


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(forge, fault):
    edit, prop, message = FAULTS[fault]
    number = forge.rung(fault, edit, (UNITS, UNITS + "KEPT = {}\n"))
    limits = {"time_limit_s": 3.0 if fault == "hang" else 60.0}
    rows = outcomes(forge.ladder(), number, [prop], cases=["tiny"], regimes=["slow"], forms=["pre"], **limits)
    failed = [row for row in rows if row["outcome"] == "failed"]
    assert failed, rows
    assert re.search(message, failed[0]["reason"]), failed[0]["reason"]


def test_correct_rung_passes_whatever_can_run_here(forge):
    number = forge.rung("right")
    rows = outcomes(forge.ladder(), number)
    assert [row for row in rows if row["outcome"] == "failed"] == []
    not_run = {row["property"] for row in rows if row["outcome"] == "not run"}
    assert not_run == {"second stream", "two streams at once", "second device", "CUDA graph", "kernels launched", "emulated: no findings"}
    assert all(row["reason"] for row in rows if row["outcome"] == "not run")
    passed = {row["property"] for row in rows if row["outcome"] == "passed"}
    assert passed == set(checks.NAMES) - not_run
    assert sum(row["property"] == "oracle" for row in rows) == 5  # tiny: 2 regimes x 2 forms, short: one


def test_crash_spares_the_next_property(forge):
    """A crash at fp16 only: the properties before and after it are decided."""
    number = forge.rung("half-crash", (BODY, BODY + "    if io == torch.float16: import os; os.abort()\n"))
    rows = outcomes(forge.ladder(), number, ["alternating shapes and dtypes", "refusals", "causality"])
    assert {r["property"]: r["outcome"] for r in rows} == {
        "alternating shapes and dtypes": "failed", "refusals": "passed", "causality": "passed"}  # fmt: skip


@pytest.mark.parametrize(("prop", "call"), [("oracle", 1), ("two threads at once", 3), ("hostile: values", 2)])
def test_a_full_gpu_is_waited_for(forge, prop, call):
    """Once, at that call, there is no memory: no verdict about the rung."""
    starved = "    KEPT[0] = KEPT.get(0, 0) + 1\n    if KEPT[0] == %d: raise torch.OutOfMemoryError('CUDA out of memory')\n" % call
    number = forge.rung("squeezed", (BODY, BODY + starved), (UNITS, UNITS + "KEPT = {}\n"))
    rows = outcomes(forge.ladder(), number, [prop], cases=["tiny"], regimes=["slow"], forms=["pre"])
    assert [(row["outcome"], row["reason"][:20]) for row in rows if row["outcome"] != "passed"] == []


def test_memory_hog_is_stopped(forge):
    number = forge.rung("hog", (BODY, BODY + "    hog = torch.ones(1 << 29)\n    import time; time.sleep(5)\n"))
    rows = outcomes(forge.ladder(), number, ["oracle"], cases=["short"], memory_limit=1 << 30)
    assert re.search(r"uses \d\.\d GiB of memory, accepted: 1.0 GiB", rows[0]["reason"])


def test_notes_that_do_not_tell_the_difference(forge):
    first = forge.rung("one")
    second = forge.rung("two", (UNITS, UNITS + "# changed\n"), parent=first)
    (forge.root / "ideas" / "002-two" / "extra.py").write_text("# not in the notes\n")
    rows = outcomes(forge.ladder(), second, ["notes"])
    assert rows[0]["outcome"] == "failed" and "extra.py" in rows[0]["reason"]


def test_a_seed_replays_a_failure(forge):
    number = forge.rung("wrong", (RETURN, '    return {"o": o * 2, "final_state": S}\n'))
    reasons = [Run(forge.ladder(), [number], Options(properties=["oracle"], cases=["short"], device="cpu", seed=seed)).execute()[0]["reason"]
               for seed in (4, 4, 5)]  # fmt: skip
    assert reasons[0] == reasons[1] != reasons[2]


def test_references_are_computed_once_for_all_rungs(forge, monkeypatch):
    made = []

    class Watched(Judge):
        def __init__(self, device):
            super().__init__(device)
            made.append(self)

    monkeypatch.setattr(check, "Judge", Watched)
    first = forge.rung("one")
    forge.rung("two", parent=first)
    rows = Run(forge.ladder(), [1, 2], Options(properties=["oracle"], cases=["tiny"], device="cpu", seed=4)).execute()
    assert len(rows) == 8 and made[0].computed == 4  # two regimes, two forms, two rungs
