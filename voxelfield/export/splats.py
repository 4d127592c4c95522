"""A field as 3D Gaussians: the moments of the light that training cameras see in each voxel, then fitted to images."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.config import Count, Natural, Range
from voxelfield.export.lattice import in_chunks, warped_voxels
from voxelfield.export.mesh import upright
from voxelfield.export.registry import ExportFormat, ExportSource, Option, file_format
from voxelfield.export.splat_file import Splats, save_splats
from voxelfield.export.splat_rendering import MAX_ALPHA, MIN_ALPHA, render_splats
from voxelfield.fields.decoders import spherical_harmonics
from voxelfield.fields.harmonics import fit_harmonics, products, symmetric
from voxelfield.foundation.checks import check_at_least_one, check_not_negative
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.models.model import Model
from voxelfield.ops.ray_sums import exclusive_sum
from voxelfield.progress import tracked
from voxelfield.rendering.cameras import Cameras, check_not_empty
from voxelfield.rendering.render import render
from voxelfield.rendering.rigid import quaternions

logger = logging.getLogger(__name__)

_RAYS_PER_SPLAT = 4
_CHUNK = 1 << 16

# Voxels are enlarged until the brightest ones, one for each Gaussian, have this fraction of all light, or so few are
# left.
_KEPT_LIGHT = 0.95
_FEWEST_VOXELS = 4
# A voxel counts as if it had this much more light, spread evenly: few rays do not determine a shape.
_EVEN_LIGHT = 0.5

# Fitting: sides of the windows, which are cut from images of the cameras' pixels divided by one of these numbers.
_WINDOW = 192
_ZOOMS = (1, 2, 4)
# Pixels for each Gaussian that all windows together have, and the least number of windows.
_PIXELS_PER_SPLAT, _MIN_STEPS = 40, 100
SpzVersion = Annotated[int, Range(3, 4)]
# A level of detail has this many times fewer Gaussians than the one before it.
_LEVEL_RATIO = 4
# Of Adam, at first: centres in voxels, logarithms of scales, quaternions, logits, coefficients.
_RATES = (0.03, 0.03, 0.01, 0.1, 0.01)
_FINAL_RATE = 0.1


def splats_of(model: Model, cameras: Cameras, *, count: int = 1_000_000, fit_steps: int | None = None) -> Splats:
    """Converts the part of a field that cameras see into 3D Gaussians, one per voxel.

    Each Gaussian has the mean and the covariance of the light that comes from its voxel and its neighbours, weighted by
    their distance, so it is as flat as the surface there; in nested boxes, voxels and Gaussians grow outwards. Its
    opacity follows from the area that the light covers in the cameras' images, and its colour is a least-squares fit
    of spherical harmonics to the colours seen. :func:`fit_splats` then refines all of them.

    Args:
        model: The field with its occupied cells and its sampling, such as
            :attr:`voxelfield.trained.trained_model.TrainedModel.model`.
        cameras: The training cameras, on any device; lenses are ignored.
        count: Largest number of Gaussians; the voxels that cameras see most are kept.
        fit_steps: Steps in which they are fitted to images of the field; None: in proportion to their number.

    Returns:
        The Gaussians, on the field's device.

    Raises:
        ValueError: A number is out of range, there are no cameras, they see nothing, or colours depend on more than
            position and direction.
    """
    check_at_least_one("count", count)
    if fit_steps is not None:
        check_not_negative("fit_steps", fit_steps)
    check_not_empty(cameras)
    if inputs := (*model.field.extra_inputs, *model.field.density_inputs):
        raise ValueError(f"field must depend on position and direction alone, got one that needs {', '.join(inputs)}")
    cameras = replace(cameras.to(model.device).pinholes(all_round=True), values={})
    with torch.no_grad():
        splats, voxels = _convert(model, cameras, count)
    logger.info("%d voxels become Gaussians", len(splats))
    if fit_steps is None:
        fit_steps = max(_MIN_STEPS, math.ceil(_PIXELS_PER_SPLAT * len(splats) / _WINDOW**2))
    return fit_splats(splats, voxels, model, cameras, fit_steps) if fit_steps else splats


class _Light(NamedTuple):
    """The visible samples of one camera's rays: M positions in the world and in the warp, and more."""

    world: Tensor
    warped: Tensor
    directions: Tensor
    rgb: Tensor
    weights: Tensor
    transmittance: Tensor  # in front of the sample
    areas: Tensor  # of a ray's cross-section there, world units


