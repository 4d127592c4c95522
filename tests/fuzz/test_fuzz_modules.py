"""Every public class: right arguments give the reference's values, broken ones a refusal, extreme ones no worse."""

from __future__ import annotations

import pytest
from fuzz_modules import MODULES
from fuzz_property import try_broken, try_extreme, try_right
from fuzz_values import EXTREMES, broken_arguments, poked
from hypothesis import given
from hypothesis import strategies as st

import voxelfield

# In test_fuzz_ops.py, test_fuzz_scenes.py and test_fuzz_trained.py; FieldRenderer takes RenderSettings.
# Rays and render are tried by FieldRenderer; tests/datasets/test_arrays.py breaks the arguments of scene_from_arrays.
ELSEWHERE = {
    "ops",
    "load_scene",
    "scene_from_arrays",
    "Scene",
    "load",
    "load_volume",
    "Session",
    "write_results",
    "__version__",
}
ELSEWHERE |= {"RenderSettings", "Capacity", "Rays", "render", "Model", "Decoder", "Field"}

every_module = pytest.mark.parametrize("name", MODULES)


def test_every_public_name_is_fuzzed():
    assert set(voxelfield.__all__) == MODULES.keys() | ELSEWHERE, "public names and strategies come and go together"


@every_module
@given(data=st.data())
def test_right_arguments(name, data):
    try_right(name, MODULES[name], data.draw(MODULES[name].arguments), False)


@every_module
@given(data=st.data())
def test_broken_arguments(name, data):
    try_broken(name, MODULES[name], data.draw(broken_arguments(data.draw(MODULES[name].arguments))))


@every_module
@given(data=st.data())
def test_extreme_values(name, data):
    """In one of the arguments, or in all that may have them."""
    subject = MODULES[name]
    names = data.draw(st.sampled_from([*([each] for each in subject.extreme), subject.extreme]))
    try_extreme(name, subject, data.draw(poked(data.draw(subject.arguments), names, EXTREMES)))
