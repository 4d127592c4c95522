"""Every op under forward mode, a second derivative and vmap: right, or refused by name, never a silent zero."""

from __future__ import annotations

import gc
import importlib
import inspect
import pkgutil
import re
import weakref

import pytest
import torch
from test_bounds import calls_of_every_op, tensors_in
from torch.autograd import forward_ad

from voxelfield import _library, ops
from voxelfield.ops import _internal
from voxelfield.ops._internal.color import append_view, pixel_color_error, pixel_colors, sample_color_error
from voxelfield.ops._internal.empty_distance import empty_distance
from voxelfield.ops._internal.lens import lens_points, lens_rays
from voxelfield.ops._internal.march_pieces import march_pieces
from voxelfield.ops._internal.march_visible import march_visible
from voxelfield.ops._internal.optim import touched_vertices
from voxelfield.ops._internal.pixel_rays import pixel_rays
from voxelfield.ops._internal.render_image import (
    PackedSHGrid,
    render_baked_image,
    render_grid_image,
    render_pyramid_image,
)
from voxelfield.ops._internal.sparse_grid import atlas_coordinates
from voxelfield.warps.nested_boxes import NestedBoxes

OFFSETS = [0, 3, 3, 8]
BOX = [[-1.0] * 3, [1.0] * 3]
BOXES = NestedBoxes(((-0.5, -0.5, -0.5), (0.5, 0.5, 0.5)), 3).op_arguments


def doubles(*shape):
    return torch.rand(*shape, dtype=torch.float64) * 0.8 + 0.1


def singles(*shape):
    return torch.rand(*shape) * 0.8 + 0.1


def rays():
    return {
        "origins": torch.tensor([[-2.0, 0.1, 0.2], [0.3, -2.0, 0.1]]),
        "directions": torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]),
        "near": torch.ones(2),
        "far": torch.full((2,), 3.0),
    }


def cells():
    return torch.ones(3, 3, 3, dtype=torch.bool)


def box():
    return torch.tensor(BOX)


def camera():
    return {"c2w": torch.eye(4), "intrinsics": torch.tensor([4.0, 4.0, 2.0, 2.0]), "lens": torch.zeros(14)}


def sh_grid():
    return {"grid": torch.randn(4, 4, 4, 4), "aabb_occupancy": box(), "aabb_grid": box()}


def samples(make=doubles):
    return {"density": make(8) * 4, "rgb": make(8, 3), "t": make(8).cumsum(0), "dt": make(8) * 0.1}


def offsets():
    return torch.tensor(OFFSETS)


def pyramid():
    levels = {"first": torch.randn(4, 4, 4, 4), "second": torch.randn(5, 5, 5, 4)}
    return levels | {"hidden": torch.randn(16, 8), "last": torch.randn(16, 16), "aabb": box()}


SH = {"step": 0.1, "degree": 0, "density_scale": 5.0, "density_shift": 0.0}


def of_pyramid(op):
    def call(first, second, hidden, last, aabb, **others):
        return op(others, [first, second], aabb, [hidden, last])

    return call


