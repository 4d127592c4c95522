"""trilinear_interpolate and the three per-cell ops beneath it."""

from __future__ import annotations

import pytest
import torch
from op_testing import CHANNELS, DTYPES, LAYOUTS, OpRecorder, saved_for_backward
from reference import CORNER_ORDERS, SIDES, interpolate_cells
from tolerances import arithmetic, assert_matches

from voxelfield.ops import sample_trilinear, trilinear_interpolate

NON_FINITE = [float("nan"), float("inf"), -float("inf")]


def make(device, dtype=torch.float64, channels=3, count=40):
    """Cells, and points inside and beyond them: the interpolant is continued linearly, smooth everywhere."""
    feats = torch.randn(count, 8, channels, device=device, dtype=dtype)
    return feats, torch.rand(count, 3, device=device, dtype=arithmetic(dtype)) * 4 - 2


def value_and_gradients(interpolate, feats, points, grad):
    feats, points = feats.detach().requires_grad_(), points.detach().requires_grad_()
    value = interpolate(feats, points)
    return value.detach(), *torch.autograd.grad(value, (feats, points), grad)


def assert_all_match(actual, expected):
    for name, a, e in zip(("value", "feature gradient", "point gradient"), actual, expected, strict=True):
        assert_matches(a, e.double(), name)


# --- values and first derivatives


@pytest.mark.parametrize("channels", [*CHANNELS, 256, 1027, 1100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_value_and_gradients_match_reference(device, dtype, channels):
    feats, points = make(device, dtype, channels)
    grad = torch.randn(len(points), channels, device=device, dtype=dtype)
    actual = value_and_gradients(trilinear_interpolate, feats, points, grad)
    assert [x.dtype for x in actual] == [dtype, dtype, points.dtype]
    expected = value_and_gradients(interpolate_cells, feats.double(), points.double(), grad.double())
    assert_all_match(actual, expected)


def test_far_beyond_the_cell_the_interpolant_is_continued(device):
    feats, _ = make(device, channels=1, count=8)
    points = torch.eye(3, device=device, dtype=torch.float64).repeat(3, 1)[:8] * 1e6
    assert_matches(trilinear_interpolate(feats, points), interpolate_cells(feats, points))


# --- the order of the corners


def test_corner_order_is_binary(device):
    # Corner 4i + 2j + k holds its own number: at that corner, the number comes out.
    feats = torch.arange(8.0, device=device).view(1, 8, 1)
    for i, j, k in SIDES:
        point = torch.tensor([[2.0 * i - 1, 2.0 * j - 1, 2.0 * k - 1]], device=device)
        assert trilinear_interpolate(feats, point).item() == 4 * i + 2 * j + k


@pytest.mark.parametrize("order", CORNER_ORDERS)
def test_published_orders_differ_by_a_permutation(device, order):
    feats, points = make(device)
    theirs = interpolate_cells(feats, points, order)
    # Ours[4i + 2j + k] is theirs[number(i, j, k)].
    permutation = {
        "4i+2j+k": [0, 1, 2, 3, 4, 5, 6, 7],
        "4i+j+2k": [0, 2, 1, 3, 4, 6, 5, 7],
        "i+2j+4k": [0, 4, 2, 6, 1, 5, 3, 7],
    }[order]
    assert permutation == [CORNER_ORDERS[order](i, j, k) for i, j, k in SIDES]
    assert_matches(trilinear_interpolate(feats[:, permutation], points), theirs)
    if order != "4i+2j+k":
        assert not torch.allclose(trilinear_interpolate(feats, points), theirs)


def test_corner_order_is_a_grid_s_memory_order(device):
    grid = torch.randn(2, 2, 2, 3, device=device, dtype=torch.float64)
    unit = torch.rand(10, 3, device=device, dtype=torch.float64)
    feats = grid.view(1, 8, 3).expand(10, 8, 3)
    assert_matches(trilinear_interpolate(feats, unit * 2 - 1), sample_trilinear(grid, unit))


# --- derivatives


@pytest.mark.parametrize("channels", [1, 4, 28])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_penalty_matches_reference(device, dtype, channels):
    feats, points = make(device, dtype, channels)
    weight = torch.randn(len(points), channels, device=device, dtype=dtype)

    def penalty_gradients(interpolate, f, p, w):
        f, p = f.detach().requires_grad_(), p.detach().requires_grad_()
        (slope,) = torch.autograd.grad(interpolate(f, p), p, w, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), (f, p))

    actual = penalty_gradients(trilinear_interpolate, feats, points, weight)
    expected = penalty_gradients(interpolate_cells, feats.double(), points.double(), weight.double())
    for name, a, e in zip(("feats", "points"), actual, expected, strict=True):
        assert_matches(a, e, name)


def test_third_derivative_is_refused(device):
    feats, points = make(device)
    points.requires_grad_()
    (first,) = torch.autograd.grad(trilinear_interpolate(feats, points).square().sum(), points, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), points, create_graph=True)
    with pytest.raises(NotImplementedError, match="third derivative"):
        torch.autograd.grad(second.sum(), points)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (("feats",), ["splat_cells"]),
        (("points",), ["point_gradient_cells"]),
        (("feats", "points"), ["splat_cells", "point_gradient_cells"]),
    ],
    ids=str,
)
def test_only_requested_gradients_are_computed(device, wanted, expected):
    inputs = dict(zip(("feats", "points"), make(device), strict=True))
    for name in wanted:
        inputs[name].requires_grad_()
    with saved_for_backward() as saved:
        value = trilinear_interpolate(**inputs)
    assert (inputs["feats"].data_ptr() in saved) == ("points" in wanted)
    with OpRecorder() as recorder:
        value.sum().backward()
    assert sorted(recorder.names) == sorted(expected)
    assert [name for name in inputs if inputs[name].grad is not None] == list(wanted)


