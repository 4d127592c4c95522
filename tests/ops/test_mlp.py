"""mlp and its gradients."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
import torch
from op_testing import DTYPES

from voxelfield.ops import mlp

# From input to output; on CUDA widths are padded to 16, 32, 64 or 128, the input to 32s and the output to 16s.
NETWORKS = [
    (24, 64, 16),
    (28, 64, 16),
    (32, 64, 64, 3),
    (32, 128, 128, 3),
    (60, 128, 128, 3),
    # On sm_90a the next five have kernels of their own.
    (32, 128, 128, 128, 3),
    (27, 100, 128, 70, 8),
    (24, 128, 16),
    (28, 100, 12),
    (32, 128, 5),
    (100, 48, 4),
    (16, 16, 16),
    (1, 1, 1),
    (8, 16, 40),
    (40, 20, 9, 8),
    (5, 32, 32, 32, 7),
    (64, 48, 4),
    (128, 128, 128),
    (96, 100, 112, 80, 70),
    (33, 64, 64, 64, 64, 17),
    (32, *[64] * 9, 2),
    (40, *[32] * 15, 20),
    # Deeper than shared memory: weights are read from global memory, activations are kept there.
    (128, *[128] * 15, 128),
    (70, *[100] * 6, 9),
]
COUNTS = [0, 1, 31, 33, 1000]
every_form = pytest.mark.parametrize(
    "sizes",
    [
        (24, 64, 16),
        (24, 128, 16),
        (28, 128, 16),
        (32, 64, 64, 3),
        (32, 128, 128, 3),
        (32, 128, 128, 128, 3),
        (16, 16, 1),
        (32, *[128] * 9, 3),
    ],
    ids=str,
)


def make(device, sizes=(24, 64, 16), count=1000, dtype=torch.float16, weights_dtype=None):
    """Input, weights that keep its scale, and a gradient for the output."""
    input = torch.randn(count, sizes[0], dtype=torch.float64)
    weights = [torch.randn(out, into, dtype=torch.float64) * (2 / into) ** 0.5 for into, out in pairwise(sizes)]
    grad = torch.randn(count, sizes[-1], dtype=torch.float64)
    return (
        input.to(device, dtype),
        [w.to(device, weights_dtype or dtype) for w in weights],
        grad.to(device, dtype),
    )


def error_in_eps(actual, expected, dtype):
    """The norm of the error in units of the dtype's eps and of the norm of what is expected."""
    error, size = (actual.double() - expected).norm().item(), expected.norm().item()
    return error / torch.finfo(dtype).eps / size if size > 0 else float(error > 0)


def tolerance(dtype, deep=1):
    """In eps. In 16 bits, all but the few numbers on a border are rounded alike; in 32 and 64, sums differ a little."""
    return deep * (0.25 if dtype.itemsize == 2 else 1.0)


@torch.no_grad()
def hidden_activations(input, weights):
    """What enters each layer of the op, float64; each is compared with float64 products of the one before it.

    An activation on the border between two numbers of its dtype may be rounded either way, and so may be zero or
    positive: then a ReLU passes a gradient or not, which one row of a thousand shows as 10 eps of all of them. So
    references follow the roundings of the op, each of which is right.
    """
    reached = [input.double()]
    for i, weight in enumerate(weights[:-1]):
        own = mlp(input, [*weights[: i + 1], torch.eye(len(weight), dtype=weight.dtype, device=weight.device)])
        exact = (reached[i] @ weight.to(input.dtype).double().T).to(input.dtype).double().relu()
        error = error_in_eps(own, exact, input.dtype)
        assert error <= tolerance(input.dtype), f"activations of layer {i}: {error:.2f} eps"
        reached.append(own.double())
    return reached


def reference(input, weights, grad):
    """Value and gradients in float64, with what passes between layers rounded to the dtype of ``input``."""
    dtype, reached = input.dtype, hidden_activations(input, weights)
    weights = [w.to(dtype).double() for w in weights]
    value = (reached[-1] @ weights[-1].T).to(dtype).double()
    grad, sums = grad.double(), []
    for i, weight in reversed(list(enumerate(weights))):
        sums.append(grad.T @ reached[i])
        grad = (grad @ weight).to(dtype).double()
        if i > 0:
            grad = torch.where(reached[i] > 0, grad, 0)
    return [value, grad, *sums[::-1]]


def value_and_gradients(input, weights, grad, **options):
    input, *weights = (x.detach().requires_grad_() for x in (input, *weights))
    value = mlp(input, weights, **options)
    return [value.detach(), *torch.autograd.grad(value, (input, *weights), grad)]