# The floating inputs of a call of each op, and the call.
CALLS = {
    "sample_trilinear": (
        lambda: {"grid": doubles(3, 4, 5, 2), "points": doubles(6, 3) * 0.9},
        lambda **x: ops.sample_trilinear(**x),
    ),
    "sample_pyramid": (
        lambda: {"first": doubles(3, 4, 5, 2), "second": doubles(5, 6, 4, 2), "points": doubles(6, 3) * 0.9},
        lambda first, second, points: ops.sample_pyramid([first, second], points),
    ),
    "grid_sample": (
        lambda: {"input": doubles(1, 2, 3, 4, 5), "grid": doubles(1, 2, 2, 2, 3) * 0.9},
        lambda **x: ops.grid_sample(**x, align_corners=True),
    ),
    "trilinear_interpolate": (
        lambda: {"feats": doubles(6, 8, 2), "points": doubles(6, 3)},
        lambda **x: ops.trilinear_interpolate(**x),
    ),
    "composite": (samples, lambda **x: ops.composite(**x, ray_offsets=offsets(), distortion=True)),
    "composite_alphas": (
        lambda: {"alpha": doubles(8), "rgb": doubles(8, 3), "t": doubles(8)},
        lambda **x: ops.composite_alphas(**x, ray_offsets=offsets(), min_transmittance=0.0)[:4],
    ),
    "ray_weights": (
        lambda: {"density": doubles(8), "dt": doubles(8)},
        lambda **x: ops.ray_weights(**x, ray_offsets=offsets()),
    ),
    "ray_transmittance": (
        lambda: {"density": doubles(8), "dt": doubles(8)},
        lambda **x: ops.ray_transmittance(**x, ray_offsets=offsets()),
    ),
    "alpha_weights": (lambda: {"alpha": doubles(8)}, lambda alpha: ops.alpha_weights(alpha, offsets())),
    "alpha_transmittance": (lambda: {"alpha": doubles(8)}, lambda alpha: ops.alpha_transmittance(alpha, offsets())),
    "sum_along_rays": (
        lambda: {"values": doubles(8, 2), "weights": doubles(8)},
        lambda values, weights: ops.sum_along_rays(values, offsets(), weights),
    ),
    **{
        name: (lambda: {"values": doubles(8, 2)}, lambda values, name=name: getattr(ops, name)(values, offsets()))
        for name in ("inclusive_sum", "exclusive_sum", "inclusive_prod", "exclusive_prod")
    },
    "mlp": (
        lambda: {"input": doubles(6, 5), "hidden": doubles(7, 5), "last": doubles(3, 7)},
        lambda input, hidden, last: ops.mlp(input, [hidden, last]),
    ),
    "append_view": (
        lambda: {"geometry": singles(8, 5), "directions": rays()["directions"]},
        lambda **x: append_view(**x, ray_index=torch.zeros(8, dtype=torch.int64), degree=1),
    ),
    "pixel_colors": (
        lambda: {"rgb": doubles(8, 3) * 0.1, "opacity": doubles(8), "background": doubles(3)},
        lambda **x: pixel_colors(**x, rays_per_pixel=4),
    ),
    "pixel_color_error": (
        lambda: {"pixels": doubles(8, 3), "truth": doubles(8, 3)},
        lambda **x: pixel_color_error(**x),
    ),
    "sample_color_error": (
        lambda: {"weights": doubles(8), "sample_rgb": doubles(8, 3), "truth": doubles(2, 3)},
        lambda **x: sample_color_error(**x, ray_index=torch.zeros(8, dtype=torch.int64), rays_per_pixel=2),
    ),
    "render_grid": (
        lambda: rays() | sh_grid() | {"offset": torch.full((2,), 0.5)},
        lambda **x: ops.render_grid(**x, occupied=cells(), **SH),
    ),
    "march_rays": (
        lambda: rays() | {"aabb": box(), "offset": torch.full((2,), 0.5)},
        lambda **x: ops.march_rays(**x, occupied=cells(), step=0.1),
    ),
    "march_levels": (
        lambda: rays() | {"aabbs": box().view(1, 6)},
        lambda **x: ops.march_levels(**x, occupied=cells()[None], step=0.1),
    ),
    "importance_sample": (
        lambda: {"t_starts": singles(8), "t_ends": singles(8) + 1, "weights": singles(8), "offset": torch.rand(3)},
        lambda **x: ops.importance_sample(**x, count=3, ray_offsets=offsets()),
    ),
    "march_pieces": (
        lambda: rays() | {"aabb": box(), "offset": torch.full((2,), 0.5)},
        lambda **x: march_pieces(**x, occupied=ops.pack_occupancy(cells()), step=0.1, boxes=BOXES),
    ),
    "select_samples": (
        lambda: {"density": singles(8), "positions": singles(8, 3), "t": singles(8), "dt": singles(8)},
        lambda **x: ops.select_samples(**x, ray_offsets=offsets()),
    ),
    "march_visible": (
        lambda: rays() | {"aabb_occupancy": box()} | pyramid(),
        of_pyramid(
            lambda others, levels, aabb, weights: march_visible(
                **others,
                occupied=cells(),
                levels=levels,
                aabb=aabb,
                density_weights=weights,
                step=0.1,
                density_initial=1.0,
            )
        ),
    ),
    "lens_rays": (
        lambda: {"points": singles(5, 2), "lens": torch.zeros(1, 14)},
        lambda **x: lens_rays(**x),
    ),
    "lens_points": (
        lambda: {"rays": singles(5, 3), "lens": torch.zeros(1, 14)},
        lambda **x: lens_points(**x),
    ),
    "pixel_rays": (
        lambda: {name: value[None] for name, value in camera().items()} | {"aabb": box()},
        lambda **x: pixel_rays(torch.zeros(1, 4, 4, 4, dtype=torch.uint8), torch.arange(3), **x),
    ),
    "atlas_coordinates": (
        lambda: {"points": torch.rand(5, 3)},
        lambda points: atlas_coordinates(points, torch.zeros(2, 2, 2, dtype=torch.int32), (8, 8, 8)),
    ),
    "render_grid_image": (
        lambda: camera() | {"background": torch.ones(3), "aabb_occupancy": box(), "grid": torch.randn(4, 4, 4, 4)},
        lambda grid, **x: render_grid_image(
            **x,
            width=4,
            height=4,
            occupied=cells(),
            field=PackedSHGrid(grid, grid[..., 0].contiguous(), box(), 0),
            **{name: value for name, value in SH.items() if name != "degree"},
        ),
    ),
    "render_pyramid_image": (
        lambda: camera() | {"background": torch.ones(3), "aabb_occupancy": box()} | pyramid(),
        of_pyramid(
            lambda others, levels, aabb, weights: render_pyramid_image(
                **others,
                width=4,
                height=4,
                occupied=cells(),
                levels=levels,
                aabb=aabb,
                density_weights=weights,
                color_weights=[torch.ones(8, 17) / 9, torch.ones(3, 8) / 9],
                step=0.1,
                density_initial=1.0,
                view_degree=0,
            )
        ),
    ),
    "render_baked_image": (
        lambda: camera() | {"aabb_occupancy": box(), "aabb": box()},
        lambda **inputs: render_baked_image(
            **inputs,
            width=4,
            height=4,
            occupied=cells(),
            log_density=torch.zeros(8, 8, 8, dtype=torch.float16),
            values=torch.zeros(8, 8, 8, 8, dtype=torch.uint8),
            blocks=torch.zeros(1, 1, 1, dtype=torch.int32),
            clip=box(),
            step=0.1,
        ),
    ),
}
# Updates of optimizers and copies, in place and outside of autograd, and ops on cells, which are bools, and indices.
NOT_DIFFERENTIATED = {
    *("accumulate_trilinear_", "grid_adam_", "grid_total_variation_grad_", "sum_duplicates_"),
    *("touched_vertices", "pack_vertices", "unpack_vertices"),
    *("pack_occupancy", "empty_distance", "active_tiles"),
    *("offsets_from_ray_index", "pack_info", "ray_index_from_offsets"),
}
# Public functions beside the internal ops.
HELPERS = {
    *("march_through", "pieces_of", "world_distances", "sphere_points", "sphere_rays", "tiles_along"),
    *("empty_image", "pyramid_image_fits"),
}
# Where the message is about a family of ops.
NAMES = {
    "sample_trilinear": "trilinear sampling",
    "sample_pyramid": "trilinear sampling",
    "grid_sample": "trilinear sampling",
    "trilinear_interpolate": "trilinear sampling",
    "pixel_color_error": "colou?r.error|errors of colours",
    "sample_color_error": "colou?r.error|errors of colours",
}
ARGUMENTS = [(op, name) for op, (inputs, _) in CALLS.items() for name in inputs()]
every_argument = pytest.mark.parametrize(("op", "argument"), ARGUMENTS, ids=[f"{op}-{name}" for op, name in ARGUMENTS])
every_op = pytest.mark.parametrize("op", CALLS)


