"""A field as a web page, which draws values that are stored at vertices with WebGL2."""

from __future__ import annotations

import base64
import logging
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield import ops
from voxelfield.config import Positive
from voxelfield.evaluation.metrics import mse_to_psnr
from voxelfield.export.lattice import check_finite_values
from voxelfield.export.registry import ExportFormat, ExportSource, Option
from voxelfield.fields.decoders import DeferredMLPDecoder
from voxelfield.fields.field import Field, RadianceField
from voxelfield.fields.harmonics import BASES, HarmonicsDecoder, common_directions
from voxelfield.files import MARK, atomic_write, is_replaceable, write_file
from voxelfield.grids.boxes import cell_indices
from voxelfield.grids.sparse_grid import BLOCK_CELLS, BLOCK_VERTICES
from voxelfield.media.html import page_template
from voxelfield.models.model import Model
from voxelfield.ops import PackedSamples
from voxelfield.ops._internal.stencil import atlas_coordinates
from voxelfield.rendering.backends import shading_columns
from voxelfield.rendering.bricks import PER_VOXEL, Bricks, bake, can_bake, stored_bytes
from voxelfield.rendering.cameras import Cameras, check_not_empty, distance_to_nearest, views_of_points
from voxelfield.rendering.paths import upright_axes
from voxelfield.rendering.pixels import to_uint8
from voxelfield.rendering.render import render_view
from voxelfield.warps.ndc_box import FARTHEST, NdcBox

logger = logging.getLogger(__name__)

MAX_INLINE = 256 << 20
"""Largest size of the compressed data, in bytes, that are stored in the page itself instead of in files beside it."""

_MAX_MEMORY = 2 << 30  # of textures, bytes
_MAX_SIDE = 2048  # of a texture, in texels; browsers may offer fewer, and the page then says so
_FILE = rb'"((?:cells|blocks|weights|environment|(?:coarse_)?(?:log_density|values\d+)|layer\d+)\.bin)"'  # in a page
_PART = 1 << 20  # bytes that a page decodes at once
# Vertices along each axis of a block that a page draws until it has the block's own 8.
_COARSE = 3
# Of colours that depend on the direction at each sample: directions in which they are stored, and points by which these
# and the principal components are chosen.
_DIRECTIONS, _POINTS = 12, 1 << 13
# Views in which the page is compared with the field, and their shorter side in pixels.
_COMPARED, _COMPARED_SIDE = 3, 100
_RAYS_AT_ONCE = 1 << 13
_PAGE = 1 << 15  # bytes of a page without its data


class _Texture(NamedTuple):
    """An array (D, H, W) or (D, H, W, 4), and the name of its format in WebGL2."""

    name: str
    format: str
    texels: Tensor