class _Cells:
    """The voxels of a field, in which samples are counted.

    A sample belongs to a voxel, or to a neighbour, with a probability that falls linearly with their distance: moments
    of neighbouring voxels thus overlap, as Gaussians must.
    """

    def __init__(self, model: Model) -> None:
        self._low, self._high = model.occupancy.aabb
        self._warp = model.warp
        if isinstance(model.grid, VoxelPyramid):
            self._edges = model.grid.finest_voxels()[0].float()
        else:
            self._edges = self._low.new_tensor(warped_voxels(model))
        self._random = torch.Generator(self._low.device).manual_seed(0)  # on a CPU, the same run gives the same file
        self.enlarge(1.0)

    def enlarge(self, factor: float) -> None:
        """Multiplies the edges of the voxels."""
        self._edges = self._edges * factor
        self._shape = ((self._high - self._low) / self._edges).ceil().long() + 2

    @property
    def are_few(self) -> bool:
        """Whether a side has so few voxels that larger ones would represent nothing."""
        return int(self._shape.min()) <= _FEWEST_VOXELS

    def of(self, warped: Tensor) -> Tensor:
        """Returns numbers (M,) of the voxels of positions (M, 3) in the warp."""
        random = torch.rand(warped.shape, generator=self._random, device=warped.device)
        cells = ((warped - self._low) / self._edges + random + 0.5).long()
        x, y, z = cells.clamp(self._shape.new_zeros(3), self._shape - 1).unbind(-1)
        return (x * self._shape[1] + y) * self._shape[2] + z

    def edges(self, points: Tensor) -> Tensor:
        """Returns the shortest edges (M,) of voxels at world positions (M, 3), world units."""
        warp, shortest = self._warp, self._edges.min()
        return shortest.expand(len(points)) if warp is None else warp.from_world(points)[1] * shortest


def _visible_light(model: Model, cameras: Cameras, rays: int) -> Iterator[_Light]:
    """Yields the visible samples of about as many ``rays``, camera by camera, evenly spaced in the images."""
    field, warp, settings = model.field, model.warp, model.settings
    stride = math.sqrt(int(cameras.all_sizes().prod(dim=-1).sum()) / rays)
    if stride < 1:
        cameras = cameras.enlarged(round(1 / stride))
    every = max(1, round(stride))
    for camera in tracked(range(len(cameras)), "rendering views"):
        found = []
        for cast in cameras.image_chunks(camera, field.aabb, _CHUNK, every):
            seen = render(field, cast, model.occupancy, settings)
            samples, directions = seen.samples, cast.directions[seen.samples.ray_index]
            distances = samples.t
            if warp is not None:
                distances = warp.world_distances(samples, cast.origins, cast.directions)
            areas = (distances * every).square() / cameras.intrinsics[camera, :2].prod()
            world = cast.origins[samples.ray_index] + distances[:, None] * directions
            arriving = 1 - exclusive_sum(seen.weights, samples.ray_offsets)
            found.append(_Light(world, samples.positions, directions, seen.sample_rgb, seen.weights, arriving, areas))
        yield _Light(*(torch.cat(each) for each in zip(*found, strict=True)))


