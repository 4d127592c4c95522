"""grid_sample: what torch.nn.functional.grid_sample gives, by this library's kernels."""

from __future__ import annotations

import itertools
import sys
import types
import unittest
import warnings

import pytest
import torch
from op_testing import DTYPES, OpRecorder, assert_all_match, leaves, saved_for_backward
from reference import sample_separable
from tolerances import arithmetic, assert_matches
from torch.nn import functional as F

from voxelfield.ops import grid_sample

every_option = pytest.mark.parametrize(
    "options",
    [
        (mode, padding, align_corners)
        for mode in ("bilinear", "nearest")
        for padding in ("zeros", "border", "reflection")
        for align_corners in (False, True)
    ],
    ids=str,
)


def make(device, dtype=torch.float64, shape=(2, 3, 4, 5, 6), out=(3, 2, 4)):
    volume = torch.randn(shape, device=device, dtype=dtype)
    where = torch.rand(shape[0], *out, 3, device=device, dtype=arithmetic(dtype)) * 3 - 1.5
    return volume, where


def results(sample, volume, where, options, seed=0):
    inputs = leaves(volume, where)
    value = sample(*inputs, *options)
    torch.manual_seed(seed)
    grad = torch.randn(value.shape, dtype=torch.float64).to(value)
    return value, *torch.autograd.grad(value, inputs, grad)


def of_expanded(function, layers):
    return lambda volume, where: function(volume.expand(layers, *volume.shape[1:]), where, align_corners=False)


def assert_expanded_agrees(volume, where, layers):
    """Fails unless an expanded volume or image gives what it gives with torch; returns the shape of its one sum."""
    expected = results(of_expanded(F.grid_sample, layers), volume, where, ())
    with OpRecorder() as recorder:
        actual = results(of_expanded(grid_sample, layers), volume, where, ())
    assert_all_match(actual, expected, ("value", "d input", "d grid"))
    assert actual[0].is_contiguous()
    (shape,) = recorder.shapes["splat_trilinear" if volume.dim() == 5 else "splat_separable"]
    return shape


@pytest.fixture
def torch_samples(monkeypatch):
    """PyTorch's own samples for grid_sampler_3d. (Its list of ops hides them from most devices.)"""
    if "expecttest" not in sys.modules:
        # A test helper that torch.testing imports for other tests than these.
        helper = types.ModuleType("expecttest")
        helper.TestCase = unittest.TestCase
        monkeypatch.setitem(sys.modules, "expecttest", helper)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    (op,) = (op for op in op_db if op.name == "grid_sampler_3d")
    return lambda device, dtype: op.sample_inputs_func(op, device, dtype, requires_grad=False)


@pytest.mark.sweep
def test_agrees_with_torch_on_its_own_samples(device, torch_samples):
    names = ("bilinear", "nearest"), ("zeros", "border", "reflection")
    # In one test, because importing torch's samples takes longer than using them.
    for dtype in (torch.float32, torch.float64):
        count = 0
        for sample in torch_samples(device, dtype):
            where, mode, padding, align_corners = sample.args
            ours = names[0][mode], names[1][padding], align_corners
            actual = results(grid_sample, sample.input, where, ours)
            expected = results(torch.grid_sampler_3d, sample.input, where, sample.args[1:])
            for a, e, what in zip(actual, expected, ("value", "d input", "d grid"), strict=True):
                # Both sides round; torch's samples have up to 24 voxels along an axis, ten times more points than that.
                tolerance = 256 * torch.finfo(dtype).eps * max(e.abs().max().item(), 1)
                told = f"{what} in {dtype}"
                torch.testing.assert_close(a, e, rtol=0, atol=tolerance, msg=lambda text, told=told: f"{told}: {text}")
            count += 1
        assert count >= 12


@every_option
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_agrees_with_torch(device, dtype, options):
    volume, where = make(device, dtype)
    expected = results(F.grid_sample, volume.double(), where.double(), options)
    assert_all_match(results(grid_sample, volume, where, options), expected, ("value", "d input", "d grid"))


