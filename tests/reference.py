"""Slow, plain PyTorch versions of what the library computes, to compare against.

Written for clarity and in the caller's precision (pass float64). They share no code with the library; gradients of any
order come from autograd.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

# Three orders of a cell's corners (i, j, k along x, y, z) that published descriptions of the (N, 8, F) op use.
CORNER_ORDERS = {
    "4i+2j+k": lambda i, j, k: 4 * i + 2 * j + k,
    "4i+j+2k": lambda i, j, k: 4 * i + j + 2 * k,
    "i+2j+4k": lambda i, j, k: i + 2 * j + 4 * k,
}

SIDES = list(itertools.product((0, 1), repeat=3))


def sample_grid(
    grid: Tensor, points: Tensor, padding: str = "border", align_corners: bool = True, mode: str = "linear"
) -> Tensor:
    """Samples (X, Y, Z, C) at (N, 3) in the unit cube, like ``F.grid_sample`` in every padding, alignment and mode.

    With "periodic" padding, which that function does not have, vertex i is vertex i modulo the grid's size.
    """
    finite = torch.isfinite(points).all(dim=1)
    points = torch.where(finite[:, None], points, points.new_zeros(()))
    sizes = points.new_tensor(grid.shape[:3])
    last = sizes - 1
    u = points * last if align_corners else points * sizes - 0.5
    if padding == "reflection":
        low, span = (torch.zeros_like(last), last) if align_corners else (torch.full_like(last, -0.5), sizes)
        # A triangle wave. Where there is nothing between the faces, the coordinate stands still.
        wave = span - (torch.remainder(u - low, 2 * span.clamp(min=0.5)) - span).abs()
        u = torch.where(span > 0, low + wave, torch.zeros_like(u))
    if padding in ("border", "reflection"):
        # At and beyond the faces the coordinate stands still: the value of the face, no gradient.
        u = torch.where((u > 0) & (u < last), u, u.clamp(min=0).minimum(last).detach())
    elif padding == "zeros":
        # Nothing lies further out than this; it keeps the conversion to an integer defined.
        u = u.maximum(torch.full_like(last, -2)).minimum(last + 2)
    if mode == "nearest":
        u = u.detach().round()
    lower = u.detach().floor()
    fraction = u - lower
    total = grid.new_zeros(points.shape[0], grid.shape[3])
    for sides in SIDES:
        side = points.new_tensor(sides)
        vertex = lower + side
        if padding == "periodic":
            vertex = vertex.remainder(sizes)
        exists = ((vertex >= 0) & (vertex <= last)).all(dim=1) & finite
        weight = torch.where(side == 1, fraction, 1 - fraction).prod(dim=1)
        x, y, z = vertex.maximum(torch.zeros_like(last)).minimum(last).long().unbind(dim=1)
        total = total + torch.where(exists[:, None], weight[:, None] * grid[x, y, z], grid.new_zeros(()))
    return total


def sample_grid_with_gradient(grid: Tensor, points: Tensor, *options: object) -> tuple[Tensor, Tensor]:
    """The same (N, C), and its derivative in each point (N, C, 3)."""
    return with_slopes(lambda points: sample_grid(grid, points, *options), points)


def axis_weights(x: Tensor, size: int, kernel: str, padding: str = "border", align_corners: bool = True) -> Tensor:
    """The weights (N, size) of all vertices of an axis at coordinates (N,) in the unit interval, by a kernel.

    Vertices that a cubic kernel needs beyond the ends are replaced one by one, as in the bicubic ``F.grid_sample``; the
    coordinate of the other kernels is moved, as in its other modes.
    """
    last = size - 1
    u = x * last if align_corners else x * size - 0.5
    if kernel in ("nearest", "linear"):
        if padding == "reflection":
            low, span = (0.0, last) if align_corners else (-0.5, size)
            u = low + span - (torch.remainder(u - low, 2 * max(span, 0.5)) - span).abs() if span else u * 0
        if padding in ("border", "reflection"):
            u = torch.where((u > 0) & (u < last), u, u.clamp(0, last).detach())
    u = u.detach().round() if kernel == "nearest" else u
    lower = u.detach().floor()
    f = u - lower
    if kernel == "bspline":
        inner, outer = (lambda t: 2 / 3 - t**2 + t**3 / 2), (lambda t: (1 - t) ** 3 / 6)
    else:
        inner, outer = (lambda t: 1 - 2.25 * t**2 + 1.25 * t**3), (lambda t: -0.75 * (t - 2 * t**2 + t**3))
    taps = {
        "nearest": {0: torch.ones_like(f)},
        "linear": {0: 1 - f, 1: f},
    }.get(kernel) or {-1: outer(f), 0: inner(f), 1: inner(1 - f), 2: outer(1 - f)}
    total = x.new_zeros(len(x), size)
    for place, weight in taps.items():
        vertex = (lower + place).long()
        exists = (vertex >= 0) & (vertex <= last)
        if padding == "periodic":
            vertex = vertex.remainder(size)
        elif padding == "reflection" and size > 1:
            period = 2 * last if align_corners else 2 * size
            vertex = vertex.remainder(period)
            vertex = torch.where(vertex < size, vertex, period - vertex - (0 if align_corners else 1))
        weight = torch.where(exists, weight, 0 * weight) if padding == "zeros" else weight
        total = total + weight[:, None] * torch.nn.functional.one_hot(vertex.clamp(0, last), size)
    return total


def weights_of_points(points: Tensor, sizes: Sequence[int], *options: object) -> list[Tensor]:
    """The same for each axis of a grid and points (N, D), of which those that are not finite have none."""
    finite = torch.isfinite(points).all(dim=1, keepdim=True)
    points = torch.where(finite, points, points.new_zeros(()))
    return [axis_weights(points[:, a], size, *options) * finite for a, size in enumerate(sizes)]


def sample_separable(grid: Tensor, points: Tensor, *options: object) -> Tensor:
    """Samples (X, C), (X, Y, C) or (X, Y, Z, C) at (N, D) in the unit cube; options as of :func:`axis_weights`."""
    *sizes, _ = grid.shape
    total = grid.expand(len(points), *grid.shape)
    for weights in weights_of_points(points, sizes, *options):
        total = (weights.view(*weights.shape, *[1] * (total.dim() - 2)) * total).sum(1)
    return total


def splat_separable(values: Tensor, points: Tensor, sizes: Sequence[int], *options: object) -> Tensor:
    """Adds values (N, C) up in a grid of these sizes, each times the weights of all vertices."""
    total = values
    for weights in reversed(weights_of_points(points, sizes, *options)):
        total = weights.view(*weights.shape, *[1] * (total.dim() - 1)) * total.unsqueeze(1)
    return total.sum(0)


def bspline_coefficients(grid: Tensor, axes: int, padding: str = "border", align_corners: bool = True) -> Tensor:
    """Solves for what takes the values of (..., X, C) to (..., X, Y, Z, C) at the vertices, with a matrix an axis."""
    for axis in range(-axes - 1, -1):
        size = grid.shape[axis]
        vertices = torch.arange(size, dtype=torch.float64)
        vertices = vertices / max(size - 1, 1) if align_corners else (vertices + 0.5) / size
        matrix = axis_weights(vertices, size, "bspline", padding, align_corners)
        grid = (
            torch.linalg.solve(matrix, grid.movedim(axis, 0).flatten(1))
            .view(grid.movedim(axis, 0).shape)
            .movedim(0, axis)
        )
    return grid


def with_slopes(sample: Callable[[Tensor], Tensor], points: Tensor) -> tuple[Tensor, Tensor]:
    """What a function of points (N, D) samples, (N, C), and its derivative in each point (N, C, D)."""
    points = points if points.requires_grad else points.detach().requires_grad_()
    value = sample(points)
    slopes = [torch.autograd.grad(value[:, c].sum(), points, create_graph=True)[0] for c in range(value.shape[1])]
    return value, torch.stack(slopes, dim=1) if slopes else value.new_zeros(*value.shape, points.shape[1])


def interpolate_cells(feats: Tensor, points: Tensor, order: str = "4i+2j+k") -> Tensor:
    """The published trilinear formula on feats (N, 8, F) and points (N, 3) in [-1, 1], for any order of the corners."""
    u, v, w = ((points + 1) / 2).unbind(dim=1)
    total = feats.new_zeros(feats.shape[0], feats.shape[2])
    for i, j, k in SIDES:
        weight = (u if i else 1 - u) * (v if j else 1 - v) * (w if k else 1 - w)
        total = total + weight[:, None] * feats[:, CORNER_ORDERS[order](i, j, k)]
    return total


def lengths(dt: Tensor | float, density: Tensor) -> Tensor:
    """Lengths (M,) as they are, or one for all samples."""
    dt = torch.as_tensor(dt, dtype=density.dtype, device=density.device)
    assert dt.dim() == 0 or dt.shape == density.shape
    return dt.expand(density.shape)


def light(
    ray_offsets: Tensor,
    density: Tensor | None = None,
    dt: Tensor | float = 0.0,
    alpha: Tensor | None = None,
    min_transmittance: float = 1e-4,
) -> tuple[Tensor, Tensor]:
    """Weights (M,) and transmittances (M,) of samples of densities and lengths, or of alphas, one by one."""
    passing = 1 - alpha if density is None else torch.exp(-density * lengths(dt, density))
    nothing = passing.new_zeros(())
    weights, reaching = [nothing] * len(passing), [nothing] * len(passing)
    for first, last in itertools.pairwise(ray_offsets.tolist()):
        transmittance = passing.new_ones(())
        for m in range(first, last):
            if transmittance.item() < min_transmittance:
                break
            weights[m], reaching[m] = transmittance * (1 - passing[m]), transmittance
            transmittance = transmittance * passing[m]
    empty = passing.new_zeros(0)
    return (torch.stack(weights), torch.stack(reaching)) if weights else (empty, empty)


def composite_alphas(
    alpha: Tensor, rgb: Tensor, t: Tensor, ray_offsets: Tensor, min_transmittance: float = 0.0
) -> list[Tensor]:
    """Emission and absorption: rgb (R, C), opacity, depth (R,), weights (M,).

    A sample that less than ``min_transmittance`` of the light reaches, and all samples behind it, contribute nothing.
    """
    weights, _ = light(ray_offsets, alpha=alpha, min_transmittance=min_transmittance)
    assert weights.shape == t.shape == rgb.shape[:1]
    return [*(ray_sums(x, ray_offsets) for x in (weights[:, None] * rgb, weights, weights * t)), weights]


def composite(
    density: Tensor,
    rgb: Tensor,
    t: Tensor,
    dt: Tensor | float,
    ray_offsets: Tensor,
    min_transmittance: float = 0.0,
    distortion: bool = False,
) -> list[Tensor]:
    """The same from densities, and the distortion (R,) if wanted."""
    dt = lengths(dt, density)
    results = composite_alphas(1 - torch.exp(-density * dt), rgb, t, ray_offsets, min_transmittance)
    return [*results, spread_along_rays(results[3], t, dt, ray_offsets)] if distortion else results


def spread_along_rays(weights: Tensor, t: Tensor, dt: Tensor, ray_offsets: Tensor) -> Tensor:
    """The distortion of Mip-NeRF 360, eq. 15, with all pairs of samples, of which the later is farther away (R,)."""
    rays = []
    for first, last in itertools.pairwise(ray_offsets.tolist()):
        w, here = weights[first:last], t[first:last]
        apart = (here[:, None] - here[None, :]).tril()
        rays.append(2 * w @ apart @ w + (w.square() * dt[first:last]).sum() / 3)
    return torch.stack(rays) if rays else weights.new_zeros(0)


def decode(values: Tensor) -> Tensor:
    """The light that sRGB values stand for: IEC 61966-2-1."""
    return torch.where(values <= 0.04045, values / 12.92, ((values.clamp(min=0.04) + 0.055) / 1.055) ** 2.4)


def encode(light: Tensor) -> Tensor:
    """The other way."""
    return torch.where(light <= 0.0031308, 12.92 * light, 1.055 * light.clamp(min=0.003) ** (1 / 2.4) - 0.055)


def pixel_colors(rgb: Tensor, opacity: Tensor, background: Tensor, rays_per_pixel: int, pixel_averaging: str) -> Tensor:
    """The mean of rays' light, encoded, over a background: premultiplied rgb (R, 3), opacity (R,) -> (R / k, 3)."""
    rgb, opacity = rgb.unflatten(0, (-1, rays_per_pixel)), opacity.unflatten(0, (-1, rays_per_pixel))
    covered = opacity.mean(dim=1)[:, None]
    if pixel_averaging == "encoded":
        return rgb.mean(dim=1) + (1 - covered) * background
    opacity = opacity[..., None]
    straight = torch.where(opacity > 0, rgb / torch.where(opacity > 0, opacity, 1.0), 0.0)
    total = opacity.sum(dim=1)
    light = (opacity * decode(straight)).sum(dim=1) / torch.where(total > 0, total, 1.0)
    return covered * encode(light) + (1 - covered) * background