def test_every_op_is_here():
    functions = {name for name in ops.__all__ if name.islower()}
    for found in pkgutil.iter_modules(_internal.__path__, f"{_internal.__name__}."):
        for name, value in vars(importlib.import_module(found.name)).items():
            if inspect.isfunction(value) and value.__module__ == found.name and not name.startswith("_"):
                functions.add(name)
    assert functions == set(CALLS) | NOT_DIFFERENTIATED | HELPERS


def tensors(result):
    return [result] if isinstance(result, torch.Tensor) else [x for x in result if isinstance(x, torch.Tensor)]


def floats(result):
    return [x for x in tensors(result) if x.is_floating_point()]


def names_the_op(error, op):
    return isinstance(error, NotImplementedError) and re.search(rf"{op}|{NAMES.get(op, op)}", str(error))


def refused(op, attempt):
    """Returns whether an attempt is refused by name; its result otherwise."""
    try:
        return False, attempt()
    except RuntimeError as error:
        if not names_the_op(error, op):
            raise
        return True, None


@every_argument
def test_forward_mode(op, argument):
    inputs, call = CALLS[op]
    inputs = inputs()
    tangent = torch.randn_like(inputs[argument])

    def attempt():
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(inputs[argument], tangent)
            return [forward_ad.unpack_dual(x).tangent for x in floats(call(**{**inputs, argument: dual}))]

    was_refused, actual = refused(op, attempt)
    if was_refused:
        return
    assert inputs[argument].dtype == torch.float64, "cannot be compared with differences"
    step = 1e-6
    ahead, behind = (floats(call(**{**inputs, argument: inputs[argument] + sign * step * tangent})) for sign in (1, -1))
    assert any(x is not None and x.any() for x in actual)
    for x, high, low in zip(actual, ahead, behind, strict=True):
        torch.testing.assert_close(
            torch.zeros_like(high) if x is None else x, (high - low) / (2 * step), rtol=1e-5, atol=1e-6
        )


