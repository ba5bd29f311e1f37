"""The call cache: a plan per key, fresh outputs, and a bound. What makes two calls different is the contract's (test_contract)."""

import pytest
import torch

from _common.cache import Alike, CallCache, Plan, Spec


def plan():
    return Plan(lambda *a: None, (Spec((2, 3), torch.float16),))


def make_counter():
    made = []
    return made, lambda: made.append(1) or plan()


def test_a_plan_is_made_once_for_each_key():
    cache, (made, make) = CallCache(), make_counter()
    assert cache.plan(("a", 1), make) is cache.plan(("a", 1), make)
    cache.plan(("a", 2), make)
    assert len(made) == 2


def test_outputs_are_fresh_at_each_call():
    p = plan()
    (a,), (b,) = p.allocate(torch.empty(0)), p.allocate(torch.empty(0))
    assert a.shape == (2, 3) and a.dtype == torch.float16 and a.data_ptr() != b.data_ptr()


def test_bounded_dropping_the_least_recently_used():
    cache, (made, make) = CallCache(limit=3), make_counter()
    for key in "abc":
        cache.plan(key, make)
    cache.plan("a", make)  # used again: now b is the oldest
    cache.plan("d", make)
    assert len(cache) == 3 and len(made) == 4
    cache.plan("a", make)
    assert len(made) == 4
    cache.plan("b", make)
    assert len(made) == 5


@pytest.mark.parametrize("shape", [(2, 3, 4), (0, 144), (3, 0, 2), (7,), ()])
def test_a_specs_strides_are_row_major(shape):
    assert Spec(shape, torch.int32).strides == torch.empty(shape).stride()


def test_alike_is_of_one_type_dtype_device_shape_layout_and_alignment():
    alike = Alike([torch.zeros(4, 4), torch.zeros(8)])
    assert alike([torch.ones(4, 4), torch.ones(8)])
    others = [
        torch.zeros(4, 4).half(), torch.zeros(4, 4, device="meta"), torch.zeros(4, 5), torch.zeros(2, 8), torch.zeros(4, 4).T,
        torch.zeros(4, 8)[:, :4], torch.zeros(17)[1:].view(4, 4), torch.zeros(4, 4, requires_grad=True), torch.nn.Parameter(torch.zeros(4, 4)),
    ]  # fmt: skip
    for other in others:
        assert not alike([other, torch.zeros(8)])
    assert not Alike([torch.zeros(9)[1:]])([torch.zeros(9)[1:]])  # nothing is said of tensors that are not aligned
    with pytest.raises(TypeError):
        alike([torch.zeros(4, 4)])
