"""What does not fit is refused in one line that names the argument: a table of all arguments, and one of values."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from op_contracts import CONTRACTS, named_tensors, replaced
from torch.utils._python_dispatch import TorchDispatchMode

from voxelfield import VoxelGrid, VoxelPyramid, ops
from voxelfield.foundation.errors import shown

BOX = ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))
GRID, POINTS = torch.rand(2, 3, 4, 5), torch.rand(6, 3)
MANY = torch.zeros(1, 3).expand(2**44, 3)  # their values need more memory than any machine has


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.sample_trilinear(GRID, MANY),
        lambda: ops.sample_pyramid([GRID, GRID], MANY),
        lambda: VoxelGrid(2, 1, BOX)(MANY),
        lambda: ops.trilinear_interpolate(torch.zeros(1, 8, 1).expand(2**44, 8, 1), MANY),
        lambda: ops.ray_weights(MANY[:, 0], MANY[:, 0], torch.tensor([0, 1])),
    ],
    ids=["grid", "pyramid", "module", "cells", "rays"],
)
def test_what_runs_out_of_memory_is_not_tried_again(call):
    runs = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "voxelfield":
                runs.append(func)
            return func(*args, **(kwargs or {}))

    message = r"^\w+(\[0\])? of shape .*\(17592186044416,.* need more memory than is available$"
    with pytest.raises(torch.OutOfMemoryError, match=message), Counting():
        call()
    assert len(runs) == 1


WRONG = {
    "dimensions": (lambda x: x[None], ValueError),
    "length": (lambda x: torch.cat([x, x]), ValueError),
    "dtype": (lambda x: x.to(torch.complex64), TypeError),
    "other precision": (lambda x: x.to(torch.float32 if x.dtype == torch.float64 else torch.int16), TypeError),
    "list": (lambda x: x.tolist(), TypeError),
    "nothing": (lambda x: None, TypeError),
    "device": (lambda x: x.to("meta"), ValueError),
    "sparse": (lambda x: x.to_sparse(), ValueError),
}
PUBLIC = [name for name in CONTRACTS if name in ops.__all__]
TENSORS = [(name, key) for name in PUBLIC for key in named_tensors(CONTRACTS[name].arguments())]
# These set what others must fit, which are blamed.
LEADING = {
    "grid",
    "grids[0]",
    "input",
    "feats",
    "density",
    "alpha",
    "values",
    "t_starts",
    "weights[0]",
    "origins",
    "depths",
}
LEADING_TOO = {("march_levels", "occupied")}
SCANS = ("inclusive_sum", "exclusive_sum", "inclusive_prod", "exclusive_prod")
# Calls that are right after all.
RIGHT = {
    ("dimensions", "sample_trilinear", "points"),
    *(("length", "sample_trilinear", name) for name in ("grid", "points")),
    *(("length", "sample_pyramid", name) for name in ("grids[0]", "grids[1]", "points")),
    *(("length", name, "alpha") for name in ("alpha_weights", "alpha_transmittance")),
    *(("length", name, "values") for name in SCANS),
    *(("length", name, "occupied") for name in ("march_rays", "pack_occupancy", "render_grid")),
    *(("length", "mlp", name) for name in ("input", "weights[1]")),
    ("length", "render_grid", "grid"),
    *(("other precision", "sample_trilinear", name) for name in ("grid", "points")),
    ("dtype", "sample_trilinear", "grid"),
    *((kind, "sample_cubic", "points") for kind in ("dimensions", "length", "other precision")),
    *((kind, "sample_cubic", "grid") for kind in ("length", "dtype", "other precision")),
    *((kind, f"splat_{name}", "values") for kind in ("dtype", "other precision") for name in ("trilinear", "cubic")),
    *(("other precision", f"splat_{name}", "points") for name in ("trilinear", "cubic")),
    *((kind, "bspline_prefilter", "grid") for kind in ("dimensions", "length", "dtype", "other precision", "device")),
    *(("other precision", name, "alpha") for name in ("alpha_weights", "alpha_transmittance")),
    *(("other precision", name, "values") for name in SCANS),
    *(("other precision", "importance_sample", name) for name in ("weights", "offset")),
    *((kind, name, "grid") for name in ("integrate_rays", "first_crossing") for kind in ("length", "other precision")),
    *(
        (kind, name, f"{of}s")
        for name in ("integrate_rays", "first_crossing")
        for of in ("origin", "direction")
        for kind in ("dimensions", "other precision")
    ),
    ("dimensions", "backproject_rays", "values"),
    *(("other precision", "backproject_rays", name) for name in ("values", "origins", "directions")),
    *((kind, name, "grid") for name in ("sample_distance", "redistance") for kind in ("length", "other precision")),
    ("dimensions", "redistance", "grid"),
    *((kind, "sample_distance", "points") for kind in ("dimensions", "length", "other precision")),
    *((kind, "sample_voxels", "points") for kind in ("dimensions", "length", "other precision")),
    ("other precision", "sample_voxels", "features"),
    *(("other precision", name, "aabb") for name in ("sample_distance", "redistance", "integrate_depth")),
    *(("other precision", "integrate_depth", name) for name in ("depths", "c2w", "intrinsics")),
    *(("nothing", name, "offset") for name in ("importance_sample", "march_rays", "render_grid")),
    ("nothing", "sum_along_rays", "weights"),
    *(("device", name, "ray_index") for name in ("offsets_from_ray_index", "pack_info")),
    *(("device", name, "ray_offsets") for name in ("ray_index_from_offsets",)),
    ("device", "pack_occupancy", "occupied"),
}


def assert_refused(call, name, kinds=(TypeError, ValueError)):
    with pytest.raises(kinds) as caught:
        call()
    assert re.match(rf"({name})(\.words)?(=True needs| must)", str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


CASES = [(*case, kind, "cpu") for case in TENSORS for kind in WRONG]
# Kernels alone check what these ops get, and there are none for tensors without values.
CHECKED_BY_KERNELS = ("march_rays", "march_levels", "render_grid")
# An index of voxels has values, which the tensors beside it must be near.
WITH_VALUES = (*CHECKED_BY_KERNELS, "sample_voxels")
# Without values, which offsets and indices are refused for.
CASES += [
    (*case, kind, "meta")
    for case in TENSORS
    if case[0] not in WITH_VALUES
    for kind in ("dimensions", "length", "dtype", "other precision")
    if kind != "length" or case[1] not in ("ray_offsets", "ray_index")
]


@pytest.mark.parametrize(("name", "argument", "kind", "place"), CASES, ids=map("-".join, CASES))
def test_a_tensor_that_does_not_fit_is_named(name, argument, kind, place):
    """In one line that begins with the argument, or with one that does not fit it if the argument itself may be so."""
    change, error = WRONG[kind]
    row = CONTRACTS[name]
    arguments = row.arguments(place)
    given = named_tensors(arguments)
    wrong = replaced(arguments, {argument: change(given[argument])})
    if (kind, name, argument) in RIGHT:
        row.call(**wrong)
        return
    leads = argument in LEADING or (name, argument) in LEADING_TOO
    if (kind, argument) == ("nothing", "ray_offsets") and next(iter(given)) != argument:
        leads, error = "inclusive" not in name, (TypeError, ValueError)  # samples (M,) need them
    blamed = "|".join(map(re.escape, given)) if leads else re.escape(argument)
    assert_refused(lambda: row.call(**wrong), blamed, error)


GRIDS = [torch.zeros(2, 2, 2, 3)] * 2
WEIGHTS = [torch.zeros(7, 5), torch.zeros(3, 7)]
WORDS, CELLS = ops.pack_occupancy(torch.ones(3, 4, 5, dtype=torch.bool))
# A row of the table of contracts, the argument that is wrong, its value, and what the message says.
REFUSALS = [
    ("sample_trilinear", "grid", torch.zeros(2, 2, 2), r"\(X, Y, Z, C\), got \(2, 2, 2\)"),
    ("sample_trilinear", "grid", torch.zeros(1, 1, 2, 2, 2, 3), r"\(X, Y, Z, C\)"),
    ("sample_trilinear", "grid", torch.zeros(0, 2, 2, 3), "vertices"),
    ("sample_trilinear", "grid", torch.zeros(2, 2, 0, 3), "vertices"),
    ("sample_trilinear", "grid", torch.zeros(2, 2, 2, 3, dtype=torch.int64), "int64.*mode='nearest'"),
    ("sample_trilinear", "points", torch.zeros(5, 2), r"\(2, ..., 2\) for grid of shape \(2, 2, 2, 8\).*\(5, 2\)"),
    ("sample_trilinear", "points", torch.zeros(5, 4), r"\(..., 3\).*\(5, 4\)"),
    ("sample_trilinear", "points", torch.zeros(()), r"\(..., 3\).*\(\)"),
    ("sample_trilinear", "points", torch.zeros(5, 3, dtype=torch.int64), "float.*int64"),
    ("sample_trilinear", "points", np.zeros((5, 3)), "ndarray"),
    ("sample_trilinear", "points", torch.zeros(2, 5, 3).to_sparse(), "dense tensor"),
    ("sample_trilinear, batch", "points", torch.zeros(5, 3), r"\(2, ..., 3\).*\(5, 3\)"),
    ("sample_trilinear, batch", "points", torch.zeros(3, 5, 3), r"\(2, ..., 3\).*\(3, 5, 3\)"),
    ("sample_trilinear, batch", "grid", torch.zeros(2, 2, 0, 2, 3), "vertices"),
    *[("sample_trilinear", "mode", x, r"\['linear', 'nearest'\], got ") for x in ("bilinear", "", None, 1)],
    ("sample_trilinear", "mode", np.zeros((9, 9)), "one of"),
    *[
        ("sample_trilinear", "padding", x, r"\['border', 'zeros', 'reflection', 'periodic'\]")
        for x in ("reflect", "Border", "", None, 0)
    ],
    ("sample_trilinear, nearest", "with_gradient", True, "=True needs mode='linear', got mode='nearest'"),
    ("sample_pyramid", "grids", [], "1 to 16 tensors, got 0"),
    ("sample_pyramid", "grids", GRIDS * 9, "1 to 16 tensors, got 18"),
    ("sample_pyramid", "grids", torch.zeros(2, 2, 2, 2, 3), "sequence.*Tensor"),
    ("sample_pyramid", "grids", None, "sequence.*NoneType"),
    ("sample_pyramid", "grids", [GRIDS[0].double(), 1], r"\[1\] must be a torch.Tensor"),
    ("sample_pyramid", "grids", [GRIDS[0], GRIDS[0][0]], r"\[1\] must have shape"),
    ("sample_pyramid", "grids", [GRIDS[0], GRIDS[0][None]], r"\[1\] must have shape"),
    (
        "sample_pyramid",
        "grids",
        [GRIDS[0].expand(2, 2, 2, 2, 3), GRIDS[0].expand(3, 2, 2, 2, 3)],
        r"\[1\] .*\(2, X, Y, Z, C\)",
    ),
    ("sample_pyramid, sum", "grids", [GRIDS[0], torch.zeros(2, 2, 2, 4)], r"\[1\] must have 3 channels .*4"),
    ("sample_pyramid", "grids", [GRIDS[0], GRIDS[0].double()], r"\[1\] must be float32 as grids\[0\] is, got float64"),
    ("sample_pyramid", "grids", [GRIDS[0], GRIDS[0].to("meta")], r"\[1\] .*grids\[0\], cpu.*meta"),
    ("sample_pyramid", "grids", [GRIDS[0], GRIDS[0][:, :0]], r"\[1\] .*vertices"),
    ("sample_pyramid", "reduce", "mean", "'concat', 'sum'"),
    ("sample_pyramid", "reduce", np.zeros(3), "one of"),
    ("sample_pyramid", "mode", "cubic", "one of"),
    ("grid_sample, image", "grid", torch.zeros(1, 4, 4, 3), r"W_out, 2\)"),
    ("grid_sample", "input", torch.zeros(2, 3, 4), r"\(N, C, D, H, W\)"),
    ("grid_sample", "input", torch.zeros(1, 3, 4, 0, 4), r"voxel.*\(1, 3, 4, 0, 4\)"),
    ("grid_sample", "input", torch.zeros(1, 3, 4, 4, 4, dtype=torch.int32), "float32, .*int32"),
    ("grid_sample", "grid", torch.zeros(1, 1, 1, 5, 2), r"W_out, 3\)"),
    ("grid_sample", "mode", "cubic", "'cubic'"),
    ("grid_sample", "padding_mode", "wrap", "'wrap'"),
    ("trilinear_interpolate", "feats", torch.zeros(8, 3, 4), r"\(N, 8, C\).*\(8, 3, 4\)"),
    ("trilinear_interpolate", "feats", torch.zeros(8, 4, 8), "shape"),
    ("trilinear_interpolate", "feats", torch.zeros(0, 8, 0, dtype=torch.int64), "float32, .*, got int64$"),
    ("trilinear_interpolate", "points", torch.zeros(8, 4), r"\(8, 3\).*\(8, 4\)"),
    ("trilinear_interpolate", "points", torch.zeros(1, 3).double(), r"\(8, 3\), got \(1, 3\)"),
    ("composite", "rgb", torch.zeros(8, 0).double(), "at least one channel, got none"),
    *[
        (name, "ray_offsets", torch.zeros(0, dtype=torch.int64), r"R \+ 1 entries")
        for name in ("composite", "ray_weights", "alpha_weights", "select_samples")
    ],
    *[
        (name, argument, value, r"\[0, 1\]")
        for name, argument in (
            *((name, "min_transmittance") for name in ("composite", "ray_weights", "select_samples", "render_grid")),
            *((name, "min_weight") for name in ("select_samples", "render_grid")),
        )
        for value in (-1e-9, 1.001, math.nan)
    ],
    ("ray_weights", "min_transmittance", None, ""),
    ("ray_weights", "min_transmittance", torch.zeros(2), ""),
    ("composite, equal rays", "density", torch.zeros(16), r"shape \(R, S\) without ray_offsets, got \(16,\)"),
    ("alpha_weights, equal rays", "alpha", torch.zeros(16), r"shape \(R, S\) without ray_offsets"),
    *[
        ("composite, equal rays", argument, torch.zeros(2, 7, *more), r"shape \(2, 8(, C)?\), got \(2, 7")
        for argument, more in (("rgb", (3,)), ("t", ()), ("dt", ()))
    ],
    ("ray_weights, equal rays", "dt", None, r"a torch\.Tensor, got NoneType$"),
    ("inclusive_sum", "ray_offsets", torch.tensor([0, 9]), r"lie in 0\.\.8"),
    *[(name, "capacity", x, "") for name in ("march_rays", "select_samples", "march_levels") for x in (-1, 2.0, True)],
    ("march_rays", "capacity", 10**400, ""),
    *[
        (name, "step", x, "a positive, finite distance, got")
        for name in ("march_rays", "render_grid")
        for x in (0.0, -0.1, math.nan, math.inf, 1e-60, 1e60)
    ],
    ("march_rays", "step", "0.1", ""),
    ("march_rays", "occupied", torch.zeros(4, 0, 4, dtype=torch.bool), ""),
    ("render_grid", "occupied", torch.zeros(4, 0, 4, dtype=torch.uint8), "at least one cell"),
    (
        "march_rays",
        "occupied",
        ops.OccupancyBits(torch.zeros(0, 2, 2, dtype=torch.int64), (0, 5, 7)),
        "at least one cell",
    ),
    ("march_rays", "occupied", ops.OccupancyBits(WORDS.int(), CELLS), r"\.words must be int64"),
    *[
        (name, "occupied", ops.OccupancyBits(WORDS, (3, 4, 9)), r"\.words must have shape \(1, 1, 3\)")
        for name in ("march_rays", "render_grid")
    ],
    ("render_grid", "occupied", ops.OccupancyBits(WORDS.to("meta"), CELLS), "on the device of origins"),
    ("render_grid", "degree", 4, r"an int in 0\.\.3, got 4"),
    ("render_grid", "degree", 10**400, ""),
    ("render_grid", "grid", torch.zeros(4, 4, 4, 3), "at least 13 channels for degree 1, got 3"),
    ("render_grid", "density_scale", -1.0, "finite and not negative, got -1"),
    *[("render_grid", "density_shift", x, "") for x in (None, math.nan)],
    ("mlp", "weights", WEIGHTS[0], "a sequence"),
    ("mlp", "weights", WEIGHTS[:1], "2 to 16 tensors, got 1"),
    ("mlp", "weights", WEIGHTS * 9, "2 to 16 tensors, got 18"),
    ("mlp", "weights", [WEIGHTS[0][:, 1:], WEIGHTS[1]], r"\[0\] must have shape \(out, 5\) .*input"),
    ("mlp", "weights", [WEIGHTS[0], WEIGHTS[1].T], r"\[1\] must have shape \(out, 7\)"),
    ("mlp", "weights", [torch.zeros(192, 5), torch.zeros(3, 192)], r"1 to 128 rows.*\(192, 5\)"),
    ("mlp", "weights", [WEIGHTS[0].double(), WEIGHTS[1].double()[:0]], r"\[1\] must have 1 to 128 rows"),
    ("mlp", "weights", WEIGHTS, r"\[0\] must be float64 .*got float32"),
    ("mlp", "count", 5, r"a torch\.Tensor, got int"),
    ("mlp", "count", torch.tensor([1, 2]), r"shape \(1\)"),
    ("mlp", "count", torch.tensor(5.0), "int32 or int64, got float32"),
    ("mlp", "count", torch.tensor(5, device="meta"), "on the device of input"),
    *[
        (name, argument, value, message)
        for name in ("pack_info", "offsets_from_ray_index")
        for argument, value, message in (
            ("ray_index", torch.tensor([0, 1, 8]), r"lie in 0\.\.7, as there are 8 rays, got 0\.\.8"),
            ("ray_index", torch.tensor([0, 2, 1]), "not decrease"),
            ("ray_index", torch.tensor([[0]]), r"shape \(M\)"),
            ("ray_index", torch.tensor([0.5]), "int64 or int32, got float32"),
            ("rays", -1, "a number of rays, at least 0, got -1"),
            ("rays", True, "an int, got bool"),
        )
    ],
    ("ray_index_from_offsets", "ray_offsets", torch.tensor([0, 9]), r"0\.\.8, as samples has rows, got 0\.\.9"),
    ("ray_index_from_offsets", "samples", 5.0, "an int, got float"),
    ("importance_sample", "count", -1, "a number of distances, at least 0, got -1"),
    ("importance_sample", "offset", torch.rand(3, 5), r"shape \(3, 3\), got \(3, 5\)"),
    ("importance_sample", "offset", 0.5, r"a torch\.Tensor, got float"),
    ("importance_sample", "ray_offsets", torch.tensor([8, 3, 3, 0]), "not decrease"),
    ("integrate_rays", "grid", torch.zeros(2, 2, 2), r"\(X, Y, Z, C\) or \(B, X, Y, Z, C\), got \(2, 2, 2\)"),
    ("integrate_rays", "grid", torch.zeros(2, 0, 2, 1), "vertices"),
    ("integrate_rays", "origins", torch.zeros(8, 2), r"\(\.\.\., 3\), got \(8, 2\)"),
    ("integrate_rays", "near", "0", "a number, got '0'"),
    ("integrate_rays", "far", math.nan, "a number, got nan"),
    ("integrate_rays", "far", torch.zeros(7), r"expands to \(8,\), got \(7,\)"),
    ("integrate_rays, labels", "labels", torch.zeros(3, 4, 5), "uint8 or .*, got float"),
    ("integrate_rays, labels", "labels", torch.zeros(3, 4, 4).int(), r"\(3, 4, 5\), got \(3, 4, 4\)"),
    *[("integrate_rays, labels", "label_count", x, "int of at least 1|number of labels") for x in (0, None, 1.5)],
    *[("backproject_rays", "resolution", x, "") for x in ((3, 4), 0, (3, 4, 1.5))],
    ("backproject_rays", "values", torch.zeros(()), "got no rays"),
    ("first_crossing", "grid", torch.zeros(6, 5, 7, 2), r"\(6, 5, 7, 1\), got \(6, 5, 7, 2\)"),
    ("sample_distance", "bound", "middle", r"one of \['upper', 'lower'\], got 'middle'"),
    ("sample_distance", "aabb", torch.zeros(3), r"shape \(2, 3\), got \(3,\)"),
    ("sample_distance", "points", torch.zeros(8, 2), r"shape \(\.\.\., 3\), got \(8, 2\)"),
    ("pixel_colors", "pixel_averaging", "sRGB", r"one of \['linear_light', 'encoded'\], got 'sRGB'"),
]


@pytest.mark.parametrize(("name", "argument", "value", "message"), REFUSALS)
def test_a_value_that_does_not_fit_is_named(name, argument, value, message):
    row = CONTRACTS[name]
    arguments = row.arguments()
    if isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.dim() > 1:
        value = value.to(row.dtypes[0])
    with pytest.raises((TypeError, ValueError), match=rf"^{argument}.*{message}"):
        row.call(**arguments | {argument: value})
    assert_refused(lambda: row.call(**arguments | {argument: value}), rf"{argument}(\[\d\])?")


def grid_of(**options):
    return VoxelGrid(**{"resolution": 2, "channels": 1, "aabb": BOX} | options)


def pyramid_of(**options):
    return VoxelPyramid(**{"resolutions": (2, 4), "channels": 1, "aabb": BOX} | options)


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (grid_of, "fill", None),
        (grid_of, "init_std", 10**400),
        (grid_of, "channels", 10**400),
        (grid_of, "aabb", torch.zeros(2, 2, 3)),
        (pyramid_of, "resolutions", ["2", "4"]),
        (pyramid_of, "init_range", None),
    ],
)
def test_modules_name_an_argument_that_does_not_fit(make, name, value):
    assert_refused(lambda: make(**{name: value}), name)


def test_values_are_shown_in_one_short_line():
    assert shown("text") == "'text'"
    assert shown(np.zeros((2, 2))) == "array([[0., 0.], [0., 0.]])"
    assert len(shown(list(range(1000)))) <= 120
    assert shown(10**5000) == "a int"
    nested: list = []
    for _ in range(20_000):
        nested = [nested]
    assert shown(nested) == "a list"


def test_a_length_of_any_int_that_fits_a_float_is_one():
    density, offsets = torch.rand(4), torch.tensor([0, 4])
    for op in (ops.ray_weights, ops.ray_transmittance):
        assert torch.equal(op(density, 10**30, offsets), op(density, 1e30, offsets))
        with pytest.raises(TypeError, match=r"^dt must be a number, got 1000"):
            op(density, 10**400, offsets)
        with pytest.raises(TypeError, match=r"^min_transmittance must be a number, got 1000"):
            op(density, 0.1, offsets, min_transmittance=10**400)


@pytest.mark.parametrize("option", ["align_corners", "with_gradient"])
def test_options_that_are_neither_true_nor_false_are_named(option):
    for op, grid in ((ops.sample_trilinear, GRID), (ops.sample_pyramid, [GRID, GRID])):
        with pytest.raises(TypeError, match=rf"^{option} must be True or False, got tensor"):
            op(grid, POINTS, **{option: torch.zeros(2)})
    with pytest.raises(TypeError, match=r"^align_corners must be True or False, got tensor"):
        ops.grid_sample(GRID.movedim(-1, 0)[None], POINTS[None, None, None], align_corners=torch.zeros(2))