@pytest.mark.covering("dtype options")
@every_option
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("narrow", [False, True])
def test_16_bit_volumes_and_positions(device, dtype, narrow, options):
    volume, where = make(device, dtype)
    if narrow:
        where = where.to(dtype)
    actual = grid_sample(volume, where, *options)
    assert actual.dtype == dtype
    assert_matches(actual, F.grid_sample(volume.double(), where.double(), *options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_channels_last_volume_is_not_copied(device, dtype):
    volume, where = make(device, dtype)
    volume = volume.to(memory_format=torch.channels_last_3d).requires_grad_()
    where.requires_grad_()
    with saved_for_backward() as saved:
        value = grid_sample(volume, where, align_corners=False)
    assert volume.data_ptr() in saved
    assert value.is_contiguous()
    value.sum().backward()
    assert volume.grad.is_contiguous(memory_format=torch.channels_last_3d)
    contiguous = volume.detach().contiguous()
    assert torch.equal(value, grid_sample(contiguous, where, align_corners=False))


def test_defaults_and_the_warning_are_those_of_torch():
    volume, where = make("cpu")
    with pytest.warns(UserWarning, match="Default grid_sample and affine_grid behavior has changed") as theirs:
        expected = F.grid_sample(volume, where)
    with pytest.warns(UserWarning, match="Default grid_sample and affine_grid behavior has changed") as ours:
        actual = grid_sample(volume, where)
    assert_matches(actual, expected)
    assert str(ours[0].message) == str(theirs[0].message)
    assert ours[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grid_sample(volume, where, align_corners=False)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5, 6), (1, 0, 2, 2, 2), (2, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("out", [(3, 2, 4), (0, 2, 2), (1, 1, 1)], ids=str)
def test_shapes(device, shape, out):
    volume, where = make(device, shape=shape, out=out)
    expected = F.grid_sample(volume, where, align_corners=False) if 0 not in out else volume.new_zeros(*shape[:2], *out)
    assert_matches(grid_sample(volume, where, align_corners=False), expected)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_positions_that_are_not_finite_read_zeros(device, padding):
    for mode in ("bilinear", "nearest", "bicubic"):
        image, at = torch.randn(2, 3, 7, 5, device=device), torch.rand(2, 6, 4, 2, device=device) * 4 - 2
        at[0, :2, 0, 0] = torch.tensor([float("nan"), float("inf")])
        value, _, slope = results(grid_sample, image, at, (mode, padding, True))
        assert not any(x[0, ..., :2, 0].any() for x in (value, slope.movedim(-1, 1)))
        assert_matches(value[1], F.grid_sample(image.double(), at.double(), mode, padding, True)[1])
    volume, where = make(device)
    where[:, 0, :, :, 1] = float("nan")
    where[:, 1, :, :, 2] = float("inf")
    value = grid_sample(volume, where, padding_mode=padding, align_corners=True)
    assert not value[:, :, :2].any()
    assert_matches(value[:, :, 2:], F.grid_sample(volume, where[:, 2:], padding_mode=padding, align_corners=True))


@every_option
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=str)
def test_the_result_can_be_viewed_as_that_of_torch_can(device, layout, options):
    volume, where = make(device)
    value = grid_sample(volume.to(memory_format=layout), where, *options)
    assert value.is_contiguous()
    assert value.view(-1).shape == (value.numel(),)


def test_malformed_input_raises_what_torch_raises():
    volume, where = make("cpu")
    for arguments in [(volume, where[..., :2]), (volume[:, :, :0], where), (volume, where[:1])]:
        with pytest.raises(RuntimeError):
            F.grid_sample(*arguments, align_corners=False)
        with pytest.raises(RuntimeError):
            grid_sample(*arguments, align_corners=False)


# --- cases of PyTorch's own tests of grid_sample (test_nn.py, OpInfo), for volumes


@pytest.mark.parametrize("size", [1, 2, 5, 10])
@pytest.mark.parametrize("reach", [0.5, 1.0, 2.0, 10.0])
def test_random_sizes_and_reaches(device, size, reach):
    for padding, align_corners, mode in itertools.product(
        ("zeros", "border", "reflection"), (False, True), ("bilinear", "nearest")
    ):
        volume = torch.randn(2, 3, size, size + 1, max(size - 1, 1), device=device, dtype=torch.float64)
        where = reach * (2 * torch.rand(2, size, 3, 2, 3, device=device, dtype=torch.float64) - 1)
        options = (mode, padding, align_corners)
        expected = results(F.grid_sample, volume, where, options)
        assert_all_match(results(grid_sample, volume, where, options), expected, ("value", "d input", "d grid"))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=str)
def test_the_gradient_of_an_expanded_volume_is_computed_once(device, channels, layout):
    volume, where = make(device, shape=(4, channels, 4, 5, 6))
    shape = assert_expanded_agrees(volume[:1].contiguous(memory_format=layout), where, 4)
    assert shape == (4, 5, 6, channels)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_integers_are_copied_from_the_nearest_voxel(device, padding):
    volume, where = make(device, torch.float32)
    labels = (100 * volume).to(torch.int16)
    value = grid_sample(labels, where.requires_grad_(), "nearest", padding, False)
    assert value.dtype == torch.int16
    assert torch.equal(value.float(), F.grid_sample(labels.float(), where, "nearest", padding, False))
    with pytest.raises(TypeError, match=r"input must be float32, .* int16: convert it .* mode='nearest'"):
        grid_sample(labels, where, "bilinear", padding, False)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("channels", [2, 3])
def test_few_points_are_sampled_channel_by_channel(device, shared, channels):
    volume, where = make(device, shape=(1 if shared else 2, channels, 4, 4, 8), out=(1, 1, 2))
    where = torch.cat((where, where.flip(2)))[:2]
    grid_sample(volume[:1], where[:1], align_corners=False)  # loads the kernels, which the first call does on its way
    assert assert_expanded_agrees(volume, where, 2) == ((1 if shared else 2) * channels, 4, 4, 8, 1)
    assert torch.autograd.gradgradcheck(of_expanded(grid_sample, 2), leaves(volume, where), nondet_tol=1e-12)


def test_periodic_volumes(device):
    volume, where = make(device)
    shifted = where + 2 * torch.randint(-3, 4, where.shape, device=device)  # with align_corners=False, 2 is a period
    options = ("bilinear", "periodic", False)
    assert_all_match(results(grid_sample, volume, where, options), results(grid_sample, volume, shifted, options))
    inside = where.clamp(-0.5, 0.5)  # half a voxel from the faces there is nothing to repeat
    assert_matches(grid_sample(volume, inside, *options), F.grid_sample(volume, inside, align_corners=False))


@every_option
def test_the_gradient_that_was_expanded(device, options):
    volume, where = leaves(*make(device, torch.float64))
    for sample in (grid_sample, F.grid_sample):
        sample(volume, where, *options).sum().backward()
    twice = volume.grad.clone()
    volume.grad = None
    grid_sample(volume, where, *options).sum().backward()
    assert_matches(2 * volume.grad, twice)


@pytest.mark.parametrize("padding", ["zeros", "border"])
def test_coordinates_far_outside_do_not_overflow(device, padding):
    volume, _ = make(device, torch.float32)
    where = torch.tensor([-1e30, 1e30, 3e38, -3e38, 2.0**31, -(2.0**62)], device=device)
    where = where[None, :, None, None, None].expand(volume.shape[0], -1, 1, 1, 3).contiguous()
    options = ("bilinear", padding, True)
    expected = F.grid_sample(volume.double(), where.double(), *options)
    assert_matches(grid_sample(volume, where, *options), expected)


# --- images, and bicubic sampling


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align_corners", [True, False])
def test_images_agree_with_torch(device, dtype, layout, mode, padding, align_corners):
    """Values and gradients, in both layouts of the memory, of which none is copied."""
    for channels in (1, 3, 12):
        image = torch.randn(2, channels, 7, 5, device=device, dtype=dtype).contiguous(memory_format=layout)
        where = torch.rand(2, 6, 4, 2, device=device, dtype=dtype) * 4 - 2
        options = mode, padding, align_corners
        expected = results(F.grid_sample, image.double(), where.double(), options)
        actual = results(grid_sample, image, where, options)
        assert_all_match(actual, expected, ("value", "d input", "d grid"))
        assert actual[0].is_contiguous()
        assert actual[1].is_contiguous(memory_format=layout)
        narrow = grid_sample(image.half(), where.float(), *options)
        assert_matches(narrow, F.grid_sample(image.half().double(), where.float().double(), *options))


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection", "periodic"])
@pytest.mark.parametrize("align_corners", [True, False])
def test_bicubic_volumes(device, padding, align_corners):
    volume, where = make(device)
    exact, at = leaves(volume.cpu(), where.cpu())
    expected = torch.stack(
        [
            sample_separable(
                one.permute(3, 2, 1, 0), p.flatten(0, 2) / 2 + 0.5, "convolution", padding, align_corners
            ).T.unflatten(1, p.shape[:3])
            for one, p in zip(exact, at, strict=True)
        ]
    )
    value, *gradients = results(grid_sample, volume, where, ("bicubic", padding, align_corners))
    torch.manual_seed(0)
    grad = torch.randn(value.shape, dtype=torch.float64)
    expected = (expected, *torch.autograd.grad(expected, (exact, at), grad))
    assert_all_match([x.cpu() for x in (value, *gradients)], expected, ("value", "d input", "d grid"))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_gradient_of_an_expanded_image_is_computed_once(device, layout):
    image = torch.randn(1, 3, 5, 6, device=device).contiguous(memory_format=layout)
    where = torch.rand(4, 3, 2, 2, device=device) * 2 - 1
    assert len(assert_expanded_agrees(image, where, 4)) == 3
