"""Runs every kernel of the ops once, small enough for compute-sanitizer.

    compute-sanitizer --tool memcheck|racecheck|initcheck python tests/sanitize_ops.py [FUNCTION ...]

Names of functions below run only those: racecheck takes minutes for all. It checks nothing itself: the tests do.
"""

from __future__ import annotations

import itertools
import os
import sys

import torch
from image_ops import render_baked_image, render_pyramid_image

from voxelfield import _library, ops
from voxelfield.grids.sparse_grid import SparseGrid
from voxelfield.ops._internal.cameras import pixel_rays
from voxelfield.ops._internal.color import append_view, pixel_color_error, pixel_colors, sample_color_error
from voxelfield.ops._internal.fields import march_visible
from voxelfield.ops._internal.optim import (
    active_tiles,
    grid_adam_,
    grid_total_variation_grad_,
    pack_vertices,
    touched_vertices,
    unpack_vertices,
)
from voxelfield.ops._internal.rays import empty_distance
from voxelfield.ops._internal.stencil import accumulate_trilinear_, atlas_coordinates, sum_duplicates_
from voxelfield.warps.nested_boxes import NestedBoxes

BOXES = NestedBoxes(((-0.5, -0.5, -0.5), (0.5, 0.5, 0.5)), 3).op_arguments
LEVELS = [(1,), (4,), (12,), (28,), (33,), (64,), (3, 1), (12, 8)]  # channels of each level
# padding, align_corners, nearest, batch
LOOKUPS = [(0, True, False, 1), (1, True, False, 1), (1, False, False, 2), (2, True, True, 1), (3, True, False, 1)]


def run_grid_ops(
    dtype: torch.dtype, channels: tuple[int, ...], with_gradient: bool, lookup: tuple[int, bool, bool, int]
):
    """Samples, splats by every method, and differentiates in the points."""
    ops, device = torch.ops.voxelfield, torch.device("cuda")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    padding, align_corners, nearest, batch = lookup
    resolutions = [(13, 9, 18), (5, 1, 33)][: len(channels)]
    grids = [torch.randn(batch, *r, c, device=device, dtype=dtype) for r, c in zip(resolutions, channels, strict=True)]
    points = torch.rand(batch, 260, 3, device=device, dtype=wide) * 1.4 - 0.2
    points[:, 3] = float("nan")
    sets = (4,) if with_gradient else ()
    values = torch.randn(*sets, batch, 260, sum(channels), device=device, dtype=dtype)
    options = padding, align_corners, nearest, False, with_gradient
    ops.sample_trilinear(grids, points, *options)
    ops.point_gradient_trilinear(values, grids, points, *options)
    if not with_gradient:
        box = torch.tensor(((-1, -1, -1), (2, 2, 2)), device=device, dtype=wide)
        ops.sample_in_box(grids[0], points, box, padding)
        ops.place_in_box(points[0], box)
    sizes = [number for r, c in zip(resolutions, channels, strict=True) for number in (*r, c)]
    for method in (1, 2, 3):
        ops.splat_trilinear(values, points, sizes, *options, method)


def run_all_grid_ops():
    """Runs the grid ops in every dtype, with all numbers of channels and lookups, with and without derivatives."""
    for arguments in itertools.product((torch.float32, torch.float16, torch.float64), LEVELS, (False, True), LOOKUPS):
        run_grid_ops(*arguments)


def run_wide_rows():
    """Samples 16-bit rows whose words begin and end anywhere, with either padding."""
    points = torch.rand(1, 261, 3, device="cuda") * 1.4 - 0.2
    points[:, 3] = float("nan")
    for dtype, channels, depth, padding in itertools.product(
        (torch.float16, torch.bfloat16), (7, 10, 12, 28, 60, 64), (1, 4, 5, 8), (0, 1)
    ):
        grid = torch.randn(1, 3, 4, depth, channels, device="cuda").to(dtype)
        torch.ops.voxelfield.sample_trilinear([grid], points, padding, True, False, False, False)