def _convert(model: Model, cameras: Cameras, count: int) -> tuple[Splats, Tensor]:
    """Returns the Gaussians of at most ``count`` voxels, and the edges (N,) of these voxels, world units."""
    cells, rays = _Cells(model), _RAYS_PER_SPLAT * count
    while True:
        chosen, areas, needed = _most_visible(_visible_light(model, cameras, rays), cells, count)
        if not len(chosen):
            raise ValueError("cameras must see the field, got empty space in all of their pixels")
        if needed <= count or cells.are_few:
            break
        # The number of voxels of a surface falls with the square of their edges.
        cells.enlarge(1.1 * math.sqrt(needed / count))
    device = chosen.device
    moments = torch.zeros(len(chosen), 16, dtype=torch.float64, device=device)
    squares = torch.zeros(len(chosen), 136, device=device)  # the upper triangles of 16 x 16
    colors = torch.zeros(len(chosen), 16, 3, device=device)
    centre = model.field.aabb.mean(dim=0)
    for light in _visible_light(model, cameras, rays):
        number = cells.of(light.warped)
        index = torch.searchsorted(chosen, number).clamp(max=len(chosen) - 1)
        kept = (chosen[index] == number).nonzero()[:, 0]
        for part in kept.split(_CHUNK):
            at, weights = index[part], light.weights[part, None]
            # The products of (1, x, y, z) with itself begin with 1 and the position.
            points = F.pad((light.world[part] - centre).double(), (1, 0), value=1.0)
            directions = light.directions[part].double()
            both = torch.cat((products(points, points), products(directions, directions)), dim=-1)
            moments.index_add_(0, at, weights * both)
            basis = spherical_harmonics(light.directions[part], 3)
            weighted = weights * basis
            squares.index_add_(0, at, products(weighted, basis))
            colors.index_add_(0, at, weighted[..., None] * (light.rgb[part, None] - 0.5))
    seen = moments[:, 0] > 0
    moments, squares, colors, areas = moments[seen], squares[seen], colors[seen], areas[seen]
    light_sum = moments[:, :1]
    mean = moments[:, 1:4] / light_sum
    positions = (mean + centre).float()
    voxels = cells.edges(positions)
    scatter = symmetric(moments[:, 4:10], 3) - light_sum[..., None] * mean[:, :, None] * mean[:, None]
    even = _EVEN_LIGHT * (voxels.double().square() / 6)[:, None, None] * torch.eye(3, device=device)
    spread = (scatter + even) / (light_sum + _EVEN_LIGHT)[..., None]
    # On the CPU, because cuSOLVER fails with many matrices.
    variances, axes = (each.to(device) for each in torch.linalg.eigh(spread.cpu()))
    variances = variances.maximum((0.05 * voxels.double()).square()[:, None])
    axes = axes * torch.linalg.det(axes).sign()[:, None, None]
    # The area of a Gaussian's shadow along d is 2 pi sqrt(|C| d' C^-1 d).
    shadow = (axes * (variances.prod(dim=-1, keepdim=True) / variances)[:, None]) @ axes.mT
    facing = (shadow * symmetric(moments[:, 10:], 3)).sum(dim=(1, 2)) / light_sum[:, 0]
    opacity = (areas / (2 * math.pi * facing.sqrt().float())).clamp(max=MAX_ALPHA)
    harmonics = in_chunks(fit_harmonics, squares, colors, light_sum[:, 0].float(), evaluations=16)
    log_scales = 0.5 * variances.log().float()
    splats = Splats(positions, log_scales, quaternions(axes.float()), torch.logit(opacity), harmonics)
    visible = opacity > MIN_ALPHA
    return splats[visible], voxels[visible]


def _most_visible(images: Iterator[_Light], cells: _Cells, count: int) -> tuple[Tensor, Tensor, int]:
    """Returns the numbers of the voxels that are seen most, in order, the areas that they cover in images, and more.

    Areas are means over the cameras that see a voxel, world units, as if nothing were in front of it: a camera whose
    light is partly absorbed on the way has a proportionally smaller weight. The last result is how many voxels
    have most of all light.
    """
    numbers, sums = [], []
    for light in images:
        number, index = cells.of(light.warped).unique(return_inverse=True)
        weights = light.weights[:, None] * torch.stack(
            (torch.ones_like(light.areas), light.areas, light.transmittance), dim=-1
        )
        seen = torch.zeros(len(number), 3, device=weights.device).index_add_(0, index, weights)
        seen[:, 2] /= seen[:, 0].clamp(min=1e-12)
        numbers.append(number)
        sums.append(seen)
    number, index = torch.cat(numbers).unique(return_inverse=True)
    total = torch.zeros(len(number), 3, device=number.device).index_add_(0, index, torch.cat(sums))
    light_sums, order = total[:, 0].sort(descending=True)
    needed = int((light_sums.double().cumsum(0) < _KEPT_LIGHT * light_sums.double().sum()).sum())
    best = order[:count].sort().values
    return number[best], total[best, 1] / total[best, 2].clamp(min=1e-12), needed


