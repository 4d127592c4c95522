"""A field with deferred shading as a web page, which draws its stored values with WebGL2."""

from __future__ import annotations

import base64
import logging
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.export.lattice import check_finite_values
from voxelfield.export.registry import ExportFormat, ExportSource
from voxelfield.fields.decoders import DeferredMLPDecoder
from voxelfield.fields.field import RadianceField
from voxelfield.files import MARK, atomic_write, is_replaceable
from voxelfield.grids.sparse_grid import BLOCK_CELLS
from voxelfield.media.html import page_template
from voxelfield.models.model import Model
from voxelfield.rendering.backends import BakedImages, fastest_backend, shading_columns
from voxelfield.rendering.bricks import PER_VOXEL, Bricks, bake, can_bake, stored_bytes
from voxelfield.rendering.cameras import Cameras, check_not_empty
from voxelfield.rendering.paths import upright_axes
from voxelfield.rendering.pixels import to_uint8

logger = logging.getLogger(__name__)

MAX_INLINE = 256 << 20
"""Largest size of the compressed data, in bytes, that are stored in the page itself instead of in files beside it."""

_MAX_MEMORY = 2 << 30  # of textures, bytes
_MAX_SIDE = 2048  # of a texture, in texels; browsers may offer fewer, and the page then says so
_FILE = rb'"file": "((?:cells|blocks|log_density|values\d+|weights|environment)\.bin)"'  # in a page
_PART = 12 << 20  # bytes that a page decodes at once
_HARMONICS = 16  # of degree 3, which the page always computes


class _Texture(NamedTuple):
    """An array (D, H, W) or (D, H, W, 4), and the name of its format in WebGL2."""

    name: str
    format: str
    texels: Tensor


def save_web_page(folder: Path | str, model: Model, cameras: Cameras, title: str = "voxelfield") -> None:
    """Writes ``index.html``, a page that draws a field in a browser and lets one move through it.

    The page draws the images of the backend ``render_baked_image``, without the lens, from values that are interpolated
    (:meth:`voxelfield.rendering.bricks.Bricks.unpacked`) and rounded to 8 bits. It contains all data, unless they
    exceed :data:`MAX_INLINE` when compressed: then they are loaded from files beside it.

    Args:
        folder: Folder of the page, created if needed.
        model: The model of a field that ``render_baked_image`` draws, such as
            :attr:`voxelfield.trained.trained_model.TrainedModel.model`. The view turns around
            :attr:`voxelfield.Model.centre`.
        cameras: Cameras on any device; the first is where the page starts, and all of them determine the up direction.
        title: Title of the page.

    Raises:
        ValueError: The field is not one that ``render_baked_image`` draws or is too large for a browser, or there are
            no cameras.
        FloatingPointError: A density, feature or weight is not finite.
        FileExistsError: There is an ``index.html``, or a file of data beside it, that voxelfield has not written.
        OSError: A file cannot be written.
    """
    check_not_empty(cameras)
    check_drawable(model.field)
    page = Path(folder) / "index.html"
    if not is_replaceable(page):
        raise FileExistsError(f"{page} was not written by voxelfield: choose another folder, or remove it")
    bricks = bake(model.field, model.occupancy, _vertices_per_voxel(model))
    textures = _textures(model, bricks)
    _check_size(textures, int((bricks.blocks >= 0).sum()))
    stored = {texture.name: zlib.compress(texture.texels.cpu().numpy().tobytes()) for texture in textures}
    beside = sum(map(len, stored.values())) > MAX_INLINE
    files = {name: f"{name}.bin" for name in stored if beside}
    parts = [(name, part) for name, data in stored.items() if not beside for part in _encoded(data)]
    for file in files.values():
        if not _is_data(page.with_name(file)):
            raise FileExistsError(f"{page.with_name(file)} was not written by voxelfield: choose another folder")
    for name, file in files.items():
        with atomic_write(page.with_name(file)) as opened:
            opened.write(stored[name])
    if beside:
        logger.info("the data are in %d files beside the page, which must be opened from a server", len(files))
    first = cameras[:1].pinholes()
    scene = {
        "arrays": [
            {"name": name, "format": format, "shape": list(texels.shape[:3]), "file": files.get(name)}
            for name, format, texels in textures
        ],
        "c2w": first.c2w[0, :3].T.tolist(),
        "intrinsics": first.intrinsics[0].tolist(),
        "size": first.size(0),
        "up": upright_axes(cameras)[2].tolist(),
        "pivot": model.centre.tolist(),
    }
    constants = "\n".join(_constants(model, bricks))
    template = page_template("voxelfield.export", "web.html")
    stale = _files_of(page) - set(files.values())
    with atomic_write(page) as opened:
        for text in template.generate(mark=MARK, title=title, scene=scene, constants=constants, parts=parts):
            opened.write(text.encode())
    for name in stale:
        page.with_name(name).unlink(missing_ok=True)