def save_web_page(
    path: Path | str, model: Model, cameras: Cameras, title: str = "voxelfield", web_size: float | None = None
) -> None:
    """Writes a page that draws a field in a browser and lets one move through it.

    With deferred shading, the page draws the images of the backend ``render_baked_image``, without the lens, from
    values that are interpolated (:meth:`voxelfield.rendering.bricks.Bricks.unpacked`) and rounded to 8 bits. For other
    fields, the view dependence of colours is approximated (:class:`voxelfield.fields.harmonics.HarmonicsDecoder`). The
    log says how much the images differ from those of :func:`voxelfield.rendering.render.render_view`. The page contains
    all data. If they exceed :data:`MAX_INLINE` when compressed, a folder has them in files beside the page, which are
    loaded, and the last blocks of a single page stay coarse.

    The page first draws blocks of 3 x 3 x 3 vertices, and replaces them by blocks of 8 x 8 x 8 as these arrive, in the
    order of the number of pixels that they cover in the images of all cameras.

    Args:
        path: The page if its name ends with ``.html``, otherwise a folder, created if needed, for its ``index.html``.
        model: The model, such as :attr:`voxelfield.trained.trained_model.TrainedModel.model`. The view turns around
            :attr:`voxelfield.Model.centre`.
        cameras: Cameras on any device; the first is where the page starts, and all of them determine the up direction.
        title: Title of the page.
        web_size: Largest size of the page in MiB: the last blocks stay coarse; None: all are refined.

    Raises:
        ValueError: The field is one that :func:`check_drawable` rejects or is too large for a browser, there are no
            cameras, or the coarse blocks exceed ``web_size`` or what a single page may have.
        FloatingPointError: A density, feature or weight is not finite.
        FileExistsError: There is an ``index.html``, or a file of data beside it, that voxelfield has not written.
        OSError: A file cannot be written.
    """
    check_not_empty(cameras)
    check_drawable(model.field)
    page = Path(path) if Path(path).suffix == ".html" else Path(path) / "index.html"
    if not is_replaceable(page):
        raise FileExistsError(f"{page} was not written by voxelfield: choose another folder, or remove it")
    field = _deferred(model, cameras)
    bricks = bake(field, model.occupancy, _vertices_per_voxel(field, model))
    blocks, atlas = _ordered(bricks, _by_pixels(bricks, field, cameras))
    fixed, refined = _textures(model, field, bricks, blocks, atlas), _vertex_textures(atlas)
    _check_size(fixed, refined, int((blocks >= 0).sum()))
    inline = page == Path(path)
    # Base64 makes four bytes of three.
    given = math.inf if web_size is None else 0.75 * web_size * 2**20 - _PAGE
    room = min(MAX_INLINE if inline else math.inf, given)
    stored = _compressed(fixed, refined, room)
    layers = len(stored) - len(fixed)
    _compare(model, _PageField(field, bricks, blocks, atlas, layers), cameras)
    beside = not inline and sum(map(len, stored.values())) > MAX_INLINE
    files = {name: f"{name}.bin" for name in stored if beside}
    parts = ((name, part) for name, data in stored.items() if not beside for part in _encoded(data))
    for file in files.values():
        if not _is_data(page.with_name(file)):
            raise FileExistsError(f"{page.with_name(file)} was not written by voxelfield: choose another folder")
    for name, file in files.items():
        write_file(page.with_name(file), stored[name])
    if beside:
        logger.info("the data are in %d files beside the page, which must be opened from a server", len(files))
    first = cameras[:1].pinholes()
    scene = {
        "arrays": [
            {"name": name, "format": format, "shape": list(texels.shape[:3]), "file": files.get(name)}
            for name, format, texels in fixed
        ],
        "atlas": [
            {"name": name, "format": format, "shape": list(texels.shape[:3])} for name, format, texels in refined
        ],
        "layers": [{"name": name, "file": files.get(name)} for name in list(stored)[len(fixed) :]],
        "c2w": first.c2w[0, :3].T.tolist(),
        "intrinsics": first.intrinsics[0].tolist(),
        "size": first.size(0),
        "up": upright_axes(cameras)[2].tolist(),
        "pivot": model.centre.tolist(),
        "around": _surround(cameras, model.centre),
        "bytes": sum(map(len, stored.values())),
    }
    constants = "\n".join(_constants(model, field, bricks))
    template = page_template("voxelfield.export", "web.html")
    stale = _files_of(page) - set(files.values())
    with atomic_write(page) as opened:
        for text in template.generate(mark=MARK, title=title, scene=scene, constants=constants, parts=parts):
            opened.write(text.encode())
    for name in stale:
        page.with_name(name).unlink(missing_ok=True)


def _surround(cameras: Cameras, centre: Tensor) -> bool:
    """Returns whether cameras stand around a point (3,), with gaps of less than a right angle between them."""
    x, y, _ = upright_axes(cameras) @ (cameras.c2w[:, :3, 3] - centre.to(cameras.c2w)).T.double()
    angles = torch.atan2(y, x).sort().values
    return bool((angles.diff(append=angles[:1] + 2 * math.pi) < math.pi / 2).all())


def _files_of(page: Path) -> set[str]:
    """Returns the names of the files of data beside a page that it loads, none if there is no page."""
    named = re.findall(_FILE, page.read_bytes()) if page.exists() else []
    return {name.decode() for name in named if _is_data(page.with_name(name.decode()))}


def _is_data(path: Path) -> bool:
    """Returns whether a file, if there is one, has compressed data, as those beside a page."""
    return not path.exists() or (path.is_file() and path.read_bytes().startswith(b"\x78\x9c"))


