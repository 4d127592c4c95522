"""Every public op: right arguments give the reference's values, broken ones a refusal, extreme ones nothing worse."""

from __future__ import annotations

import inspect

import pytest
from fuzz_distances import DISTANCES
from fuzz_marching import MARCHING
from fuzz_property import Subject, try_broken, try_extreme, try_right
from fuzz_rays import RAYS
from fuzz_sampling import SAMPLING
from fuzz_values import EXTREMES, broken_arguments, poked
from hypothesis import given
from hypothesis import strategies as st

from voxelfield import ops

OPS: dict[str, Subject] = {**SAMPLING, **RAYS, **MARCHING, **DISTANCES}

every_op = pytest.mark.parametrize("name", OPS)


def test_every_public_op_is_fuzzed():
    public = {name for name in ops.__all__ if inspect.isfunction(getattr(ops, name))}
    assert public == set(OPS), "a public op and its strategy in tests/fuzz come and go together"


@every_op
@given(data=st.data())
def test_right_arguments(name, data):
    subject = OPS[name]
    try_right(name, subject, data.draw(subject.arguments), data.draw(st.booleans()))


@every_op
@given(data=st.data())
def test_broken_arguments(name, data):
    subject = OPS[name]
    try_broken(name, subject, data.draw(broken_arguments(data.draw(subject.arguments))))


@every_op
@given(data=st.data())
def test_extreme_values(name, data):
    subject = OPS[name]
    try_extreme(name, subject, data.draw(poked(data.draw(subject.arguments), subject.extreme, EXTREMES)))