def fit_splats(splats: Splats, voxels: Tensor, model: Model, cameras: Cameras, steps: int) -> Splats:
    """Fits all numbers of Gaussians to images of the field, by Adam.

    Each step compares a random window of the image of a random camera, at its resolution or a finer one, over a random
    background. Viewers widen every Gaussian by a part of a pixel, so fitting to one resolution alone would leave gaps
    at others.

    Args:
        splats: N Gaussians.
        voxels: (N,) edges of the voxels that they represent, world units; nearer to a camera, they are not drawn.
        model: The model of the field, on their device.
        cameras: Pinhole cameras.
        steps: Number of windows, at least 1.

    Returns:
        The fitted Gaussians that are not negligible.
    """
    field, settings = model.field, model.settings
    device, random = voxels.device, torch.Generator().manual_seed(0)
    offsets = torch.zeros_like(splats.means)
    learned = [offsets, *(each.clone() for each in (*vars(splats).values(),)[1:])]
    groups = [{"params": [each.requires_grad_()], "lr": rate} for each, rate in zip(learned, _RATES, strict=True)]
    adam = torch.optim.Adam(groups, betas=(0.9, 0.99), eps=1e-15)
    schedule = torch.optim.lr_scheduler.LinearLR(adam, 1.0, _FINAL_RATE, steps)
    logger.info("fitting %d Gaussians to %d images of the field", len(splats), steps)

    def current() -> Splats:
        return Splats(splats.means + voxels[:, None] * learned[0], *learned[1:])

    for _ in tracked(range(steps), "fitting step"):
        camera = _random_window(cameras, random)
        background = torch.rand(3, generator=random).to(device)
        with torch.no_grad():
            truth = render(field, camera.image_rays(0, field.aabb), model.occupancy, settings).over(background)
        shown = render_splats(current(), camera, background, voxels)
        adam.zero_grad()
        (shown.view(-1, 3) - truth).square().mean().backward()
        adam.step()
        schedule.step()
    fitted = Splats(*(each.detach() for each in vars(current()).values()))
    return fitted[fitted.opacity_logits.sigmoid() > MIN_ALPHA]


def _random_window(cameras: Cameras, random: torch.Generator) -> Cameras:
    """Returns one camera that shows a random window of the image of one of them."""

    def draw(stop: int) -> int:
        return int(torch.randint(stop, (), generator=random))

    camera = cameras[[draw(len(cameras))]].enlarged(_ZOOMS[draw(len(_ZOOMS))])
    width, height = camera.size(0)
    inner = min(_WINDOW, width), min(_WINDOW, height)
    left, top = draw(width - inner[0] + 1), draw(height - inner[1] + 1)
    corner = camera.intrinsics.new_tensor([0, 0, left, top])
    return Cameras(camera.c2w, camera.intrinsics - corner, *inner)


def _check(source: ExportSource) -> None:
    if source.model.environment is not None and "environment" not in source.files:
        raise ValueError("--splats must come with --environment for this run, whose environment Gaussians do not show")


def _check_file(path: Path, given: Mapping[str, Any]) -> None:
    file_format("splats", path).require()
    if "spz_version" in given and path.suffix.lower() != ".spz":
        raise ValueError(f"--spz-version must be written to an spz, got --splats {path}")


def _write(
    path: Path,
    source: ExportSource,
    count: int = 1_000_000,
    fit_steps: int | None = None,
    lod: int = 1,
    up_axis: Literal["y", "z"] | None = None,
    **options: Any,
) -> str:
    turns = up_axis is not None or file_format("splats", path).up_axis is not None
    axes = source.once(upright) if turns else torch.eye(3)
    cameras, written = source.training_cameras(), ""
    for level in range(lod):
        splats = splats_of(source.model, cameras, count=count, fit_steps=fit_steps)
        name = path if level == 0 else path.with_name(f"{path.stem}.lod{level}{path.suffix}")
        save_splats(name, splats.turned(axes) if turns else splats, up_axis, **options)
        written += f", {len(splats)} to {name.name}" if level else f"{len(splats)} Gaussians"
        count = max(len(splats) // _LEVEL_RATIO, 1)
    return written


SPLATS = ExportFormat(
    name="splats",
    help="3D Gaussians of everything that training cameras see: ply, spz, sog, glb or usdz; needs the scene",
    opens="https://superspl.at/editor (ply, spz, sog), PlayCanvas (glb) or OpenUSD (usdz)",
    write=_write,
    suffixes=(".ply", ".spz", ".sog", ".glb", ".usdz"),
    options=(
        Option("count", "largest number of Gaussians (default: 1000000)", Count, "N"),
        Option(
            "fit_steps",
            "steps in which they are fitted to images of the field; 0: none (default: in proportion to their number)",
            Natural,
            "N",
        ),
        Option("lod", "levels of detail: also FILE.lod1, ... with a quarter of the Gaussians each", Count, "N"),
        Option("up_axis", "axis that points up (default: y for spz, glb and usdz)", Literal["y", "z"]),
        Option("spz_version", "version of an spz: 4, or 3 for older readers (default: 4)", SpzVersion, "N"),
    ),
    check=_check_file,
    check_source=_check,
)