@every_argument
def test_torch_func_jvp(op, argument):
    inputs, call = CALLS[op]
    inputs = inputs()
    tangent = torch.randn_like(inputs[argument])

    def attempt():
        function = lambda x: tuple(floats(call(**{**inputs, argument: x})))  # noqa: E731
        return torch.func.jvp(function, (inputs[argument],), (tangent,))[1]

    was_refused, actual = refused(op, attempt)
    assert was_refused or any(x.any() for x in actual)


@every_argument
def test_torch_func_grad_and_vjp(op, argument):
    inputs, call = CALLS[op]
    inputs = inputs()
    function = lambda x: floats(call(**{**inputs, argument: x}))  # noqa: E731
    loss = lambda x: sum(y.double().nan_to_num().square().sum() for y in function(x))  # noqa: E731
    x = inputs[argument]
    leaf = x.clone().requires_grad_()
    expected = torch.zeros_like(leaf)
    if (value := loss(leaf)).requires_grad:
        (expected,) = torch.autograd.grad(value, leaf)
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    value, pull = torch.func.vjp(loss, x)
    torch.testing.assert_close(pull(torch.ones_like(value)), (expected,))


@every_argument
def test_torch_func_second_derivative(op, argument):
    inputs, call = CALLS[op]
    inputs = inputs()
    loss = lambda x: sum(y.double().nan_to_num().square().sum() for y in floats(call(**{**inputs, argument: x})))  # noqa: E731
    slope = lambda x: torch.func.grad(loss)(x).double().square().sum()  # noqa: E731
    was_refused, actual = refused(op, lambda: torch.func.grad(slope)(inputs[argument]))
    if not was_refused:
        leaf = inputs[argument].clone().requires_grad_()
        expected = torch.zeros_like(leaf)
        if (value := loss(leaf)).requires_grad:
            (first,) = torch.autograd.grad(value, leaf, create_graph=True)
            (expected,) = torch.autograd.grad(first.double().square().sum(), leaf)
        torch.testing.assert_close(actual, expected)


@every_argument
def test_gradients(op, argument):
    """A first derivative is right, or results do not require one; a second one is right, or refused."""
    inputs, call = CALLS[op]
    inputs = inputs()
    x = inputs[argument].requires_grad_()

    def function(x):
        return [y for y in floats(call(**{**inputs, argument: x})) if y.requires_grad]

    results = function(x)
    if not results:
        return
    if x.dtype != torch.float64:
        (grad,) = torch.autograd.grad(results[0].sum(), x, create_graph=True)
        assert grad.any()
        if grad.requires_grad:  # not that of a linear op
            was_refused, _ = refused(op, lambda: torch.autograd.grad(grad.sum(), x))
            assert was_refused
        return
    assert torch.autograd.gradcheck(lambda x: tuple(function(x)), x)
    was_refused, right = refused(op, lambda: torch.autograd.gradgradcheck(lambda x: tuple(function(x)), x))
    assert was_refused or right


@pytest.fixture
def _no_slow_vmap():
    """Makes torch raise an error where it would map an op by running it once for each call."""
    torch._C._functorch._set_vmap_fallback_enabled(False)
    yield
    torch._C._functorch._set_vmap_fallback_enabled(True)


def assert_mapped_or_refused(function, several, name):
    was_refused, actual = refused(name, lambda: torch.func.vmap(function)(several))
    if was_refused:
        return
    for row, x in enumerate(several):
        for one, other in zip(actual, function(x), strict=True):
            torch.testing.assert_close(one[row], other)


