"""The sampling functions under torch.func and forward-mode differentiation: as the plain reference, or refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from op_testing import every_linear_lookup, keywords, make, points_off_faces
from reference import interpolate_cells, sample_grid, sample_grid_with_gradient
from tolerances import assert_matches
from torch.autograd import forward_ad, functional
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_flatten

from voxelfield import _library
from voxelfield.ops import sample_pyramid, sample_trilinear, trilinear_interpolate


def pyramid(sample):
    """Two levels out of one tensor, so that every kind of op under test has the same two arguments."""

    def sample_levels(source, points):
        levels = [source, source[..., 1:, ::2, :, :] * 2]
        if sample is None:
            return sample_pyramid(levels, points)
        return torch.cat([sample(level, points) for level in levels], dim=-1)

    return sample_levels


# Ours, the reference, and the inputs: a source and its points.
OPS = {
    "grid": (sample_trilinear, sample_grid, lambda device, count: make(device, channels=2, count=count)),
    "pyramid": (
        pyramid(None),
        pyramid(sample_grid),
        lambda device, count: (
            torch.randn(4, 3, 5, 2, device=device, dtype=torch.float64),
            # In cells of the first level, clear of the faces of both.
            points_off_faces(count, device, resolution=(13, 7, 9)),
        ),
    ),
    "cells": (
        trilinear_interpolate,
        interpolate_cells,
        lambda device, count: (
            torch.randn(count, 8, 2, device=device, dtype=torch.float64),
            torch.rand(count, 3, device=device, dtype=torch.float64) * 4 - 2,
        ),
    ),
}

every_op = pytest.mark.parametrize("op", OPS)


def assert_same(actual, expected):
    actual, expected = tree_flatten(actual)[0], tree_flatten(expected)[0]
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert e.any(), "nothing was compared"
        assert_matches(a, e)


def scalar(sample):
    return lambda source, points: sample(source, points).square().sum()


def of_four(sample):
    """Four sets of points at once."""

    def mapped(source, points):
        offsets = torch.arange(4, device=points.device, dtype=points.dtype) * 0.01
        return vmap(lambda offset: sample(source, points + offset))(offsets)

    return mapped


def several_gradients(sample):
    """Autograd's own batches of gradients."""

    def run(*inputs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        value = sample(*leaves)
        grads = torch.linspace(-1, 1, 3 * value.numel(), device=value.device, dtype=value.dtype)
        return torch.autograd.grad(value, leaves, grads.view(3, *value.shape), is_grads_batched=True)

    return run


def vectorised(function, **options):
    return lambda sample: lambda *inputs: function(sample, inputs, vectorize=True, **options)


BOTH = {"argnums": (0, 1)}
TRANSFORMS = {
    "jacrev": lambda sample: jacrev(sample, **BOTH),
    "jacfwd": lambda sample: jacfwd(sample, **BOTH),
    "jvp": lambda sample: lambda *inputs: jvp(sample, inputs, tuple(x.sin() for x in inputs)),
    "hessian": lambda sample: hessian(scalar(sample), **BOTH),
    "jacobian of a map": lambda sample: jacrev(of_four(sample), **BOTH),
    "batches of gradients": several_gradients,
    "vectorised jacobian": vectorised(functional.jacobian),
    "vectorised jacobian in forward mode": vectorised(functional.jacobian, strategy="forward-mode"),
    "vectorised hessian": lambda sample: vectorised(functional.hessian)(scalar(sample)),
} | {
    f"{outer.__name__} of {inner.__name__} in the {name}": lambda sample, outer=outer, inner=inner, argument=argument: (
        outer(inner(scalar(sample), argnums=argument), argnums=argument)
    )
    for outer, inner in itertools.product((jacrev, jacfwd), repeat=2)
    for argument, name in enumerate(("source", "points"))
}


@every_op
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(device, op, transform):
    """Of ours they are those of the reference."""
    sample, reference, inputs = OPS[op]
    transform, inputs = TRANSFORMS[transform], inputs(device, 2)
    if transform is TRANSFORMS["jacfwd of jacfwd in the points"]:
        with pytest.raises(NotImplementedError, match=r"forward-mode .* in the points is possible once"):
            transform(sample)(*inputs)
        return
    assert_same(transform(sample)(*inputs), transform(reference)(*inputs))


# --- vmap


@pytest.mark.covering
@every_op
@pytest.mark.parametrize("in_dims", [(None, 0), (0, None), (0, 0), (None, 1), (1, 0), (2, 2)], ids=str)
@pytest.mark.parametrize("out_dims", [0, 1])
def test_vmap(device, op, in_dims, out_dims):
    if op == "cells" and None in in_dims:
        pytest.skip("a cell belongs to one point: covered by the other axes")
    compare_mapped(op, device, lambda sample: sample, in_dims, out_dims)


@every_op
@pytest.mark.parametrize("in_dims", [(None, 0), (0, None), (0, 0)], ids=str)
def test_vmap_of_gradients(device, op, in_dims):
    compare_mapped(op, device, lambda sample: grad(scalar(sample), argnums=(0, 1)), in_dims)
    compare_mapped(op, device, lambda sample: jacrev(sample, argnums=1), in_dims)
    compare_mapped(op, device, lambda sample: jacfwd(sample, argnums=1), in_dims)


def compare_mapped(op, device, function, in_dims, out_dims=0, size=4):
    ours, reference, inputs = OPS[op]
    pairs = [inputs(device, 3) for _ in range(size)]
    mapped = [
        pairs[0][i] if dim is None else torch.stack([pair[i] for pair in pairs], dim=dim)
        for i, dim in enumerate(in_dims)
    ]
    actual = vmap(function(ours), in_dims=in_dims, out_dims=out_dims)(*mapped)
    loop = [
        function(reference)(*(x if dim is None else x.select(dim, i) for x, dim in zip(mapped, in_dims, strict=True)))
        for i in range(size)
    ]
    expected = [torch.stack(parts, dim=out_dims) for parts in zip(*(tree_flatten(x)[0] for x in loop), strict=True)]
    assert_same(actual, expected)


def test_nested_vmap(device):
    grids = torch.randn(2, 3, 4, 3, 2, device=device, dtype=torch.float64)
    points = torch.rand(2, 5, 6, 3, device=device, dtype=torch.float64)
    inner = vmap(sample_trilinear, in_dims=(None, 0))
    expected = torch.stack([sample_grid(g, p.flatten(0, 1)).view(5, 6, 2) for g, p in zip(grids, points, strict=True)])
    assert_same(vmap(inner)(grids, points), expected)
    assert_same(vmap(vmap(sample_trilinear, in_dims=(None, 0)), in_dims=(0, None))(grids, points[0])[0], expected[0])


@every_linear_lookup
def test_normals_point_by_point(device, lookup):
    grid, points = make(device, channels=1, count=8, align_corners=lookup[1])

    def field(sample):
        return lambda point: sample(grid, point[None]).squeeze()

    normals = vmap(grad(field(lambda g, p: sample_trilinear(g, p, **keywords(lookup)))))(points)
    _, expected = sample_grid_with_gradient(grid, points, *lookup)
    assert_same(normals, expected[:, 0].detach())
    curvatures = vmap(hessian(field(lambda g, p: sample_trilinear(g, p, **keywords(lookup)))))(points)
    assert_same(curvatures, torch.stack([hessian(field(lambda g, p: sample_grid(g, p, *lookup)))(p) for p in points]))


# --- what is refused is refused aloud


def test_forward_mode_of_what_would_be_a_third_derivative_is_refused(device):
    grid, points = make(device, count=3)
    third = jacfwd(hessian(lambda p: sample_trilinear(grid, p).square().sum()))
    with pytest.raises(NotImplementedError, match=r"third derivative|forward-mode .* is possible once"):
        third(points)


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_raw_ops_under_transforms_are_refused(device, transform):
    _library.ensure_loaded(device.type)
    grid, points = (x[None] for x in make(device))

    def raw(p):
        return torch.ops.voxelfield.sample_trilinear([grid], p, 0, True, False, False, False)

    with pytest.raises((NotImplementedError, RuntimeError), match=r"cannot be transformed|[Bb]atching rule"):
        {
            "grad": lambda: grad(lambda p: raw(p).sum())(points),
            "jvp": lambda: jvp(raw, (points,), (torch.ones_like(points),)),
        }[transform]()


@pytest.mark.parametrize("name", ["sample", "splat", "point_gradient", "interpolate_cells"])
def test_raw_ops_keep_the_tangents_of_forward_mode(device, name):
    _library.ensure_loaded(device.type)
    grid, points = (x[None] for x in make(device))
    values = torch.randn(1, 40, 3, device=device, dtype=torch.float64)
    feats = torch.randn(40, 8, 3, device=device, dtype=torch.float64)
    options = (0, True, False, False, False)
    ops = torch.ops.voxelfield
    call, reference = {
        "sample": (lambda p: ops.sample_trilinear([grid], p, *options), lambda p: sample_grid(grid[0], p[0])[None]),
        "splat": (
            lambda p: ops.splat_trilinear(values, p, list(grid.shape[1:]), *options, 0)[0],
            lambda p: vjp(lambda g: sample_grid(g[0], p[0])[None], grid)[1](values)[0],
        ),
        "point_gradient": (
            lambda p: ops.point_gradient_trilinear(values, [grid], p, *options),
            grad(lambda p: (sample_grid(grid[0], p[0]) * values[0]).sum()),
        ),
        "interpolate_cells": (
            lambda p: ops.interpolate_cells(feats, p[0], False),
            lambda p: interpolate_cells(feats, p[0]),
        ),
    }[name]
    tangent = torch.randn_like(points)
    with forward_ad.dual_level():
        actual = forward_ad.unpack_dual(call(forward_ad.make_dual(points, tangent))).tangent
    assert_same(actual, jvp(reference, (points,), (tangent,))[1])


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_transforms_in_a_whole_compiled_graph_are_right_or_refused(device, transform):
    torch.compiler.reset()
    grid, points = make(device)
    tangent = torch.ones_like(points)

    def function(sample):
        if transform == "grad":
            return lambda p: grad(lambda q: sample(grid, q).square().sum())(p)
        return lambda p: jvp(lambda q: sample(grid, q), (p,), (tangent,))[1]

    try:
        actual = torch.compile(function(sample_trilinear), fullgraph=True, backend="aot_eager")(points)
    except Exception as error:  # the compiler wraps what an op raises in errors of its own
        assert "cannot be transformed by torch.func" in str(error)  # noqa: PT017
    else:
        assert_same(actual, function(sample_grid)(points))


def test_compiled_calls_keep_the_tangents_of_forward_mode(device):
    torch.compiler.reset()
    grid, points = make(device)
    tangent = torch.randn_like(points)
    compiled = torch.compile(lambda p: sample_trilinear(grid, p), backend="aot_eager")
    with forward_ad.dual_level():
        actual = forward_ad.unpack_dual(compiled(forward_ad.make_dual(points, tangent))).tangent
    assert_same(actual, jvp(lambda p: sample_grid(grid, p), (points,), (tangent,))[1])


# --- compiled maps


@every_op
@pytest.mark.parametrize("in_dims", [(None, 0), (0, None), (0, 0), (1, 2)], ids=str)
def test_compiled_maps_in_one_graph(device, op, in_dims):
    if op == "cells" and None in in_dims:
        pytest.skip("a cell belongs to one point: covered by the other axes")
    torch.compiler.reset()
    ours, _, inputs = OPS[op]
    pairs = [inputs(device, 3) for _ in range(4)]
    mapped = [
        (pairs[0][i] if dim is None else torch.stack([pair[i] for pair in pairs], dim=dim)).requires_grad_()
        for i, dim in enumerate(in_dims)
    ]
    compiled = torch.compile(vmap(ours, in_dims=in_dims), fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, vmap(ours, in_dims=in_dims)):
        value = function(*mapped)
        results.append([value, *torch.autograd.grad(value.square().sum(), mapped)])
    assert_same(*results)


@pytest.mark.parametrize("in_dims", [(None, 0), (0, None), (0, 0)], ids=str)
def test_raw_ops_can_be_mapped(device, in_dims):
    _library.ensure_loaded(device.type)
    grids = torch.randn(*(4,) * (in_dims[0] is not None), 3, 4, 3, 2, device=device, dtype=torch.float64)
    points = torch.rand(*(4,) * (in_dims[1] is not None), 7, 3, device=device, dtype=torch.float64)
    options = (0, True, False, False, False)

    def gather(grid, points):
        return torch.ops.voxelfield.sample_trilinear([grid], points, *options)

    actual = vmap(gather, in_dims=in_dims)(grids, points)
    assert_same(actual, vmap(sample_trilinear, in_dims=in_dims)(grids, points))

    def splat(grid, points):
        values = points[:, :2] + grid.sum()
        return torch.ops.voxelfield.splat_trilinear(values, points, [3, 4, 3, 2], *options, 0)[0]

    each = [[x] * 4 if dim is None else x for x, dim in zip((grids, points), in_dims, strict=True)]
    assert_same(
        vmap(splat, in_dims=in_dims)(grids, points), torch.stack([splat(g, p) for g, p in zip(*each, strict=True)])
    )


# --- the shortest path


def test_tensors_that_outlive_a_transform_can_be_sampled(device):
    grid, points = make(device)
    kept = []
    vmap(lambda p: kept.append(p) or p)(points)
    grad(lambda g: kept.append(g) or g.sum())(grid)
    assert_same(sample_trilinear(kept[1], points), sample_grid(grid, points))


def test_a_refusal_leaves_later_calls_alone(device):
    grid, points = make(device)
    expected = sample_trilinear(grid, points)
    for error, arguments in [(TypeError, (grid, points.int())), (ValueError, (grid, points[:, :2]))]:
        with pytest.raises(error):
            sample_trilinear(*arguments)
        with pytest.raises(RuntimeError):  # as torch's own functions raise it
            sample_trilinear(*arguments)
    assert torch.equal(sample_trilinear(grid, points), expected)