# --- registration: schemas, fakes, autograd, compile


def test_meta_tensors_give_shapes():
    feats, points = torch.empty(6, 8, 5, device="meta", dtype=torch.half), torch.empty(6, 3, device="meta")
    value = trilinear_interpolate(feats, points)
    assert (value.shape, value.dtype, value.device.type) == ((6, 5), torch.half, "meta")


# --- empty, strided and non-finite input


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["feats", "points", "grad"])
def test_any_memory_layout(device, which, layout, dtype):
    feats, points = make(device, dtype, channels=8)
    inputs = {"feats": feats, "points": points, "grad": torch.randn(len(points), 8, device=device, dtype=dtype)}
    expected = {name: x.double() for name, x in inputs.items()}
    inputs[which] = LAYOUTS[layout](inputs[which])
    assert torch.equal(inputs[which].double(), expected[which])
    actual = value_and_gradients(trilinear_interpolate, *inputs.values())
    assert_all_match(actual, value_and_gradients(interpolate_cells, *expected.values()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_non_finite_points_read_and_write_nothing(device, dtype):
    bad = torch.zeros(9, 3, device=device, dtype=arithmetic(dtype))
    for row in range(9):
        bad[row, row % 3] = NON_FINITE[row // 3]
    # Were any corner read, or any value of the incoming gradient used, NaN would show.
    feats = torch.full((9, 8, 4), float("nan"), device=device, dtype=dtype)
    grad = torch.full((9, 4), float("nan"), device=device, dtype=dtype)
    for result in value_and_gradients(trilinear_interpolate, feats, bad, grad):
        assert torch.equal(result, torch.zeros_like(result))


def test_non_finite_points_and_features_leave_their_neighbours_alone(device):
    feats, points = make(device)
    points[::4, 1] = float("nan")
    feats[1::4, 3, 2] = float("nan")
    grad = torch.randn(len(points), 3, device=device, dtype=torch.float64)
    clean = torch.ones(len(points), dtype=torch.bool, device=device)
    clean[::4] = clean[1::4] = False
    actual = value_and_gradients(trilinear_interpolate, feats, points, grad)
    expected = value_and_gradients(interpolate_cells, feats, points, grad)
    assert_all_match([x[clean] for x in actual], [x[clean] for x in expected])
    for result in actual:
        assert not result[::4].any()
    assert torch.equal(actual[0][1::4].isnan().any(dim=0), torch.tensor([False, False, True], device=device))


# --- CUDA only


@pytest.mark.cuda
def test_runs_on_the_current_stream():
    inputs = (*make("cuda", count=1000), torch.randn(1000, 3, device="cuda", dtype=torch.float64))
    expected = value_and_gradients(trilinear_interpolate, *inputs)
    late = [torch.zeros_like(x) for x in inputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Work on any other stream would read the zeros.
        torch.cuda._sleep(100_000_000)
        for target, source in zip(late, inputs, strict=True):
            target.copy_(source)
        actual = value_and_gradients(trilinear_interpolate, *late)
    stream.synchronize()
    assert_all_match(actual, expected)


@pytest.mark.cuda
def test_captured_in_a_cuda_graph():
    feats, points = make("cuda", count=1000)
    feats.requires_grad_()
    points.requires_grad_()
    grad = torch.randn(1000, 3, device="cuda", dtype=torch.float64)

    def step():
        value = trilinear_interpolate(feats, points)
        return value.detach(), *torch.autograd.grad(value, (feats, points), grad)

    warmup = torch.cuda.Stream()
    warmup.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warmup):
        step()
    torch.cuda.current_stream().wait_stream(warmup)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        feats.copy_(torch.randn_like(feats))
        points.copy_(torch.rand_like(points) * 4 - 2)
    graph.replay()
    assert_all_match(captured, value_and_gradients(interpolate_cells, feats, points, grad))