def assert_close(actual, expected, dtype, deep=2):
    names = ("value", "input gradient", *(f"gradient of weights[{i}]" for i in range(len(expected))))
    for name, a, e in zip(names, actual, expected, strict=False):
        assert a.shape == e.shape, name
        error = error_in_eps(a, e, dtype)
        assert error <= tolerance(dtype, deep), f"{name}: {error:.2f} eps"
    assert len(actual) == len(expected)


# --- values and gradients


@pytest.mark.parametrize("sizes", NETWORKS, ids=str)
@pytest.mark.parametrize("weights_dtype", [torch.float16, torch.float32], ids=str)
def test_value_and_gradients_match_reference(device, sizes, weights_dtype):
    inputs = make(device, sizes, weights_dtype=weights_dtype)
    actual = value_and_gradients(*inputs)
    assert [x.dtype for x in actual] == [torch.float16] * 2 + [weights_dtype] * (len(sizes) - 1)
    assert_close(actual, reference(*inputs), torch.float16, len(sizes) - 1)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    "sizes",
    [(24, 64, 16), (24, 128, 16), (32, 64, 64, 3), (33, 128, 5), (32, 128, 128, 128, 3), (32, *[128] * 9, 4)],
    ids=str,
)
def test_any_number_of_rows(device, sizes, count):
    inputs = make(device, sizes, count)
    assert_close(value_and_gradients(*inputs), reference(*inputs), torch.float16, len(sizes) - 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_on_the_cpu(dtype):
    for weights_dtype in {dtype, torch.float64 if dtype == torch.float64 else torch.float32}:
        inputs = make("cpu", (24, 64, 64, 16), dtype=dtype, weights_dtype=weights_dtype)
        actual = value_and_gradients(*inputs)
        assert [x.dtype for x in actual] == [dtype] * 2 + [weights_dtype] * 3
        assert_close(actual, reference(*inputs), dtype, 8)


def test_each_entry_of_the_weights_has_its_place(device):
    # One weight at a time: a wrong permutation of rows or columns would cancel out in sums, or in a symmetric case.
    sizes = (40, 48, 20, 24)
    for into, first, second, out in [(0, 0, 0, 0), (39, 47, 19, 23), (9, 33, 17, 6), (30, 1, 8, 12), (5, 20, 3, 17)]:
        input = torch.zeros(3, sizes[0], device=device, dtype=torch.float16)
        weights = [torch.zeros(rows, columns, device=device, dtype=torch.float16) for columns, rows in pairwise(sizes)]
        input[1, into] = 2
        weights[0][first, into] = 3
        weights[1][second, first] = 5
        weights[2][out, second] = -7
        grad = torch.zeros(3, sizes[-1], device=device, dtype=torch.float16)
        grad[1, out] = 1
        value, *gradients = value_and_gradients(input, weights, grad)
        expected = torch.zeros_like(value)
        expected[1, out] = 2 * 3 * 5 * -7
        assert torch.equal(value, expected)
        for gradient, tensor, own in zip(gradients, (input, *weights), (2, 3, 5, -7), strict=True):
            assert torch.equal(gradient, torch.where(tensor != 0, -210 / own, 0).to(gradient))


# --- absent rows


@pytest.mark.parametrize("integer", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "sizes", [(24, 64, 16), (24, 64, 64, 3), (20, 128, 5), (20, 128, 128, 128, 5), (20, *[128] * 8, 5)], ids=str
)
def test_rows_from_count_on_are_absent(device, sizes, integer):
    input, weights, grad = make(device, sizes)
    for used in (0, 1, 32, 333, 999, 1000, 5000, -3):
        kept = min(max(used, 0), 1000)
        x, g = input.clone(), grad.clone()
        x[kept:], g[kept:] = float("nan"), float("nan")
        # Uninitialised memory would show sooner or later: fill what the allocator is likely to hand out.
        torch.full((3, 1000, 128), float("nan"), device=device, dtype=torch.float16)
        count = torch.tensor([used], dtype=integer, device=device)
        value, grad_input, *sums = value_and_gradients(x, weights, g, count=count)
        assert not value[kept:].any()
        assert not grad_input[kept:].any()
        actual = [value[:kept], grad_input[:kept], *sums]
        assert_close(actual, reference(input[:kept], weights, grad[:kept]), torch.float16, len(sizes) - 1)


@pytest.mark.parametrize(
    "sizes", [(24, 64, 16), (24, 128, 16), (24, 64, 64, 3), (24, 128, 128, 128, 3), (20, *[128] * 8, 5)], ids=str
)
@pytest.mark.parametrize("used", [1, 37, 130])
def test_absent_rows_are_zero_for_weights_that_float16_cannot_hold(device, sizes, used):
    # Minus infinity times inputs of present rows is minus infinity, which ReLU makes zero; times zero it would be NaN.
    input, weights, grad = make(device, sizes, weights_dtype=torch.float32)
    input = input.abs() + 0.1
    weights[0][5] = -1e5
    count = torch.tensor([used], device=device)
    value, grad_input, *sums = value_and_gradients(input, weights, grad, count=count)
    assert not value[used:].any()
    assert not grad_input[used:].any()
    weights[0][5] = 0
    expected = reference(input[:used], weights, grad[:used])
    assert_close([value[:used], *sums], [expected[0], *expected[2:]], torch.float16, len(sizes) - 1)


# --- memory, numbers, runs


@pytest.mark.parametrize("sizes", [(24, 64, 64, 16), (24, 128, 16), (24, 128, 128, 128, 3)], ids=str)
def test_not_a_number_stays_in_its_row(device, sizes):
    input, weights, _ = make(device, sizes, 40)
    expected = mlp(input, weights)
    input[17, 5] = float("nan")
    value = mlp(input, weights)
    assert value[17].isnan().all()
    value[17] = expected[17]
    assert torch.equal(value, expected)


@every_form
def test_every_run_gives_the_same_bits(device, sizes):
    inputs = make(device, sizes, 20000 if device.type == "cuda" else 2000)
    expected = value_and_gradients(*inputs)
    for _ in range(3):
        torch.testing.assert_close(value_and_gradients(*inputs), expected, rtol=0, atol=0)


@every_form
def test_many_rows(device, sizes):
    # On CUDA more than all blocks take at once; on the CPU the network is torch's own products, slow in 16 bits.
    inputs = make(device, sizes, 150_001 if device.type == "cuda" else 3001)
    assert_close(value_and_gradients(*inputs), reference(*inputs), torch.float16, len(sizes) - 1)


@pytest.mark.cuda
@pytest.mark.parametrize("sizes", [(24, 128, 16), (32, 128, 128, 128, 3)], ids=str)
def test_wgmma_serves_the_default_networks_where_it_is_compiled(sizes):
    inputs = make("cuda", sizes, weights_dtype=torch.float32)
    value_and_gradients(*inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        value_and_gradients(*inputs)
        torch.cuda.synchronize()
    names = " ".join(event.name for event in profile.events())
    serves = torch.cuda.get_device_capability() == (9, 0) and "VOXELFIELD_SHARED_MEMORY_LIMIT" not in os.environ
    assert ("mlp_forward_wgmma_kernel" in names) == ("mlp_backward_wgmma_kernel" in names) == serves


@pytest.mark.cuda
@pytest.mark.parametrize("sizes", [(24, 128, 16), (32, 128, 128, 128, 3)], ids=str)
def test_absent_rows_after_several_turns_of_each_block(sizes):
    input, weights, grad = make("cuda", sizes, 50_001)
    used = 40_007
    input[used:], grad[used:] = float("nan"), float("nan")
    value, grad_input, *sums = value_and_gradients(input, weights, grad, count=torch.tensor(used, device="cuda"))
    assert not value[used:].any()
    assert not grad_input[used:].any()
    actual = [value[:used], grad_input[:used], *sums]
    assert_close(actual, reference(input[:used], weights, grad[:used]), torch.float16, 4)


@pytest.mark.cuda
def test_cuda_graph_reads_count_when_it_is_replayed():
    input, weights, grad = make("cuda", (32, 64, 64, 3), weights_dtype=torch.float32)
    count = torch.tensor(1000, device="cuda")
    value_and_gradients(input, weights, grad, count=count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = value_and_gradients(input, weights, grad, count=count)
    for used in (1000, 500):
        count.fill_(used)
        graph.replay()
        torch.testing.assert_close(captured, value_and_gradients(input, weights, grad, count=count), rtol=0, atol=0)
        assert captured[0][:used].any(1).all()
        assert not captured[0][used:].any()


# --- errors and registration


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes_are_refused_on_cuda(dtype):
    input, weights, _ = make("cuda", dtype=dtype)
    with pytest.raises(TypeError, match="input must be float16 on CUDA"):
        mlp(input, weights)
    with pytest.raises(RuntimeError, match="float16"):
        torch.ops.voxelfield.mlp(input, weights, None)
