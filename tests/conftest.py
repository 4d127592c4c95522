"""Fixtures that every test shares."""

from __future__ import annotations

import os

import pytest
import torch

REQUIRE_CUDA = os.environ.get("VOXELFIELD_REQUIRE_CUDA", "") == "1"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that the op has kernels for."""
    return torch.device(request.param)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is None or torch.cuda.is_available():
        return
    if REQUIRE_CUDA:
        pytest.fail("VOXELFIELD_REQUIRE_CUDA=1 but torch finds no CUDA device")
    pytest.skip("needs a CUDA device")
