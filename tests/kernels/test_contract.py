"""The contract: what is bound, what is refused and in which words, and that a call never runs something else."""

import gc
import weakref

import pytest
import torch

from kernels.kda import inputs
from kernels.kda.cases import Case
from kernels.kda.contract import Accepted, ContractError, Problem, Stage, Unsupported, dense, kda_op

CASE = Case("t", B=1, T=70, H=2, HV=4, K=64, V=32, initial_state=True)


def recording_op(unsupported=lambda p: None):
    seen: list[Problem] = []

    def run(p, x):
        seen.append(p)
        return {"o": torch.zeros_like(x["v"]), "final_state": torch.zeros(p.B, p.HV, p.K, p.V)}

    return kda_op((Stage("all", (), run),), unsupported), seen


@pytest.fixture
def call():
    return inputs.make(CASE, "strong", "prod", seed=1).call()


def test_binds_the_problem(call):
    op, seen = recording_op()
    op(**call)
    p = seen[0]
    assert (p.B, p.T, p.H, p.HV, p.K, p.V, p.NT) == (1, 70, 2, 4, 64, 32, 2)
    assert (p.gate, p.lower_bound, p.l2norm, p.beta_sigmoid, p.initial_state) == ("safe", -5.0, True, True, True)
    assert p.scale == 64**-0.5 and p.io_dtype == torch.bfloat16 and not p.loose
    call["q"] = call["q"].transpose(1, 2).contiguous().transpose(1, 2)
    op(**call, scale=0.5)
    assert "q" in seen[1].loose and seen[1].scale == 0.5


def test_calls_alike_pose_the_same_problem_and_no_others_do(call):
    """A rung keeps its plans under the problem, so anything that a compiled kernel depends on makes it another one."""
    op, seen = recording_op()
    op(**call)
    op(**{name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in call.items()})
    assert seen[1] is seen[0]
    v, q = call["v"], call["q"]
    shifted = torch.cat([v.flatten(), v.flatten()[:1]])[1:].view(v.shape)
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    others = [{"v": shifted}, {"q": strided}, {"scale": 0.5}, {"q": q.half(), "k": call["k"].half(), "v": v.half()}, {"initial_state": None}]
    for other in others:
        op(**call | other)
    assert len(set(seen[1:])) == 1 + len(others)
    assert [set(p.loose) for p in seen[2:4]] == [{"v"}, {"q"}]


def test_only_loose_tensors_are_copied(call):
    op, seen = recording_op()
    call["q"] = call["q"].transpose(1, 2).contiguous().transpose(1, 2)
    op(**call)
    q, k, h0, missing = dense(seen[0], call | {"nothing": None}, "q", "k", "initial_state", "nothing")
    assert q.is_contiguous() and torch.equal(q, call["q"]) and missing is None
    assert k is call["k"] and h0 is call["initial_state"]


def test_a_problem_holds_no_tensor(call):
    op, seen = recording_op()
    op(**call)
    seen.clear()
    kept = weakref.ref(call["q"])
    del call["q"]
    gc.collect()
    assert kept() is None


def test_final_state_is_none_unless_asked(call):
    op, _ = recording_op()
    assert op(**call)[1] is not None
    assert op(**call | {"output_final_state": False})[1] is None


@pytest.mark.parametrize(("name", "value"), [
    ("cu_seqlens", torch.tensor([0, 70])), ("state_v_first", True), ("allow_neg_eigval", True), ("cp_context", object()),
    ("disable_recompute", True), ("return_intermediate_states", True), ("use_graph", True), ("a_new_flag", 3),
])  # fmt: skip
def test_flags_that_no_rung_implements_are_refused_by_name(call, name, value):
    op, seen = recording_op()
    with pytest.raises(Unsupported, match=name):
        op(**call, **{name: value})
    assert not seen
    op(**call, **{name: None})


def test_tensors_that_require_grad_are_refused_by_name(call):
    op, seen = recording_op()
    op(**call)
    call["k"].requires_grad_()
    with pytest.raises(Unsupported, match="^k: .*requires grad"):
        op(**call)
    with torch.no_grad():
        op(**call)
    with pytest.raises(Unsupported, match="^k: .*requires grad"):  # the last call's tensors, which were accepted without grad
        op(**call)
    assert len(seen) == 2


def test_a_rungs_own_reason_reaches_the_caller(call):
    op, seen = recording_op(lambda p: f"v: given V = {p.V}, accepted: a multiple of 64")
    for _ in range(2):
        with pytest.raises(Unsupported, match="multiple of 64"):
            op(**call)
    assert not seen


BAD = {
    "q": [lambda t: t.float(), lambda t: t[0]], "k": [lambda t: t[:, :-1], lambda t: t.half()],
    "v": [lambda t: t[:, :, :3]], "g": [lambda t: t[..., :-1], lambda t: t.long()], "beta": [lambda t: t[..., None]],
    "initial_state": [lambda t: t.transpose(-1, -2), lambda t: t.bfloat16()],
    "A_log": [lambda t: t[:-1], lambda t: None], "dt_bias": [lambda t: t[:-1]],
}  # fmt: skip


@pytest.mark.parametrize(("name", "index"), [(n, i) for n, changes in BAD.items() for i in range(len(changes))])
def test_malformed_arguments_get_one_line_naming_them(call, name, index):
    op, seen = recording_op()
    op(**call)  # a good call of almost the same signature must not open the door
    call[name] = BAD[name][index](call[name])
    with pytest.raises(ContractError, match=rf"^{name}: given .*, accepted: .*$") as error:
        op(**call)
    assert "\n" not in str(error.value) and len(seen) == 1


@pytest.mark.parametrize(("change", "name"), [
    ({"lower_bound": -6.0}, "lower_bound"), ({"lower_bound": None}, "lower_bound"), ({"safe_gate": False}, "lower_bound"),
    ({"use_gate_in_kernel": False}, "A_log"),
])  # fmt: skip
def test_gate_flags_that_contradict_each_other(call, change, name):
    op, _ = recording_op()
    with pytest.raises(ContractError, match=f"^{name}: "):
        op(**call | change)


def test_signatures_remembered_are_bounded(call):
    op, seen = recording_op()
    for scale in range(600):
        op(**call, scale=float(scale + 1))
    assert len(seen) == 600 and seen[-1].scale == 600.0
    accepted = next(c.cell_contents for c in op.__closure__ if isinstance(c.cell_contents, Accepted))
    assert len(accepted.problems) <= 256 and len(accepted.latest) <= 256