@every_argument
def test_a_backward_pass_leaves_nothing_to_the_garbage_collector(op, argument):
    """A graph that stays alive keeps memory, and no CUDA graph can be captured as long as it exists."""
    inputs, call = CALLS[op]
    inputs = inputs()
    leaf = inputs[argument].requires_grad_()
    gc.collect()
    gc.disable()
    try:
        argument_of_op = leaf * 1
        results = [y for y in floats(call(**{**inputs, argument: argument_of_op})) if y.requires_grad]
        if results:
            torch.autograd.backward([y.sum() for y in results])
        alive = weakref.ref(argument_of_op)
        del argument_of_op, results
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.usefixtures("_no_slow_vmap")
@every_argument
def test_vmap(op, argument):
    inputs, call = CALLS[op]
    inputs = inputs()
    several = torch.stack([inputs[argument], inputs[argument] * 0.9])
    assert_mapped_or_refused(lambda x: tuple(floats(call(**{**inputs, argument: x}))), several, op)


@pytest.mark.usefixtures("_no_slow_vmap")
@every_argument
def test_vmap_of_gradients(op, argument):
    inputs, call = CALLS[op]
    inputs = inputs()
    several = torch.stack([inputs[argument], inputs[argument] * 0.9])
    loss = lambda x: sum(y.double().nan_to_num().square().sum() for y in floats(call(**{**inputs, argument: x})))  # noqa: E731
    assert_mapped_or_refused(lambda x: (torch.func.grad(loss)(x),), several, op)


def cells_and_indices():
    """Calls of functions with other tensors than floating ones: the name in errors, the tensors, and the function."""
    march = rays() | {"aabb": box(), "step": 0.1, "capacity": 40}
    levels, render = rays() | {"aabbs": box().view(1, 6), "step": 0.1, "capacity": 40}, rays() | sh_grid() | SH
    packed, single, values = samples(), samples(singles), doubles(8, 2)
    words, index, offset = torch.full((1, 1, 1), -1), torch.zeros(8, dtype=torch.int64), offsets()
    directions, geometry, weights, rows = rays()["directions"], singles(8, 5), doubles(8), doubles(6, 5)
    network, truth = [doubles(7, 5), doubles(3, 7)], doubles(2, 3)
    alike = "sums along rays|select_samples"
    return {
        "pack_occupancy": ("pack_occupancy", cells(), lambda x: ops.pack_occupancy(x).words),
        "empty_distance": ("empty_distance", cells(), empty_distance),
        "march_rays": ("pack_occupancy", cells(), lambda x: ops.march_rays(**march, occupied=x)),
        "march_rays bits": (
            "march_rays",
            words,
            lambda x: ops.march_rays(**march, occupied=ops.OccupancyBits(x, (3, 3, 3))),
        ),
        "march_levels": ("march_levels", cells()[None], lambda x: ops.march_levels(**levels, occupied=x)),
        "render_grid": ("pack_occupancy", cells(), lambda x: ops.render_grid(**render, occupied=x)),
        "render_grid distances": ("render_grid", cells().byte(), lambda x: ops.render_grid(**render, occupied=x)),
        "render_grid density": (
            "render_grid",
            torch.randn(4, 4, 4),
            lambda x: ops.render_grid(**render, occupied=cells(), density=x),
        ),
        "composite": (alike, offset, lambda x: ops.composite(**packed, ray_offsets=x)),
        "ray_weights": (alike, offset, lambda x: ops.ray_weights(packed["density"], packed["dt"], x)),
        "sum_along_rays": (alike, offset, lambda x: ops.sum_along_rays(values, x)),
        "inclusive_prod": (alike, offset, lambda x: ops.inclusive_prod(values, x)),
        "select_samples": (
            alike,
            offset,
            lambda x: ops.select_samples(
                single["density"], single["rgb"], single["t"], single["dt"], ray_offsets=x, capacity=8
            ),
        ),
        "importance_sample": (
            alike,
            offset,
            lambda x: ops.importance_sample(single["t"], single["t"] + 1, single["dt"], 3, x),
        ),
        "offsets_from_ray_index": ("", index, lambda x: ops.offsets_from_ray_index(x, 3)),
        "pack_info": ("", index, lambda x: ops.pack_info(x, 3)),
        "ray_index_from_offsets": ("", offset, lambda x: ops.ray_index_from_offsets(x, 8)),
        "append_view": ("append_view", index, lambda x: append_view(geometry, directions, x, 1)),
        "sample_color_error": (
            "color_error",
            index,
            lambda x: sample_color_error(weights, packed["rgb"], x, truth, 2),
        ),
        "mlp": ("mlp", torch.tensor(4), lambda x: ops.mlp(rows, network, count=x)),
        "touched_vertices": (
            "touched_vertices",
            torch.zeros(1, 5, dtype=torch.int32),
            lambda x: touched_vertices(torch.ones(4, 4, 8, 2), x),
        ),
    }


