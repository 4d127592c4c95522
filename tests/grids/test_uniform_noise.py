"""Noise that is computed again from its seed: the same bits however it is asked for, uniform, and unlike any other."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from voxelfield.grids import uniform_noise
from voxelfield.grids.uniform_noise import UniformNoise, draw_seed

NOISE = UniformNoise(seed=0x0123456789ABCDEF, bound=0.5)


def written(noise: UniformNoise, count: int, start: int = 0, device: torch.device | str = "cpu") -> torch.Tensor:
    out = torch.empty(count, device=device)
    noise.write(out, start)
    return out.cpu()


def reference(noise: UniformNoise, index: int) -> float:
    """The same number from Python's integers."""

    def mix(word: int) -> int:
        word = ((word ^ (word >> 16)) * 0x7FEB352D) % 2**32
        word = ((word ^ (word >> 15)) * 0x846CA68B) % 2**32
        return word ^ (word >> 16)

    high, low = divmod(noise.seed, 2**32)
    word = mix((index % 2**32) ^ mix(low ^ mix(high ^ mix(index // 2**32))))
    signed = word - 2**32 if word >= 2**31 else word
    return (signed >> 8) * 2**-23 * noise.bound


@pytest.mark.parametrize("start", [0, 1, 70_001, 2**31 - 3, 2**32 - 3, 5 * 2**32 + 7])
def test_each_number_is_that_of_its_index(device, start):
    assert written(NOISE, 8, start, device).tolist() == [reference(NOISE, start + i) for i in range(8)]


@pytest.mark.parametrize("chunk", [1, 7, 1024, 1 << 20])
def test_chunks_do_not_show(device, monkeypatch, chunk):
    start = 2**31 - 1500  # within the range, chunks are cut short
    whole = written(NOISE, 3000, start, device)
    for name in ("_CPU_CHUNK", "_DEVICE_CHUNK"):
        monkeypatch.setattr(uniform_noise, name, chunk)
    assert torch.equal(written(NOISE, 3000, start, device), whole)
    parts = [written(NOISE, 1000, start + offset, device) for offset in (0, 1000, 2000)]
    assert torch.equal(torch.cat(parts), whole)
    NOISE.fill(filled := torch.empty(10, 20, 15, device=device))
    assert torch.equal(filled.cpu().view(-1), written(NOISE, 3000))
    assert NOISE.fills(filled)


def test_numbers_are_uniform_and_do_not_depend_on_their_neighbours(device):
    count = 1 << 20
    x = written(NOISE, count, device=device).double() / NOISE.bound
    assert x.min() >= -1
    assert x.max() < 1
    deviation = 1 / math.sqrt(count)
    assert abs(x.mean()) < 5 * deviation * math.sqrt(1 / 3)
    assert abs(x.square().mean() - 1 / 3) < 5 * deviation * math.sqrt(4 / 45)
    shares = torch.histc(x, bins=64, min=-1, max=1) / count
    assert (shares - 1 / 64).abs().max() < 6 * deviation / math.sqrt(64)
    for shift in (1, 2, 3, 4, 64, 4096):
        assert abs((x[shift:] * x[:-shift]).mean()) < 5 * deviation / 3, shift


@pytest.mark.parametrize("seed", [0, NOISE.seed ^ 1, NOISE.seed ^ (1 << 62)])
def test_seeds_give_unrelated_numbers(seed):
    first, second = (written(noise, 1 << 16).double() for noise in (NOISE, UniformNoise(seed, NOISE.bound)))
    assert abs((first * second).mean()) < 5 * NOISE.bound**2 / 3 / 2**8


def test_a_tensor_that_differs_in_one_element_is_told(device):
    tensor = torch.empty(40, 50, 60, device=device)
    NOISE.fill(tensor)
    assert NOISE.fills(tensor)
    tensor[-1, -1, -1] += 1e-3
    assert not NOISE.fills(tensor)


def test_order_is_that_of_the_indices_whatever_the_strides(device):
    turned = torch.empty(6, 5, 4, device=device).permute(2, 0, 1)
    NOISE.fill(turned)
    assert torch.equal(turned.cpu().reshape(-1), written(NOISE, 120))
    assert NOISE.fills(turned)


def test_no_bound_gives_positive_zeros(device):
    assert written(UniformNoise(seed=3, bound=0.0), 1000, device=device).view(torch.int32).any().logical_not()


def test_a_seed_follows_from_torchs_generator():
    def draw(seed: int) -> int | None:
        torch.manual_seed(seed)
        return draw_seed(torch.empty(1))

    assert draw(0) == draw(0) != draw(1)


def test_nothing_is_drawn_for_a_tensor_without_values():
    before = torch.get_rng_state()
    assert draw_seed(torch.empty(1, device="meta")) is None
    with FakeTensorMode():
        assert draw_seed(torch.empty(1)) is None
    assert torch.equal(torch.get_rng_state(), before)