def _files_of(page: Path) -> set[str]:
    """Returns the names of the files of data beside a page that it loads, none if there is no page."""
    named = re.findall(_FILE, page.read_bytes()) if page.exists() else []
    return {name.decode() for name in named if _is_data(page.with_name(name.decode()))}


def _is_data(path: Path) -> bool:
    """Returns whether a file, if there is one, has compressed data, as those beside a page."""
    return not path.exists() or (path.is_file() and path.read_bytes().startswith(b"\x78\x9c"))


def check_drawable(field: RadianceField) -> None:
    """Raises ValueError, with the remedy, unless :func:`save_web_page` can draw a field."""
    if BakedImages.serves(field):
        return
    if can_bake(field):
        raise ValueError(
            "field must not be in normalised device coordinates for a web page: train it with warp.ndc=false"
        )
    raise ValueError(
        f"field must be one that {BakedImages.name} draws, got one that {fastest_backend(field).name} draws: train it "
        "with model=pyramid model.shading=deferred"
    )


def _vertices_per_voxel(model: Model) -> int:
    """Returns as many vertices for each voxel as a page has room for; fewer are reported."""
    size = stored_bytes(model.field, model.occupancy)
    if size <= _MAX_MEMORY:
        return PER_VOXEL
    logger.warning(
        "the page has one vertex for each voxel instead of %d, which would take %.1f GiB of the %.0f that a page may: "
        "it loses detail that other images have",
        *(PER_VOXEL, size / 2**30, _MAX_MEMORY / 2**30),
    )
    return 1


def _check_size(textures: list[_Texture], blocks: int) -> None:
    size = sum(texture.texels.nbytes for texture in textures)
    side = max(length for texture in textures for length in texture.texels.shape[:3])
    if size > _MAX_MEMORY or side > _MAX_SIDE:
        raise ValueError(
            f"field must fit into {_MAX_MEMORY / 2**30:.0f} GiB and textures of {_MAX_SIDE} along each side for a web "
            f"page, got {blocks} blocks of stored values in {size / 2**30:.2f} GiB and a side of {side}: train with a "
            "lower trainer.finest_resolution"
        )


def _textures(model: Model, bricks: Bricks) -> list[_Texture]:
    """Returns all that the shader reads, in its names and formats."""
    log_density, values = bricks.unpacked()
    textures = [
        _Texture("cells", "R8UI", model.occupancy.empty_distance),
        _Texture("blocks", "R32I", bricks.blocks),
        _Texture("log_density", "R16F", log_density),
        *(
            _Texture(f"values{number}", "RGBA8", four.contiguous())
            for number, four in enumerate(values.split(4, dim=-1))
        ),
        _Texture("weights", "RGBA32F", _packed_weights(model.field, bricks)),
    ]
    if model.environment is not None:
        # A column of the other side at each edge, between which and the next a browser interpolates.
        colors = model.environment.panorama()
        colors = torch.cat((colors[:, -1:], colors, colors[:, :1]), dim=1)
        textures.append(_Texture("environment", "RGBA8", to_uint8(F.pad(colors, (0, 1), value=1.0))[None]))
    for texture in textures:
        check_finite_values(texture.name, texture.texels)
    return textures