def run_crowded_tiles():
    """Splats so many points into one tile that it is split and its entries are sorted by a block; adds them to sums."""
    for count, channels in ((9000, 4), (5000, 12)):
        points = torch.rand(1, count, 3, device="cuda") * 0.02 + 0.4
        values = torch.randn(1, count, channels, device="cuda")
        for method in (0, 1, 2, 3):
            sizes = [20, 20, 20, channels]
            torch.ops.voxelfield.splat_trilinear(values, points, sizes, 0, True, False, False, False, method)
        for narrow in (values, values.half()):
            sums = [torch.zeros(1, size, size, size, channels, device="cuda") for size in (3, 40)]
            torch.ops.voxelfield.accumulate_trilinear_(sums, torch.cat([narrow] * 2, -1), points, 0, True, False, [], 0)
            slabs = [torch.zeros(1, 20, 20, channels, device="cuda") for _ in range(2)]
            spans = [(7, 20), (8, 20)]
            accumulate_trilinear_(slabs, torch.cat([narrow[0]] * 2, -1), points[0], slabs=spans)


def run_line_ops():
    """Integrates along rays of all kinds, there and back, with labels, in a batch and an image, and finds crossings."""
    device = torch.device("cuda")
    for dtype, channels, batch in itertools.product((torch.float32, torch.float64), (1, 3, 8), ((), (2,))):
        grid = torch.randn(*batch, 9, 1, 17, channels, device=device, dtype=dtype)
        origins = torch.rand(*batch, 300, 3, device=device, dtype=dtype) * 3 - 1
        directions = torch.rand(*batch, 300, 3, device=device, dtype=dtype) - origins
        directions[..., 3, :], directions[..., 4, 1:] = float("nan"), 0
        for labels in (None, torch.randint(-1, 4, grid.shape[-4:-1], device=device)):
            leaves = [x.detach().requires_grad_() for x in (grid, origins, directions)]
            options = {} if labels is None else {"labels": labels, "label_count": 3}
            for deterministic in (False, True):
                torch.use_deterministic_algorithms(deterministic)
                ops.integrate_rays(*leaves, far=0.9, **options).sum().backward()
            torch.use_deterministic_algorithms(False)
        ops.first_crossing(grid[..., :1].contiguous(), origins, directions, 0.1)
    grid = torch.randn(9, 8, 17, 1, device=device, requires_grad=True)
    targets = torch.rand(70, 67, 3, device=device, requires_grad=True)
    ops.integrate_rays(grid, targets.new_full((3,), -1.0), targets).sum().backward()


def run_cell_ops():
    """Runs the ops on points that bring their own cells."""
    ops = torch.ops.voxelfield
    for dtype in (torch.float32, torch.float16):
        feats = torch.randn(300, 8, 12, device="cuda", dtype=dtype)
        points = torch.rand(300, 3, device="cuda") * 2 - 1
        for with_gradient in (False, True):
            values = torch.randn((4,) * with_gradient + (300, 12), device="cuda", dtype=dtype)
            ops.interpolate_cells(feats, points, with_gradient)
            ops.splat_cells(values, points, with_gradient)
            ops.point_gradient_cells(values, feats, points, with_gradient)


def run_rendering():
    """Renders few rays and many, there and back, and an image whose last tiles are cut."""
    kernels, device = torch.ops.voxelfield, torch.device("cuda")
    aabb = torch.tensor([[-1.0] * 3, [1.0] * 3], device=device)
    occupied = torch.rand(9, 8, 10, device=device) < 0.5
    cells = (*ops.pack_occupancy(occupied), aabb), (empty_distance(occupied, 4), occupied.shape, aabb)
    view = torch.eye(4, device=device), torch.full((4,), 10.0, device=device), None
    camera = *view, 13, 7, 1, torch.ones(3, device=device)
    for dtype, degree, channels, cell_form in itertools.product(
        (torch.float32, torch.float16, torch.bfloat16), range(4), (49, 52, 56), cells
    ):
        grid = torch.randn(9, 10, 11, channels, device=device).to(dtype)
        numbers = 0.1, degree, 5.0, 0.0, 1e-4, 1e-4
        for count in (50, 70000):
            directions = torch.nn.functional.normalize(torch.randn(count, 3, device=device), dim=-1)
            near, far = torch.zeros(count, device=device), torch.full((count,), 1.0, device=device)
            rays = torch.rand(count, 3, device=device) - 0.5, directions, near, far, near, *cell_form
            rendered = kernels.render_grid(*rays, grid, None, aabb, *numbers)
            kernels.render_grid_backward(*rendered, *rendered, *rays, grid, aabb, *numbers)
        kernels.render_grid_image(*camera, *cell_form, grid, grid[..., 0].contiguous(), aabb, *numbers)