def check_drawable(field: Field) -> None:
    """Raises ValueError, with the remedy where there is one, unless :func:`save_web_page` can draw a field."""
    if type(field) is not RadianceField:
        raise ValueError(
            f"field must be a RadianceField, a grid with a decoder, for a web page, got a {type(field).__name__}"
        )
    if needed := [name for name in field.extra_inputs if name not in field.optional_inputs]:
        raise ValueError(
            f"field must depend on position and direction alone for a web page, got one that needs {', '.join(needed)}"
        )


@torch.no_grad()
def _deferred(model: Model, cameras: Cameras) -> RadianceField:
    """Returns the model's field, with approximate view dependence unless it has deferred shading that can be stored."""
    field, occupancy = model.field, model.occupancy
    if can_bake(field):
        return field
    random = torch.Generator().manual_seed(0)  # the same run gives the same page
    cells = occupancy.occupied.nonzero()
    if not len(cells):
        raise ValueError("field must have occupied cells for a web page, got none: its training has found nothing")
    some = cells[torch.randint(len(cells), (_POINTS,), generator=random).to(cells.device)]
    low, edges = occupancy.aabb[0], occupancy.aabb.diff(dim=0)[0] / cells.new_tensor(occupancy.occupied.shape)
    points = low + (some + torch.rand(some.shape, generator=random).to(low)) * edges
    world = points if field.warp is None else field.warp.to_world(points)[0]
    origins = cameras.c2w[torch.randint(len(cameras), (_POINTS,), generator=random), :3, 3].to(world)
    directions, weights = common_directions(F.normalize(world - origins, dim=-1), _DIRECTIONS)
    features, inputs = field.grid(points), {"position": points} if "position" in field.decoder.extra_inputs else {}
    importance = -torch.expm1(-field.density_in_warp(points) * model.grid.voxel_size.min())
    decoder = HarmonicsDecoder(field.decoder, directions, weights, features, importance, **inputs)
    return RadianceField(field.grid, decoder, field.warp)


class _PageField(Field):
    """The values that a page has, as the page interpolates them, with the box, the warp and the shading of a field."""

    def __init__(self, field: RadianceField, bricks: Bricks, blocks: Tensor, atlas: Tensor, layers: int) -> None:
        self._field, self.warp, self.shade = field, field.warp, field.shade
        self._lattice, self._blocks = bricks.aabb, blocks
        self._low, self._extent = (each[: field.decoder.emitted] for each in (bricks.low, bricks.extent))
        rest = atlas[layers * BLOCK_VERTICES :]
        shown = _resampled(_resampled(rest, BLOCK_VERTICES, _COARSE), _COARSE, BLOCK_VERTICES)
        self._atlas = torch.cat((atlas[: layers * BLOCK_VERTICES], shown))

    @property
    def aabb(self) -> Tensor:
        return self._field.aabb

    def density(self, points: Tensor) -> Tensor:
        """See :class:`Field`; for a field without a warp."""
        return self.density_in_warp(points)

    def density_in_warp(self, warped: Tensor) -> Tensor:
        return self._read(warped)[:, 0].exp()

    def sample(self, samples: PackedSamples, directions: Tensor) -> tuple[Tensor, Tensor]:
        read = self._read(samples.positions)
        return read[:, 0].exp(), self._low + self._extent * read[:, 1 : 1 + len(self._low)] / 255

    def _read(self, warped: Tensor) -> Tensor:
        """Interpolates logarithms of densities, and values from 0 to 255, at (M, 3); -inf and 0 beside the blocks."""
        unit = (warped - self._lattice[0]) / self._lattice.diff(dim=0)
        placed = atlas_coordinates(unit, self._blocks, self._atlas.shape[:3])
        read = ops.sample_trilinear(self._atlas, placed).float()
        read[:, 0].masked_fill_(placed.isnan().any(dim=1), -math.inf)
        return read