@pytest.mark.usefixtures("_no_slow_vmap")
@pytest.mark.parametrize("call", cells_and_indices())
def test_vmap_over_cells_and_indices(call):
    name, x, function = cells_and_indices()[call]
    assert_mapped_or_refused(lambda x: tuple(tensors(function(x))), torch.stack([x, x]), name)


# --- ops that write in place


def split_by_schema(name, arguments):
    """Returns the tensors that an op writes according to its schema, and its other tensors."""
    schema = getattr(torch.ops.voxelfield, name).default._schema
    both = [], []
    for argument, value in zip(schema.arguments, arguments, strict=True):
        both[not (argument.alias_info and argument.alias_info.is_write)].extend(tensors_in([value]))
    return both


def calls_that_write(device):
    """A call of every op whose schema says that it writes: its name, its arguments, and the tensors it writes."""
    _library.ensure_loaded(device.type)
    calls = [(name, given, *split_by_schema(name, given)) for name, given in calls_of_every_op(device).items()]
    calls = [call for call in calls if call[2]]
    assert {"grid_adam_", "sum_duplicates_"} <= {name for name, *_ in calls}
    return calls


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_ops_raise_the_versions_of_the_tensors_that_they_write(device, mode):
    for name, arguments, written, others in calls_that_write(device):
        written, others = ([(x, x._version) for x in tensors] for tensors in (written, others))
        with mode():
            getattr(torch.ops.voxelfield, name)(*arguments)
        assert all(x._version > before for x, before in written), name
        assert all(x._version == before for x, before in others), name


def test_backward_refuses_what_an_op_has_written_since(device):
    factor = torch.ones((), device=device, requires_grad=True)
    for name, arguments, written, others in calls_that_write(device):
        stale, fresh = ([(factor * x).sum() for x in tensors] for tensors in (written, others))
        getattr(torch.ops.voxelfield, name)(*arguments)
        for product in stale:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()
        for product in fresh:
            product.backward()


def test_ops_write_inference_tensors_without_versions(device):
    with torch.inference_mode():
        for name, arguments, *_ in calls_that_write(device):
            getattr(torch.ops.voxelfield, name)(*arguments)


def test_functions_raise_the_versions_of_what_ops_write_in_them(device):
    _library.ensure_loaded(device.type)
    sums, weights = torch.randn(3, 3, 3, 1, device=device), torch.ones(3, device=device)

    class Smoothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, factor):
            torch.ops.voxelfield.grid_total_variation_grad_(sums, sums.clone(), weights, 1.0, None, None)
            return factor.clone()

        @staticmethod
        def backward(ctx, grad):
            torch.ops.voxelfield.grid_total_variation_grad_(sums, sums.clone(), weights, 1.0, None, None)
            return grad

    factor = torch.ones((), device=device, requires_grad=True)
    before_forward = (factor * sums).sum()
    smoothed = Smoothing.apply(factor)
    before_backward = (factor * sums).sum()
    smoothed.backward()
    for product in (before_forward, before_backward):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_a_compiled_graph_writes_and_raises_versions(device):
    _library.ensure_loaded(device.type)
    param, weights = torch.randn(4, 4, 4, 2, device=device), torch.ones(3, device=device)

    def smooth(grad):
        torch.ops.voxelfield.grid_total_variation_grad_(grad, param, weights, 1.0, None, None)
        return grad.sum()

    eager, compiled = torch.zeros_like(param), torch.zeros_like(param)
    version = compiled._version
    expected = smooth(eager)
    actual = torch.compile(smooth, fullgraph=True, backend="aot_eager")(compiled)
    assert eager.any()
    torch.testing.assert_close((actual, compiled), (expected, eager))
    assert compiled._version > version