def _packed_weights(field: RadianceField, bricks: Bricks) -> Tensor:
    """Returns the matrices of the colour network below each other, (1, rows, columns / 4, 4) float32.

    Rows and columns of each matrix are padded to multiples of four.
    """
    decoder = field.decoder
    assert isinstance(decoder, DeferredMLPDecoder)
    first, *others = (matrix.detach().float() for matrix in decoder.color_network)
    matrices = [shading_columns(decoder, first, len(bricks.low)), *others]
    columns = 4 * -(-max(matrix.shape[1] for matrix in matrices) // 4)
    padded = [F.pad(matrix, (0, columns - matrix.shape[1], 0, -matrix.shape[0] % 4)) for matrix in matrices]
    return torch.cat(padded).view(1, -1, columns // 4, 4)


def _constants(model: Model, bricks: Bricks) -> Iterator[str]:
    """Yields the lines that define the constants of the shader."""
    field, settings = model.field, model.settings
    decoder = field.decoder
    assert isinstance(decoder, DeferredMLPDecoder)
    textures, width = len(bricks.low) // 4, -(-decoder.color_network[0].shape[0] // 4)
    yield f"#define TEXTURES {textures}"
    if model.environment is not None:
        yield "#define ENVIRONMENT"
    counts = {
        "BLOCK_CELLS": BLOCK_CELLS,
        "LAYERS": len(decoder.color_network),
        "WIDTH": width,
        "COLUMNS": max(textures + _HARMONICS // 4, width),
    }
    yield from (f"const int {name} = {value};" for name, value in counts.items())
    numbers = {
        "STEP": settings.step,
        "MIN_TRANSMITTANCE": settings.min_transmittance,
        "MIN_WEIGHT": settings.min_weight,
    }
    vectors = {"BACKGROUND": model.background.tolist()}
    lists = {"LATTICE": bricks.aabb, "CELLS": model.occupancy.aabb}
    for name, values in (("LOW", bricks.low), ("EXTENT", bricks.extent)):
        lists[name] = values.view(-1, 4)
    if field.warp is None:
        lists["BOX"] = field.grid.aabb
    else:
        *edges, ratio, count, pitch, near = field.warp.op_arguments
        unit = max(edges[3:])
        yield f"#define NESTED_BOXES {int(count)}"
        numbers |= {"UNIT": unit, "RATIO": ratio, "PITCH": pitch, "NEAR": near / unit}
        vectors |= {"CENTRE": edges[:3], "HALF_EDGES": [edge / unit for edge in edges[3:]]}
    yield from (f"const float {name} = {float(value)!r};" for name, value in numbers.items())
    yield from (f"const vec3 {name} = {_vector(values)};" for name, values in vectors.items())
    for name, rows in lists.items():
        kind = f"vec{rows.shape[1]}[{len(rows)}]"
        yield f"const {kind} {name} = {kind}({', '.join(map(_vector, rows.tolist()))});"


def _vector(values: list[float]) -> str:
    return f"vec{len(values)}({', '.join(map(repr, values))})"


def _encoded(data: bytes) -> Iterator[str]:
    """Yields consecutive parts in base64."""
    for first in range(0, len(data), _PART):
        yield base64.b64encode(data[first : first + _PART]).decode()


def _write(folder: Path, source: ExportSource) -> str:
    save_web_page(folder, source.model, source.training_cameras(), source.run.config.scene.name)
    return "index.html"


WEB = ExportFormat(
    name="web",
    help="a web page that draws the field, for fields with deferred shading; needs the scene",
    opens="a browser",
    write=_write,
    check_source=lambda source: check_drawable(source.run.field),
)