def march(
    origins: Tensor,
    directions: Tensor,
    near: Tensor,
    far: Tensor,
    occupied: Tensor,
    aabb: Tensor,
    step: float,
    offset: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tests every lattice position of every ray: positions (M, 3), t (M,), ray_index (M,), ray_offsets (R + 1,).

    Only positions inside the box count. Ours tells cells apart in float32: compare where no position lies within
    rounding of a cell's face, or of ``far``.
    """
    cells = origins.new_tensor(occupied.shape)
    positions, distances, ray_index, ray_offsets = [], [], [], [0]
    for ray in range(origins.shape[0]):
        for k in range(max(math.ceil((far[ray] - near[ray]).item() / step) + 1, 0)):
            t = near[ray] + (k + offset[ray]) * step
            if t >= far[ray]:
                break
            position = origins[ray] + t * directions[ray]
            cell = ((position - aabb[0]) / (aabb[1] - aabb[0]) * cells).floor()
            if not ((cell >= 0) & (cell < cells)).all():
                continue
            x, y, z = cell.long().tolist()
            if occupied[x, y, z]:
                positions.append(position)
                distances.append(t)
                ray_index.append(ray)
        ray_offsets.append(len(positions))
    whole = {"dtype": torch.int64, "device": origins.device}
    return (
        torch.stack(positions) if positions else origins.new_zeros(0, 3),
        torch.stack(distances) if distances else origins.new_zeros(0),
        torch.tensor(ray_index, **whole),
        torch.tensor(ray_offsets, **whole),
    )


def lens_points(rays: Tensor, model: str, terms: Mapping[str, float]) -> Tensor:
    """Where a lens images rays (N, 3) right, down and forward, by the formulas of OpenCV and COLMAP."""
    k = collections.defaultdict(float, terms)
    x, y, z = rays.unbind(-1)
    across = (x**2 + y**2 + 1e-60).sqrt()
    if model == "field_of_view":
        radius = torch.atan2(2 * across * math.tan(k["omega"] / 2), z) / k["omega"]
        return rays[:, :2] * (radius / across)[:, None]
    if model == "division":
        return rays[:, :2] * (2 / (z + (z**2 - 4 * k["k"] * across**2).sqrt()))[:, None]
    if model == "extended_unified":
        return rays[:, :2] / (k["alpha"] * (k["beta"] * across**2 + z**2).sqrt() + (1 - k["alpha"]) * z)[:, None]
    scale = torch.atan2(across, z) / across if "fisheye" in model else 1 / z
    x, y = x * scale, y * scale
    r2 = x**2 + y**2
    powers = {number: r2**number for number in range(1, 7)}
    if model == "rational":
        above, below = (1 + sum(k[f"k{low + i}"] * powers[i] for i in (1, 2, 3)) for low in (0, 3))
        radial = above / below
    else:
        radial = 1 + sum(k[f"k{i}"] * power for i, power in powers.items())
    u, v = (x * radial, y * radial) if model == "fisheye624" else (x, y)
    s = u**2 + v**2
    return torch.stack(
        (
            x * radial + 2 * k["p1"] * u * v + k["p2"] * (s + 2 * u**2) + k["s1"] * s + k["s2"] * s**2,
            y * radial + k["p1"] * (s + 2 * v**2) + 2 * k["p2"] * u * v + k["s3"] * s + k["s4"] * s**2,
        ),
        dim=-1,
    )


def lens_rays(points: Tensor, model: str, terms: Mapping[str, float]) -> Tensor:
    """The other way: Newton's method along the way from the centre, so that no step is large. Unit vectors (N, 3)."""

    def point(angles: Tensor) -> Tensor:
        return lens_points(ray_at_angle(angles), model, terms)

    derivative = torch.func.vmap(torch.func.jacrev(lambda one: point(one[None])[0]))
    angles = torch.zeros_like(points)
    for share in torch.linspace(0, 1, 11, dtype=points.dtype)[1:]:
        for _ in range(6):
            angles = angles + torch.linalg.solve(derivative(angles), share * points - point(angles))
    return ray_at_angle(angles)


def ray_at_angle(angles: Tensor) -> Tensor:
    """Unit vectors (N, 3) right, down and forward, at angles (N, 2) from the axis, with their directions."""
    angle = (angles.square().sum(dim=-1, keepdim=True) + 1e-60).sqrt()
    return torch.cat((angle.sin() / angle * angles, angle.cos()), dim=-1)


def ray_sums(values: Tensor, ray_offsets: Tensor) -> Tensor:
    """The sum of each ray's rows (R, ...)."""
    rows = [values[first:last].sum(0) for first, last in itertools.pairwise(ray_offsets.tolist())]
    return torch.stack(rows) if rows else values.new_zeros(0, *values.shape[1:])


def scan(values: Tensor, ray_offsets: Tensor, *, inclusive: bool, product: bool) -> Tensor:
    """Running sums or products along each ray (M, ...); zero in rows of no ray."""
    rows = [torch.zeros_like(x) for x in values]
    for first, last in itertools.pairwise(ray_offsets.tolist()):
        for m in range(first, last):
            ahead = values[first : m + inclusive]
            rows[m] = ahead.prod(dim=0) if product else ahead.sum(dim=0)
    return torch.stack(rows) if rows else torch.zeros_like(values)


def empty_distance(occupied: Tensor, max_distance: int = 255) -> Tensor:
    """How many cells away, along any axis, the nearest occupied cell is at most (X, Y, Z)."""
    cells = torch.cartesian_prod(*map(torch.arange, occupied.shape)).view(-1, 1, 3)
    apart = torch.cat([(cells - occupied.nonzero()).abs().amax(2), torch.full((len(cells), 1), max_distance)], dim=1)
    return apart.amin(1).view(occupied.shape).to(torch.uint8)


def pack_occupancy(occupied: Tensor) -> Tensor:
    """Words (X / 4, Y / 4, Z / 4) of 64 cells each, z first."""
    x, y, z = (-(-size // 4) for size in occupied.shape)
    cells = torch.zeros(4 * x, 4 * y, 4 * z, dtype=torch.int64)
    cells[tuple(map(slice, occupied.shape))] = occupied.long()
    cells = cells.view(x, 4, y, 4, z, 4).permute(0, 2, 4, 1, 3, 5).flatten(3)
    return (cells << torch.arange(64)).sum(-1)


def network(input: Tensor, weights: Sequence[Tensor], count: Tensor | None = None) -> Tensor:
    """Layers with ReLU between them; rows from ``count`` on are zero."""
    for layer, weight in enumerate(weights):
        input = (input if layer == 0 else input.relu()) @ weight.mT
    rows = len(input) if count is None else int(count)
    return torch.where((torch.arange(len(input)) < rows)[:, None], input, 0.0)


def ray_index_from_offsets(ray_offsets: Tensor, samples: int) -> Tensor:
    """The ray of each row; of those of no ray, that before them or the first one."""
    last = max(len(ray_offsets) - 2, 0)
    return torch.tensor([min(int((ray_offsets[1:] <= m).sum()), last) for m in range(samples)], dtype=torch.int64)


def draw(
    t_starts: Tensor, t_ends: Tensor, weights: Tensor, count: int, ray_offsets: Tensor, offset: Tensor | None = None
) -> Tensor:
    """Inverts each ray's distribution, one distance at a time (R, count); ``offset`` (R,) or (R, count) in [0, 1)."""
    rays = len(ray_offsets) - 1
    offset = torch.full((rays,), 0.5) if offset is None else offset
    offset = (offset[:, None] if offset.dim() == 1 else offset).expand(rays, count)
    drawn = torch.zeros(rays, count, dtype=torch.float64)
    for ray, (first, last) in enumerate(itertools.pairwise(ray_offsets.tolist())):
        masses = [weights[i].item() if 0 < weights[i] < math.inf else 0.0 for i in range(first, last)]
        if sum(masses) == 0:
            masses = [(t_ends[i] - t_starts[i]).item() for i in range(first, last)]
        for k in range(count if last > first else 0):
            left = (k + offset[ray, k].item()) / count * sum(masses)
            for row, mass in zip(range(first, last), masses, strict=True):
                if left < mass:
                    drawn[ray, k] = t_starts[row] + left / mass * (t_ends[row] - t_starts[row])
                    break
                left -= mass
    return drawn


def adam_step(
    param: Tensor,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    *,
    lr: float,
    step: int,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float = 0.0,
    l2_penalty: float = 0.0,
    rates: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The parameter and its moments after a step of Adam, with a share (C,) of the learning rate for each channel."""
    lr = lr if rates is None else lr * rates
    grad = grad + l2_penalty * param
    m, v = betas[0] * m + (1 - betas[0]) * grad, betas[1] * v + (1 - betas[1]) * grad**2
    direction = m / (1 - betas[0] ** step) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
    return (1 - lr * weight_decay) * param - lr * direction, m, v


def select(
    density: Tensor,
    positions: Tensor,
    t: Tensor,
    dt: Tensor | float,
    ray_offsets: Tensor,
    min_transmittance: float = 1e-4,
    min_weight: float = 1e-4,
    capacity: int | None = None,
) -> list[Tensor]:
    """The samples whose weight exceeds a limit, of the rays that fit: the fields of PackedSamples."""
    weights, _ = light(ray_offsets, density, dt, min_transmittance=min_transmittance)
    dt = lengths(dt, density)
    rays = len(ray_offsets) - 1
    kept = [
        [m for m in range(first, last) if weights[m] > min_weight]
        for first, last in itertools.pairwise(ray_offsets.tolist())
    ]
    ends = list(itertools.accumulate(map(len, kept), initial=0))
    fitting = rays if capacity is None else sum(end <= capacity for end in ends[1:])
    rows = torch.tensor(list(itertools.chain(*kept[:fitting])), dtype=torch.int64)
    spare = 0 if capacity is None else capacity - len(rows)
    ray_index = torch.tensor([ray for ray, some in enumerate(kept[:fitting]) for _ in some], dtype=torch.int64)
    return [
        torch.cat([positions[rows], positions.new_full((spare, 3), math.nan)]),
        torch.cat([t[rows], t.new_zeros(spare)]),
        torch.cat([dt[rows], dt.new_zeros(spare)]),
        torch.cat([ray_index, torch.full((spare,), max(rays - 1, 0))]),
        torch.tensor(ends).clamp(max=len(rows)),
        torch.tensor([fitting]),
    ]


def integrate_rays(
    grid: Tensor,
    origins: Tensor,
    directions: Tensor,
    near: Tensor | None = None,
    far: Tensor | None = None,
    labels: Tensor | None = None,
    label_count: int = 1,
) -> Tensor:
    """Integrates (X, Y, Z, C) along rays (N, 3) in the unit cube, over distances: between all faces, by two nodes."""
    if labels is not None:
        parts = [torch.where((labels == i)[..., None], grid, 0.0) for i in range(label_count)]
        return torch.stack([integrate_rays(part, origins, directions, near, far) for part in parts], dim=1)
    speed = directions.norm(dim=1, keepdim=True)
    unit = directions / speed
    lowest, highest = (torch.where(unit == 0, math.inf, (side - origins) / unit) for side in (0, 1))
    first, last = torch.minimum(lowest, highest), torch.maximum(lowest, highest)
    between = (origins >= 0) & (origins <= 1)
    first = torch.where(unit == 0, torch.where(between, -math.inf, math.inf), first).amax(1, keepdim=True)
    begin = first.maximum(torch.zeros_like(speed) if near is None else near[:, None] * speed)
    end = last.amin(1, keepdim=True)
    end = end if far is None else end.minimum(far[:, None] * speed)
    hit = begin < end
    begin, end = torch.where(hit, begin, 0.0), torch.where(hit, end, 0.0)
    faces = [
        torch.where(unit[:, [a]] == 0, 0.0, (torch.arange(size) / max(size - 1, 1) - origins[:, [a]]) / unit[:, [a]])
        for a, size in enumerate(grid.shape[:3])
    ]
    cuts = torch.cat([begin, *(x.maximum(begin).minimum(end) for x in faces), end], dim=1).sort(dim=1).values
    total = origins.new_zeros(len(origins), grid.shape[3])
    half, middle = cuts.diff(dim=1) / 2, (cuts[:, 1:] + cuts[:, :-1]) / 2
    for node in (-(3**-0.5), 3**-0.5):
        points = origins[:, None] + (middle + node * half)[..., None] * unit[:, None]
        sampled = sample_grid(grid, points.flatten(0, 1)).unflatten(0, half.shape)
        total = total + (half[..., None] * sampled).sum(1)
    return total


def backproject_rays(values: Tensor, *rays: Tensor, size: Sequence[int], **limits: Tensor) -> Tensor:
    """The adjoint of :func:`integrate_rays`, for grids of a size."""
    grid = values.new_zeros(*size, values.shape[-1], requires_grad=True)
    integrals = integrate_rays(grid, *rays, **limits)
    return torch.autograd.grad(integrals, grid, values, create_graph=True)[0]


def first_crossing(grid: Tensor, origins: Tensor, directions: Tensor, level: float) -> Tensor:
    """Finds where rays first meet a level of (X, Y, Z, 1) at t in 0..4; 7.0 where they do not."""

    def above(t: Tensor) -> Tensor:
        points = origins[:, None] + t[..., None] * directions[:, None]
        inside = ((points >= 0) & (points <= 1)).all(-1)
        values = sample_grid(grid, points.flatten(0, 1))[:, 0].unflatten(0, t.shape) - level
        return torch.where(inside, values, math.nan)

    with torch.no_grad():
        t = torch.linspace(0, 4, 8001, dtype=grid.dtype).expand(len(origins), -1)
        values = above(t)
        changes = values[:, 1:] * values[:, :-1] <= 0
        hit, place = changes.any(1), changes.double().argmax(1, keepdim=True)
        low, high = t.gather(1, place), t.gather(1, place + 1)
        falls = values.gather(1, place) > 0
        for _ in range(60):
            middle = (low + high) / 2
            beyond = (above(middle) <= 0) == falls
            low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    root = low[:, 0].requires_grad_()
    with torch.enable_grad():
        values = sample_grid(grid, origins + root[:, None] * directions)[:, 0] - level
        (slope,) = torch.autograd.grad(values.sum(), root, retain_graph=True)
    return torch.where(hit, root.detach() - values / torch.where(hit, slope, 1.0), 7.0)