def _compare(model: Model, shown: _PageField, cameras: Cameras) -> None:
    """Logs the PSNR of some small images as a page draws them against images of the field."""
    some = cameras[torch.linspace(0, len(cameras) - 1, min(_COMPARED, len(cameras))).long()].to(model.device)
    some = replace(some.pinholes(), values={})
    some = some.shrunk(max(1, some.shortest_side // _COMPARED_SIDE))
    errors = []
    for index in range(len(some)):
        scene = (some, index, model.occupancy, model.settings, model.background, _RAYS_AT_ONCE)
        first, second = (render_view(field, *scene).rgb.clamp(0, 1) for field in (model.field, shown))
        errors.append((first - second).square().mean())
    psnr = mse_to_psnr(torch.stack(errors).mean().clamp(min=1e-10))
    logger.info("images of the page differ from those of the field by %.1f dB (PSNR of %d views)", psnr, len(some))


def _vertices_per_voxel(field: RadianceField, model: Model) -> int:
    """Returns as many vertices for each voxel as a page has room for; fewer are reported."""
    size = stored_bytes(field, model.occupancy)
    if size <= _MAX_MEMORY:
        return PER_VOXEL
    logger.warning(
        "the page has one vertex for each voxel instead of %d, which would take %.1f GiB of the %.0f that a page may: "
        "it loses detail that other images have",
        *(PER_VOXEL, size / 2**30, _MAX_MEMORY / 2**30),
    )
    return 1


def _check_size(fixed: list[_Texture], refined: list[_Texture], blocks: int) -> None:
    """Raises ValueError unless a browser has room for all that is drawn at first."""
    size = sum(texture.texels.nbytes for texture in fixed)
    side = max(length for texture in (*fixed, *refined) for length in texture.texels.shape[:3])
    if size > _MAX_MEMORY or side > _MAX_SIDE:
        raise ValueError(
            f"field must fit into {_MAX_MEMORY / 2**30:.0f} GiB and textures of {_MAX_SIDE} along each side for a web "
            f"page, got {blocks} coarse blocks of stored values in {size / 2**30:.2f} GiB and a side of {side}: train "
            "with a lower trainer.finest_resolution"
        )


def _textures(model: Model, field: RadianceField, bricks: Bricks, blocks: Tensor, atlas: Tensor) -> list[_Texture]:
    """Returns all that the shader reads for the first picture, in its names and formats."""
    coarse = _vertex_textures(_resampled(atlas, BLOCK_VERTICES, _COARSE))
    textures = [
        _Texture("cells", "R8UI", model.occupancy.empty_distance),
        _Texture("blocks", "R32I", blocks),
        _Texture("weights", "RGBA32F", _packed_weights(field, bricks)),
        *(texture._replace(name=f"coarse_{texture.name}") for texture in coarse),
    ]
    if model.environment is not None:
        # A column of the other side at each edge, between which and the next a browser interpolates.
        colors = model.environment.panorama()
        colors = torch.cat((colors[:, -1:], colors, colors[:, :1]), dim=1)
        textures.append(_Texture("environment", "RGBA8", to_uint8(F.pad(colors, (0, 1), value=1.0))[None]))
    check_finite_values("log_density", atlas[..., 0])
    for texture in textures:
        check_finite_values(texture.name, texture.texels)
    return textures


def _vertex_textures(atlas: Tensor) -> list[_Texture]:
    """Returns the textures of an atlas (X, Y, Z, 1 + V) of logarithms of densities and V values from 0 to 255."""
    fours = enumerate(atlas[..., 1:].split(4, dim=-1))
    values = [_Texture(f"values{number}", "RGBA8", four.round().to(torch.uint8)) for number, four in fours]
    return [_Texture("log_density", "R16F", atlas[..., 0]), *values]


def _compressed(fixed: list[_Texture], refined: list[_Texture], room: float) -> dict[str, bytes]:
    """Returns the compressed data by name: what the first picture needs, then the layers of blocks that fit.

    They fit into ``room``, in bytes, and their textures into a browser.
    """
    stored = {name: zlib.compress(texels.cpu().numpy().tobytes()) for name, _, texels in fixed}
    size = sum(map(len, stored.values()))
    if size > room:
        needed, given = ((each + _PAGE) / 0.75 / 2**20 for each in (size, room))
        raise ValueError(
            f"web_size must be at least {needed:.2f} MiB for the coarse blocks, got {given:.4g}; a folder has room for "
            "more than a single page"
        )
    layers = len(refined[0].texels) // BLOCK_VERTICES
    memory = sum(texels.nbytes for _, _, texels in fixed)
    for layer in range(layers):
        rows = slice(layer * BLOCK_VERTICES, (layer + 1) * BLOCK_VERTICES)
        raw = b"".join(texels[rows].cpu().numpy().tobytes() for _, _, texels in refined)
        data = zlib.compress(raw)
        size, memory = size + len(data), memory + len(raw)
        if size > room or memory > _MAX_MEMORY:
            logger.info(
                "%.0f %% of the blocks stay coarse, so that the page and its textures fit", 100 * (1 - layer / layers)
            )
            break
        stored[f"layer{layer}"] = data
    return stored


def _by_pixels(bricks: Bricks, field: RadianceField, cameras: Cameras) -> Tensor:
    """Returns the stored blocks (N,), first those that cover the most pixels of all images, as if none hid another."""
    blocks = (bricks.blocks >= 0).nonzero()
    edges = bricks.aabb.diff(dim=0)[0] / blocks.new_tensor(bricks.blocks.shape)
    world, unit = bricks.aabb[0] + (blocks + 0.5) * edges, torch.ones(len(blocks), device=blocks.device)
    if field.warp is not None:
        world = field.warp.to_world(world)[0]
        unit = field.warp.from_world(world)[1]
    cameras = cameras.to(world.device)
    across = unit / distance_to_nearest(cameras, world)
    return (views_of_points(cameras, world) * across.square()).argsort(descending=True, stable=True)


def _ordered(bricks: Bricks, order: Tensor) -> tuple[Tensor, Tensor]:
    """Returns where blocks are, (X, Y, Z) int32, in an atlas of all values that has them in another order, and it.

    ``order`` (N,) are numbers of stored blocks. The atlas (8 A, 8 B, 8 C, 1 + V) float16 has logarithms of densities,
    and values from 0 to 255.
    """
    log_density, values = bricks.unpacked()
    atlas = torch.cat((log_density[..., None], values.half()), dim=-1)
    exists, shape = bricks.blocks >= 0, [size // BLOCK_VERTICES for size in atlas.shape[:3]]
    # In a layer, neighbours stay together, which compresses better.
    order = torch.cat([layer.sort().values for layer in order.split(shape[1] * shape[2])])
    places = bricks.blocks[exists]
    from_x, from_y, from_z = ((places[order] >> shift & 1023).long() for shift in (20, 10, 0))
    x, y, z = cell_indices(torch.arange(len(order), device=order.device), shape)
    blocks = bricks.blocks.clone()
    blocks[exists] = places.scatter(0, order, (x << 20 | y << 10 | z).to(places))
    parts = atlas.view(*(size for count in shape for size in (count, BLOCK_VERTICES)), -1)
    moved = parts.clone()
    moved[x, :, y, :, z] = parts[from_x, :, from_y, :, from_z]
    return blocks, moved.view(atlas.shape)


def _resampled(atlas: Tensor, before: int, after: int) -> Tensor:
    """Interpolates blocks of ``before`` vertices along each axis at ``after`` ones, between the same outermost ones."""
    at = torch.linspace(0, before - 1, after, device=atlas.device)
    weights = (1 - (at - torch.arange(before, device=atlas.device)[:, None]).abs()).clamp(min=0)

    def linear(layer: Tensor) -> Tensor:
        for axis in range(3):
            blocks = layer.unflatten(axis, (layer.shape[axis] // before, before)).movedim(axis + 1, -1)
            layer = (blocks.float() @ weights).movedim(-1, axis + 1).flatten(axis, axis + 1)
        return layer.to(atlas)

    return torch.cat([linear(layer) for layer in atlas.split(before)])


def _packed_weights(field: RadianceField, bricks: Bricks) -> Tensor:
    """Returns the matrices of the colour network below each other, (1, rows, columns / 4, 4) float32.

    Of a :class:`HarmonicsDecoder`, these are the coefficients for red, green, blue and nothing, value by value.
    Rows and columns of each matrix are padded to multiples of four.
    """
    decoder = field.decoder
    if isinstance(decoder, HarmonicsDecoder):
        return F.pad(decoder.basis, (0, 0, 0, 1, 3, 0)).reshape(1, -1, BASES // 4, 4)
    assert isinstance(decoder, DeferredMLPDecoder)
    first, *others = (matrix.detach().float() for matrix in decoder.color_network)
    matrices = [shading_columns(decoder, first, len(bricks.low)), *others]
    columns = 4 * -(-max(matrix.shape[1] for matrix in matrices) // 4)
    padded = [F.pad(matrix, (0, columns - matrix.shape[1], 0, -matrix.shape[0] % 4)) for matrix in matrices]
    return torch.cat(padded).view(1, -1, columns // 4, 4)


def _constants(model: Model, field: RadianceField, bricks: Bricks) -> Iterator[str]:
    """Yields the lines that define the constants of the shader."""
    settings, decoder, warp = model.settings, field.decoder, field.warp
    textures, layers, width = len(bricks.low) // 4, 0, 0
    if isinstance(decoder, HarmonicsDecoder):
        yield "#define HARMONICS"
    else:
        assert isinstance(decoder, DeferredMLPDecoder)
        layers, width = len(decoder.color_network), -(-decoder.color_network[0].shape[0] // 4)
    yield f"#define TEXTURES {textures}"
    if model.environment is not None:
        yield "#define ENVIRONMENT"
    constants: dict[str, Any] = {
        "BLOCK_CELLS": BLOCK_CELLS,
        "COARSE_CELLS": _COARSE - 1,
        "LAYERS": layers,
        "WIDTH": width,
        "COLUMNS": max(textures + BASES // 4, width),
        "STEP": float(settings.step),
        "MIN_TRANSMITTANCE": float(settings.min_transmittance),
        "MIN_WEIGHT": float(settings.min_weight),
        "BACKGROUND": model.background,
        "LATTICE": bricks.aabb,
        "CELLS": model.occupancy.aabb,
        "LOW": bricks.low.view(-1, 4),
        "EXTENT": bricks.extent.view(-1, 4),
    }
    if warp is None:
        constants["BOX"] = field.grid.aabb
    elif isinstance(warp, NdcBox):
        yield "#define NDC"
        constants["NDC_CENTRE"] = [(low + high) / 2 for low, high in zip(*warp.window, strict=True)]
        constants["NDC_CAMERA"] = torch.tensor(warp.camera).T
        numbers = {"NEAR": warp.near, "FARTHEST": FARTHEST, "SLOPE": warp.slope, "REACH": warp.reach}
        constants |= {name: float(value) for name, value in numbers.items()}
    else:
        *edges, ratio, count, pitch, near = map(float, warp.op_arguments)
        unit = max(edges[3:])
        yield f"#define NESTED_BOXES {int(count)}"
        constants |= {"UNIT": unit, "RATIO": ratio, "PITCH": pitch, "NEAR": near / unit}
        constants |= {"CENTRE": edges[:3], "HALF_EDGES": [edge / unit for edge in edges[3:]]}
    for name, value in constants.items():
        kind, text = _in_shader(value.tolist() if isinstance(value, Tensor) else value)
        yield f"const {kind} {name} = {text};"


def _in_shader(value: Any) -> tuple[str, str]:
    """Returns type and text, in the shader, of a number, a vector, or a list of vectors."""
    if not isinstance(value, list):
        return type(value).__name__, repr(value)
    kind = f"vec{len(value[0])}[{len(value)}]" if isinstance(value[0], list) else f"vec{len(value)}"
    return kind, f"{kind}({', '.join(_in_shader(each)[1] for each in value)})"


def _encoded(data: bytes) -> Iterator[str]:
    """Yields consecutive parts in base64."""
    for first in range(0, len(data), _PART):
        yield base64.b64encode(data[first : first + _PART]).decode()


def _write(path: Path, source: ExportSource, web_size: float | None = None) -> str:
    save_web_page(path, source.model, source.training_cameras(), source.run.config.scene.name, web_size)
    return "a web page" if path.suffix == ".html" else "index.html"


WEB = ExportFormat(
    name="web",
    help="a web page that draws the field; needs the scene",
    opens="a browser",
    write=_write,
    options=(Option("web_size", "at most so many MiB: blocks that few pixels show stay coarse", Positive, "MIB"),),
    check_source=lambda source: check_drawable(source.run.field),
)