def run_pyramid_marches():
    """Marches few rays and many through pyramids, and renders an image whose last tiles are cut."""
    device = torch.device("cuda")
    aabb = torch.tensor([[-1.0] * 3, [1.0] * 3], device=device)
    occupied = torch.rand(9, 8, 10, device=device) < 0.5
    camera = torch.eye(4, device=device), torch.full((4,), 10.0, device=device), 13, 7
    background = torch.ones(3, device=device)
    for count, width, hidden in itertools.product((1, 3, 8), (64, 128), (1, 2)):
        levels = [torch.randn(5 + level, 4, 9, 4, device=device).half() for level in range(count)]
        sizes = [4 * count, width, 16], [32, *[width] * hidden, 3]
        networks = [[torch.randn(b, a, device=device) / 8 for a, b in itertools.pairwise(s)] for s in sizes]
        field = levels, aabb, networks[0]
        whole = {"levels": levels, "aabb": aabb, "density_weights": networks[0], "color_weights": networks[1]}
        for cells in (ops.pack_occupancy(occupied), empty_distance(occupied, 4)):
            for rays in (50, 70000):
                directions = torch.nn.functional.normalize(torch.randn(rays, 3, device=device), dim=-1)
                ends = torch.zeros(rays, device=device), torch.full((rays,), 1.0, device=device)
                walk = torch.rand(rays, 3, device=device) - 0.5, directions, *ends, cells, aabb
                march_visible(*walk, *field, step=0.05, density_initial=1.0, max_samples_per_ray=8, capacity=3 * rays)
            render_pyramid_image(
                *camera, cells, aabb, **whole, background=background, step=0.05, density_initial=1.0, degree=3
            )


