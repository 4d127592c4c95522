"""Write a trained field as a mesh, points, splats, a web page or a volume, its environment, and its scene's cameras.

At least one of --mesh, --points, --splats, --web, --volume, --environment and --cameras is needed. Files have the units
and axes of the poses.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import voxelfield
from voxelfield.cli.scenes import add_run_arguments, load_scene_of, number, scene_folder
from voxelfield.config import Range
from voxelfield.export.camera_file import save_cameras
from voxelfield.export.mesh import FieldSurface, SurfaceKind
from voxelfield.export.mesh_file import MESH_SUFFIXES, save_mesh, save_points
from voxelfield.export.splat_file import SPLAT_SUFFIXES, save_splats
from voxelfield.export.splats import splats_of
from voxelfield.export.volume import save_volume
from voxelfield.export.web_page import check_drawable, save_web_page
from voxelfield.fields.environment import environment_of
from voxelfield.files import check_suffix
from voxelfield.media.png import PngWriter
from voxelfield.rendering.cameras import Cameras
from voxelfield.trained.trained_model import TrainedModel

logger = logging.getLogger(__name__)

# The files that are written, by their options: suffixes (none for a folder) and help.
_FILES: dict[str, tuple[Sequence[str], str]] = {
    "mesh": (MESH_SUFFIXES, "triangles with normals and colours: ply, obj or glb"),
    "points": ((".ply",), "points of the surface with normals and colours: ply"),
    "splats": (SPLAT_SUFFIXES, "3D Gaussians of everything that training cameras see: ply or spz; needs the scene"),
    "web": ((), "a web page that draws the field, for fields with deferred shading; needs the scene"),
    "volume": ((".npz",), "density and colour on a lattice: npz"),
    "environment": ((".png",), "a panorama of what lies beyond the field, of a run with model.environment=map: png"),
    "cameras": ((".json",), "poses and intrinsics for the scene's image files: json"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add_run_arguments(parser)
    for name, (suffixes, text) in _FILES.items():
        add(f"--{name}", type=Path, metavar="FILE" if suffixes else "FOLDER", help=text)
    add(
        "--surface",
        choices=get_args(SurfaceKind),
        default="density",
        help="density: where the density crosses a level; tsdf: fused from depth maps of the training cameras, "
        "smoother but without parts thinner than a voxel; needs the scene (default: density)",
    )
    level = number(float, Range(0, low_open=True))
    add("--level", type=level, help="density at the surface, per unit (default: a voxel absorbs half of the light)")
    add(
        "--resolution",
        type=number(int, Range(1)),
        metavar="N",
        help="cells along the longest edge (default: one per voxel)",
    )
    add(
        "--box",
        type=number(int, Range(1)),
        default=1,
        metavar="K",
        help="export the contents of the K-th nested box, at its voxel size (default: 1, the smallest)",
    )
    add("--largest-component", action="store_true", help="leave out all but the largest connected part")
    add("--fill-holes", action="store_true", help="close holes with fans of triangles")
    add("--max-faces", type=number(int, Range(1)), metavar="N", help="merge triangles until at most N are left")
    add(
        "--texture",
        type=number(int, Range(1)),
        metavar="PIXELS",
        help="paint a texture with sides of about PIXELS (obj, glb; see --max-faces)",
    )
    add(
        "--count",
        type=number(int, Range(1)),
        default=1_000_000,
        metavar="N",
        help="number of points, or maximum number of splats (default: 1000000)",
    )
    add(
        "--fit-steps",
        type=number(int, Range(0)),
        metavar="N",
        help="steps in which splats are fitted to images of the field; 0: none (default: in proportion to the splats)",
    )


def run(options: argparse.Namespace) -> None:
    """Writes the requested files."""
    paths = {name: path for name in _FILES if (path := getattr(options, name)) is not None}
    if not paths:
        *names, last = (f"--{name}" for name in _FILES)
        raise ValueError(f"export must be given at least one of {', '.join(names)} and {last}, got none")
    for name, path in paths.items():
        if suffixes := _FILES[name][0]:
            check_suffix(f"--{name}", path, suffixes)
    if options.texture is not None and options.mesh is not None and options.mesh.suffix.lower() == ".ply":
        raise ValueError(f"--texture must be written to an obj or glb, got --mesh {options.mesh}")
    if options.surface == "tsdf" and options.level is not None:
        raise ValueError(f"--level must be left out for --surface tsdf, which has none, got {options.level:g}")
    if options.splats is None and options.fit_steps is not None:
        raise ValueError(f"--fit-steps must come with --splats, got {options.fit_steps} without it")
    trained = voxelfield.load(options.run, options.device)
    if options.environment is not None:
        _export_environment(options, trained)
    elif options.splats is not None and environment_of(trained.field) is not None:
        raise ValueError("--splats must come with --environment for this run, whose environment Gaussians do not show")
    if options.mesh is not None or options.points is not None:
        _export_surface(options, trained)
    if options.splats is not None:
        _export_splats(options, trained)
    if options.web is not None:
        _export_web_page(options, trained)
    if options.volume is not None:
        save_volume(options.volume, trained.model, resolution=options.resolution, box=options.box)
        logger.info("wrote %s", options.volume)
    if options.cameras is not None:
        scene = load_scene_of(trained, options, None, downscale=1)
        save_cameras(options.cameras, scene, scene_folder(trained, options))
        logger.info("wrote %d cameras to %s", sum(map(len, scene.splits.values())), options.cameras)


def _export_surface(options: argparse.Namespace, trained: TrainedModel) -> None:
    fused = options.surface == "tsdf"
    cameras = load_scene_of(trained, options, ("train",)).train.cameras if fused else None
    surface = FieldSurface(
        trained.model,
        kind=options.surface,
        level=options.level,
        resolution=options.resolution,
        box=options.box,
        cameras=cameras,
    )
    if options.mesh is not None:
        mesh = surface.mesh(
            largest_component=options.largest_component,
            fill_holes=options.fill_holes,
            max_faces=options.max_faces,
            texture=options.texture,
        )
        save_mesh(options.mesh, mesh)
        logger.info("wrote %d triangles of %d vertices to %s", len(mesh.faces), len(mesh.vertices), options.mesh)
    if options.points is not None:
        save_points(options.points, surface.points(options.count))
        logger.info("wrote %d points to %s", options.count, options.points)


def _export_environment(options: argparse.Namespace, trained: TrainedModel) -> None:
    environment = environment_of(trained.field)
    if environment is None:
        raise ValueError("--environment must be left out for this run, which was trained with model.environment=none")
    with PngWriter(workers=1) as writer:
        writer.save(options.environment, environment.panorama())
    logger.info("wrote %s", options.environment)


def _training_cameras(options: argparse.Namespace, trained: TrainedModel) -> Cameras:
    if trained.cameras is None:
        return load_scene_of(trained, options, ("train",)).train.cameras
    return trained.cameras.refined


def _export_splats(options: argparse.Namespace, trained: TrainedModel) -> None:
    cameras = _training_cameras(options, trained)
    splats = splats_of(trained.model, cameras, count=options.count, fit_steps=options.fit_steps)
    save_splats(options.splats, splats)
    logger.info("wrote %d Gaussians to %s", len(splats), options.splats)


def _export_web_page(options: argparse.Namespace, trained: TrainedModel) -> None:
    check_drawable(trained.field)  # before the scene is loaded
    save_web_page(options.web, trained.model, _training_cameras(options, trained), trained.config.scene.name)
    logger.info("wrote %s", options.web / "index.html")
