"""Tensors without their zeros come back bit for bit."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from voxelfield.foundation.zero_packing import copy_without_zeros, pack_streams, put_back_zeros


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def mostly_zero(device: torch.device, dtype: torch.dtype = torch.float32, shape=(70, 41, 33, 4)) -> torch.Tensor:
    x = torch.zeros(shape, device=device, dtype=dtype)
    x[20:30, 5:9] = torch.randn(10, 4, *shape[2:], device=device).to(dtype)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.uint8, torch.bool], ids=str)
def test_a_tensor_of_zeros_for_the_most_part_takes_little_and_comes_back(device, dtype):
    x = mostly_zero(device, dtype)
    packed = copy_without_zeros(x)
    assert packed["nonzero chunks"].nbytes < 0.1 * x.nbytes
    restored = put_back_zeros(packed)
    assert (restored.shape, restored.dtype, restored.device.type) == (x.shape, x.dtype, "cpu")
    assert torch.equal(bits(restored), bits(x.cpu()))


@pytest.mark.parametrize("special", [-0.0, float("nan"), float("inf"), 1e-45])
@pytest.mark.parametrize("place", [0, 65_000, -1])
def test_no_bit_is_lost(device, special, place):
    x = torch.zeros(300_001, device=device)
    x[place] = special
    packed = copy_without_zeros(x)
    assert packed["nonzero chunks"].nbytes < 1000
    assert torch.equal(bits(put_back_zeros(packed)), bits(x.cpu()))


def test_small_and_full_tensors_are_copied_whole(device):
    for x in (torch.zeros(1000, device=device), torch.rand(500_000, device=device)):
        expected, copied = x.cpu().clone(), copy_without_zeros(x)
        x += 1
        assert torch.equal(copied, expected)
        assert copied.device.type == "cpu"


def test_tensors_of_zeros_alone_and_of_strides(device):
    whole = torch.zeros(512, 512, device=device)
    assert copy_without_zeros(whole)["nonzero chunks"].numel() == 0
    assert torch.equal(put_back_zeros(copy_without_zeros(whole)), whole.cpu())
    turned = mostly_zero(device).permute(3, 1, 0, 2)
    assert torch.equal(put_back_zeros(copy_without_zeros(turned)), turned.cpu())


def test_nesting_is_kept():
    module = nn.Linear(2, 2)
    state = {
        "module": module.state_dict(),
        "list": [mostly_zero("cpu"), (1, "two", None)],
        3: {"x": torch.Size((1, 2))},
    }
    restored = put_back_zeros(copy_without_zeros(state))
    assert type(restored["module"]) is OrderedDict
    assert restored["module"]._metadata == module.state_dict()._metadata
    assert torch.equal(restored["list"][0], state["list"][0])
    assert restored["list"][1] == (1, "two", None)
    assert restored[3] == {"x": torch.Size((1, 2))}


TOO_MANY = torch.full((10**5,), 255, dtype=torch.uint8)


@pytest.mark.parametrize(
    "change",
    [{"shape": (7, 5)}, {"stored": TOO_MANY}, {"nonzero chunks": None}],
    ids=["shape", "stored", "chunks"],
)
def test_what_does_not_fit_is_refused(change):
    packed = copy_without_zeros(mostly_zero("cpu")) | change
    with pytest.raises(ValueError, match="must have chunks that fit its shape"):
        put_back_zeros({"field": packed})


@pytest.mark.parametrize("sizes", [(16, 16), (5, 27), (0, 32), (32,)], ids=str)
@pytest.mark.parametrize("plane", [(64, 64), (61, 5, 37), (1,)], ids=str)
def test_streams_are_packed_as_one_tensor(device, plane, sizes):
    torch.manual_seed(0)
    whole = torch.randn(32, *plane) * (torch.rand(32, *plane[:1], *[1] * (len(plane) - 1)) < 0.3)
    whole = whole.to(device)
    parts = [part.split(3) for part in whole.split(sizes)]
    pieces = [
        (number, some[turn])
        for turn in range(11)
        for number, some in enumerate(parts)
        if turn < len(some) and len(some[turn])
    ]
    packed = pack_streams(iter(pieces), whole.shape, whole.dtype)
    expected = copy_without_zeros(whole)
    assert type(packed) is type(expected)
    if isinstance(packed, dict):
        assert packed.keys() == expected.keys()
        assert all(torch.equal(packed[key], expected[key]) for key in ("nonzero chunks", "rest", "stored"))
    assert torch.equal(put_back_zeros(copy_without_zeros({"grid": packed}))["grid"], whole.cpu())