def run_sparse_grids():
    """Places points in atlases, shares copies of vertices, and marches through pyramids with sparse levels."""
    device = torch.device("cuda")
    aabb = torch.tensor([[-1.0] * 3, [1.0] * 3], device=device)
    cells = ops.pack_occupancy(torch.rand(9, 8, 10, device=device) < 0.5)
    camera = torch.eye(4, device=device), torch.full((4,), 10.0, device=device), 13, 7
    background = torch.ones(3, device=device)
    sparse = SparseGrid((30, 20, 25), 4, aabb, device=device)
    sparse.allocate(torch.rand(9, 8, 10, device=device) < 0.3, aabb)
    atlas = torch.randn_like(sparse.features)
    for count in (0, 1, 300, 70_000):
        points = torch.rand(count, 3, device=device) * 1.4 - 0.2
        points[:1] = float("nan")
        atlas_coordinates(points, sparse.blocks, atlas.shape[:3])
    rows, vertices = atlas.numel() // 4, 500
    copies = torch.randint(-3, rows + 3, (4 * vertices,), device=device, dtype=torch.int32)
    begins = torch.arange(0, 4 * vertices + 1, 4, device=device, dtype=torch.int32)
    sum_duplicates_(atlas, copies, begins)
    sum_duplicates_(atlas, copies.clamp(0, rows - 1), begins)
    table = torch.empty(-(-rows // 128), 5, device=device, dtype=torch.int32)
    touched_vertices(atlas, table)
    sum_duplicates_(atlas, copies, begins, table)
    sum_duplicates_(atlas, copies.clamp(0, rows - 1), begins, table)
    levels, blocks = [torch.randn(5, 4, 9, 4, device=device).half(), atlas.half()], [None, sparse.blocks]
    networks = [
        [torch.randn(b, a, device=device) / 8 for a, b in itertools.pairwise(sizes)]
        for sizes in ([8, 64, 16], [32, 64, 3])
    ]
    field = levels, aabb, networks[0]
    for rays in (50, 70_000):
        directions = torch.nn.functional.normalize(torch.randn(rays, 3, device=device), dim=-1)
        ends = torch.zeros(rays, device=device), torch.full((rays,), 1.0, device=device)
        walk = torch.rand(rays, 3, device=device) - 0.5, directions, *ends, cells, aabb
        march_visible(
            *walk, *field, blocks=blocks, step=0.05, density_initial=1.0, max_samples_per_ray=8, capacity=3 * rays
        )
    whole = {"levels": levels, "blocks": blocks, "aabb": aabb, "density_weights": networks[0]}
    shading = {"color_weights": networks[1], "degree": 3, "background": background}
    render_pyramid_image(*camera, cells, aabb, **whole, **shading, step=0.05, density_initial=1.0)
    for width in (8, 16):
        number = atlas[..., 0].numel() // 512
        values = torch.zeros(512 * number, width // 2, device=device, dtype=torch.uint8)
        first = 512 * torch.arange(number, device=device, dtype=torch.int32)
        side = torch.full((number,), 8, device=device, dtype=torch.uint8)
        stored = {"density": atlas[..., 0].abs().to(torch.uint8), "log_low": -2.0, "log_step": 0.1, "values": values}
        stored |= {"first": first, "side": side, "low": torch.zeros(width, device=device), "blocks": sparse.blocks}
        stored |= {"ranges": torch.zeros(number, 2, width, device=device, dtype=torch.uint8), "aabb": aabb}
        stored |= {"extent": torch.ones(width, device=device), "background": background, "degree": 3}
        render_baked_image(*camera, cells, aabb, **stored, clip=aabb, step=0.05)


def run_optimizer_ops():
    """Lists and copies tiles, adds total variation and takes steps of Adam, over whole grids and listed tiles."""
    for channels in (1, 2, 3, 4, 33, 140):
        shape = (9, 6, 20, channels)
        ids, count = active_tiles(torch.rand(30, 4, 50, device="cuda") < 0.1, shape[:3])
        arrays = [torch.rand(shape, device="cuda") for _ in range(4)]
        ids[-1] = -1
        for grid in (arrays[0], arrays[0].half()):
            table = torch.empty(len(ids), 5, dtype=torch.int32, device="cuda")
            touched_vertices(arrays[1], table, ids, every=True)
            table[:, 4] = table[:, 4].cumsum(0) - table[:, 4]
            packed = grid.new_empty(100, channels)
            pack_vertices(grid, table, packed, ids)
            unpack_vertices(packed, table, grid, ids)
        rates = None, torch.rand(channels, device="cuda")
        lists, skipped = ((None, None), (ids, count)), ("none", "without gradient", "not in a table")
        for tiles, skips, own in itertools.product(lists, skipped, rates):
            grid_total_variation_grad_(arrays[3], arrays[0], 1.0, tiles=tiles[0], tile_count=tiles[1])
            table = torch.empty(9 if tiles[0] is None else len(ids), 5, dtype=torch.int32, device="cuda")
            touched_vertices(arrays[3], table, tiles[0])
            grid_adam_(
                *([x] for x in arrays),
                [0.1],
                [1],
                working=[torch.empty(shape, device="cuda", dtype=torch.float16)],
                tiles=[tiles[0]],
                tile_counts=[tiles[1]],
                touched=[table if skips == "not in a table" else None],
                channel_rates=[own],
                skip_untouched=skips != "none",
            )


def run_ray_ops():
    """Marches, selects and composites: rays that fit and that do not, few and many, short and long."""
    box = torch.tensor([[-1.0, -1.0, -1.0], [1.0, 1.0, 1.0]], device="cuda")
    bits = ops.pack_occupancy(torch.rand(19, 33, 40, device="cuda") < 0.4)
    for count, step, capacity in ((0, 0.1, 50), (7, 0.01, 3000), (300, 0.02, 4000), (70_000, 0.3, 200_000)):
        origins = torch.rand(count, 3, device="cuda") * 2 - 1
        directions = torch.nn.functional.normalize(torch.randn(count, 3, device="cuda"), dim=-1)
        near, far = torch.zeros(count, device="cuda"), torch.rand(count, device="cuda")
        samples = ops.march_rays(origins, directions, near, far, bits, box, step, capacity=capacity)
        density = torch.rand(capacity, device="cuda") / step
        packed = samples.positions, samples.t, samples.dt, samples.ray_offsets
        for kept in (capacity // 8, capacity):
            ops.select_samples(density, *packed, capacity=kept)
        ops.ray_weights(density, samples.dt, samples.ray_offsets)
        ops.ray_transmittance(density, samples.dt, samples.ray_offsets)
        run_alpha_ops(torch.rand(capacity, device="cuda"), samples.t, samples.ray_offsets)
        density.requires_grad_()
        for distortion, channels, trained in itertools.product((False, True), (3, 1, 9), (False, True)):
            rgb = torch.rand(capacity, channels, device="cuda", requires_grad=True)
            t, dt = (x.detach().requires_grad_(trained) for x in packed[1:3])
            result = ops.composite(density, rgb, t, dt, packed[3], distortion=distortion)
            weights = ops.ray_weights(density, dt, packed[3])
            torch.stack([x.sum() for x in (*result, weights) if x is not None]).sum().backward()


def run_alpha_ops(alpha, t, ray_offsets):
    """Composites alphas and adds up rows of one and of several columns, both ways."""
    ops.alpha_transmittance(alpha, ray_offsets)
    rgb = torch.rand(len(alpha), 3, device="cuda", requires_grad=True)
    alpha.requires_grad_()
    result = ops.composite_alphas(alpha, rgb, t, ray_offsets)
    sums = ops.sum_along_rays(rgb, ray_offsets, ops.alpha_weights(alpha, ray_offsets))
    scans = [f(x, ray_offsets) for f in (ops.exclusive_sum, ops.inclusive_prod) for x in (alpha, rgb)]
    totals = [x.sum() for x in (*result, sums, ops.sum_along_rays(alpha, ray_offsets), *scans) if x is not None]
    torch.stack(totals).sum().backward()


def run_misleading_contents():
    """Offsets, indices and counts that point outside: kernels must stay within their tensors all the same."""
    kernels, far = torch.ops.voxelfield, torch.iinfo(torch.int64).max
    for count, rays in ((90, 4), (5000, 700)):
        density, t, dt = (torch.rand(count, device="cuda") for _ in range(3))
        rgb = torch.rand(count, 3, device="cuda")
        for low, high in ((0, 3 * count), (-count, count), (-far, far)):
            offsets = torch.randint(low, high, (rays + 1,), device="cuda")
            for distortion in (False, True):
                inputs = density.requires_grad_(), rgb.requires_grad_(), t, dt, offsets
                result = ops.composite(*inputs, distortion=distortion)
                torch.cat([x.flatten() for x in result if x is not None]).sum().backward()
            ops.ray_weights(density, dt, offsets)
            for capacity in (0, count // 8, 3 * count):
                ops.select_samples(density.detach(), rgb.detach(), t, dt, offsets, capacity=capacity)
            index = torch.randint(low, high, (count,), device="cuda")
            append_view(torch.rand(count, 16, device="cuda").half(), rgb.detach()[:rays], index, 3)
            colors = rgb.detach().requires_grad_()
            sample_color_error(t, colors, index, rgb.detach()[:rays], 3, rays_kept=index[0]).backward()
            pixel_color_error(colors, rgb.detach(), rays_per_pixel=3, rays_kept=index[0]).backward()
            images = torch.zeros(2, 5, 7, 4, dtype=torch.uint8, device="cuda")
            poses, lenses = torch.eye(4, device="cuda").repeat(2, 1, 1), torch.ones(2, 4, device="cuda")
            box = torch.tensor([[-1.0] * 3, [1.0] * 3], device="cuda")
            for side in (1, 2, 3):
                pixel_rays(images, index, poses, lenses, box, supersampling=side)
            # What a counting op might have returned, but did not.
            kept, counts = (torch.randint(-(2**31), 2**31, (n,), device="cuda").int() for n in (count, rays))
            sums = torch.randint(low, high, (-(-rays // 64),), device="cuda")
            inputs = rgb.detach(), t, dt, offsets
            kernels.pack_visible_samples(*inputs, kept, counts, sums, count)
            slots = torch.rand(rays, 6, device="cuda")
            walk = (*torch.rand(2, rays, 3, device="cuda"), *torch.rand(3, rays, device="cuda"))
            for boxes in ([], BOXES):
                kernels.pack_slots(*walk, slots, counts, sums, 0.1, boxes, count, slots)
            kernels.cut_rays(*walk, BOXES, 0.1)
            cells, boxes = torch.rand(2, 5, 6, 7, device="cuda") < 0.5, torch.cat((box.view(1, 6), 2 * box.view(1, 6)))
            for step, cone_angle in ((0.0, 0.0), (0.1, 0.0), (0.1, 0.1)):
                in_levels = *walk[:4], cells, boxes, step, cone_angle, 50
                kernels.count_level_intervals(*in_levels)
                kernels.place_level_intervals(*in_levels, offsets, count)


def run_losses():
    """Makes pixels of rays and judges them and samples, few and more than a launch's blocks take at once."""
    for pixels, rays_per_pixel, pixel_averaging in itertools.product(
        (0, 1, 300, 400_000), (1, 4), ("linear_light", "encoded")
    ):
        rays = pixels * rays_per_pixel
        rgb, truth = torch.rand(rays, 3, device="cuda", requires_grad=True), torch.rand(pixels, 3, device="cuda")
        opacity = torch.ones(rays, device="cuda", requires_grad=True)
        for background in (truth, torch.ones(3, device="cuda")):
            colors = pixel_colors(rgb, opacity, background, rays_per_pixel, pixel_averaging=pixel_averaging)
            rays_kept = torch.tensor(rays // 2, device="cuda")
            pixel_color_error(colors, truth, rays_per_pixel=rays_per_pixel, rays_kept=rays_kept).backward()
        index = torch.arange(rays, device="cuda")
        sample_color_error(opacity.detach(), rgb, index, truth, rays_per_pixel, rays_kept=rays_kept).backward()


def run_networks():
    """Runs the multilayer perceptron with part of the rows, in its variants for widths, sizes of rows and layers."""
    ops = torch.ops.voxelfield
    # The last one's weights do not fit shared memory.
    few, deep = ((24, 64, 16), (32, 64, 64, 3), (33, 16, 13), (16, 32, 40), (40, 128, 128, 5)), (8, *[64] * 6, 8)
    # On sm_90a, a kernel of its own, whose blocks take turns of 128 rows.
    color = (32, 128, 128, 128, 3)
    for sizes in (*few, deep, (32, *[128] * 9, 3), color):
        rows = 20_000 if sizes == color else 260
        input = torch.randn(rows, sizes[0], device="cuda").half()
        grad = torch.randn(rows, sizes[-1], device="cuda").half()
        weights = [torch.randn(out, into, device="cuda") for into, out in itertools.pairwise(sizes)]
        count = torch.tensor(rows - 60, device="cuda")
        ops.mlp(input, weights, count)
        ops.mlp_backward(grad, input, weights, count)


PARTS = (
    run_all_grid_ops,
    run_wide_rows,
    run_crowded_tiles,
    run_line_ops,
    run_cell_ops,
    run_optimizer_ops,
    run_ray_ops,
    run_misleading_contents,
    run_rendering,
    run_pyramid_marches,
    run_sparse_grids,
    run_networks,
    run_losses,
)

if __name__ == "__main__":
    wanted = sys.argv[1:] or [part.__name__ for part in PARTS]
    if unknown := set(wanted) - {part.__name__ for part in PARTS}:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}")
    # Accesses beyond a tensor are seen only if what follows it is not memory of torch's own allocator.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    _library.ensure_loaded("cuda")
    for part in PARTS:
        if part.__name__ in wanted:
            part()
    torch.cuda.synchronize()
    print("ran", ", ".join(wanted))
