"""The call cache: a plan per key, fresh outputs, and a bound. What makes two calls different is the contract's (test_contract)."""

import torch

from _common.cache import CallCache, Plan, Spec


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
