"""A finished run, loaded again for rendering rather than for more training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from voxelfield.datasets.scene import Split
from voxelfield.export.geometry.mesh import check_mesh_path, save_mesh
from voxelfield.export.mesh import FieldSurface, MeshOptions, SurfaceOptions
from voxelfield.export.model_file import Quality, Rounding, parts_of, read_model, save_model
from voxelfield.fields.field import RadianceField
from voxelfield.fields.recipes.recipe import Recipe
from voxelfield.rendering.cameras import Cameras, overview
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.occupied_density import occupied_density
from voxelfield.rendering.render import View
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.training.checkpoint import contents_of, load_checkpoint, resolve_checkpoint
from voxelfield.training.config import CameraConfig, SceneConfig, TrainerConfig, parse
from voxelfield.training.evaluation import Evaluation, OnView, evaluate_split, spread
from voxelfield.training.fields import grid_box, untrained_field
from voxelfield.training.lpips import Lpips
from voxelfield.training.optimizer import copies_dtype
from voxelfield.training.png import PngWriter
from voxelfield.training.refined_cameras import RefinedCameras
from voxelfield.training.view_refinement import refine_views
from voxelfield.training.views import evaluation_background, render_settings, view_renderer


@dataclass(frozen=True, eq=False)
class Run:
    """What a checkpoint holds of a scene.

    Attributes:
        field: The field, without gradients; its grids are in the dtype in which training on that device reads them.
        occupancy: Where there is something to sample.
        recipe: What built the field.
        trainer: The loop's settings, of which the evaluation is part.
        config: The run's whole configuration.
        steps: Steps of training done.
        cameras: What came of the training cameras where they were refined. The field then lies in the frame of the
            refined ones, which :meth:`evaluate` brings the views of a split into.
    """

    field: RadianceField
    occupancy: OccupancyGrid
    recipe: Recipe
    trainer: TrainerConfig
    config: DictConfig
    steps: int
    cameras: RefinedCameras | None = None

    def __repr__(self) -> str:
        """Says in one line what was trained."""
        kind, name = self.recipe.kind, self.config.scene.name
        return f"Run(scene={name!r}, model={kind!r}, steps={self.steps}, device={self.field.aabb.device})"

    def overview(self, size: int = 320) -> View:
        """Renders the field's box from obliquely above; in a notebook, a run shows itself by this picture.

        Args:
            size: Width and height in pixels.
        """
        box = self.field.grid.aabb if self.field.boxes is None else self.field.aabb
        return self.render(overview(box, size, size))

    def _repr_png_(self) -> bytes | None:
        return self.overview()._repr_png_()

    def renderer(
        self, backend: str | None = None, *, supersampling: int | None = None, background: Tensor | None = None
    ) -> FieldRenderer:
        """Returns what renders views as the run's own evaluation does, unless told otherwise.

        Args:
            backend: As for :class:`voxelfield.FieldRenderer`.
            supersampling: As for :class:`voxelfield.FieldRenderer`.
            background: (3,) float32 on the field's device, the colour behind the scene.
        """
        return view_renderer(
            self.field,
            self.occupancy,
            self.trainer,
            self.recipe,
            backend,
            supersampling=supersampling,
            background=background,
        )

    @torch.no_grad()
    def density(self, points: Tensor) -> Tensor:
        """Evaluates the density as rendering sees it.

        Args:
            points: (..., 3) world positions, on the run's device.

        Returns:
            (...), per world unit, 0 in cells that are not occupied and outside of the box; float32.
        """
        return occupied_density(self.field, self.occupancy, points.reshape(-1, 3)).view(points.shape[:-1])

    @property
    def backend(self) -> str:
        """Name of the function that renders views by default."""
        return self._default_renderer.backend

    def evaluate(
        self,
        split: Split,
        *,
        views: int | None = None,
        images: Path | None = None,
        lpips: bool | None = None,
        on_view: OnView | None = None,
        writer: PngWriter | None = None,
        progress: bool = True,
    ) -> Evaluation:
        """Compares the field with photographs, as the run's own evaluation does.

        After training with ``trainer.exposure=affine``, views are judged as they are and with an exposure fitted.

        Args:
            split: Images and cameras, such as ``scene.test``, in the scene's frame.
            views: Judge so many of them, spread evenly; None: all.
            images: Folder that receives the rendered views as PNG; None writes none.
            lpips: Compute LPIPS too; None: if ``trainer.evaluation.lpips`` says so.
            on_view: As for :func:`voxelfield.training.evaluation.evaluate_split`.
            writer: As for :func:`voxelfield.training.evaluation.evaluate_split`.
            progress: Show a progress bar if the standard error stream is a terminal.

        Raises:
            ValueError: ``views`` is below 1, or the split has none.
            MissingPackageError: LPIPS needs a package that is not installed.
            FileNotFoundError: LPIPS needs weights that are not there.
            FloatingPointError: A rendered image holds NaN or infinity.
        """
        if views is not None and views < 1:
            raise ValueError(f"views must be at least 1, got {views}")
        if self.cameras is not None:
            split = self._refined(self.cameras.follow_split(split))
        chosen = spread(len(split) if views is None else views, len(split))
        device = self.field.aabb.device
        wanted = self.trainer.evaluation.lpips if lpips is None else lpips
        return evaluate_split(
            self._default_renderer.view,
            split,
            evaluation_background(self.trainer, device),
            images,
            views=chosen,
            lpips=Lpips(device) if wanted else None,
            fit_exposure=self.trainer.exposure != "none",
            on_view=on_view,
            writer=writer,
            progress=progress,
        )

    def _refined(self, split: Split) -> Split:
        """Refines the poses of views that are to be judged, if ``camera.test_steps`` says so."""
        camera = parse(CameraConfig, self.config.camera, "camera")
        if camera.test_steps == 0:
            return split
        return refine_views(
            self.field, self.occupancy, self.trainer, split, steps=camera.test_steps, rate=camera.test_lr
        )

    def render(self, cameras: Cameras, index: int = 0) -> View:
        """Renders one camera's image as the run's own evaluation does.

        Args:
            cameras: One camera or several, on any device.
            index: Which of them.
        """
        return self._default_renderer.view(cameras, index)

    def render_path(self, cameras: Cameras, renderer: FieldRenderer | None = None) -> Iterator[View]:
        """Renders the images of successive cameras, each when it is asked for.

        Args:
            cameras: The stations of the path, such as :func:`voxelfield.rendering.cameras.orbit` and
                :mod:`voxelfield.rendering.paths` make.
            renderer: One of :meth:`renderer`; None: as the run's own evaluation does.
        """
        draw = self._default_renderer if renderer is None else renderer
        # All at once, because each camera alone would have to wait for the images before it.
        cameras = cameras.to(self.field.aabb.device)
        for index in range(len(cameras)):
            yield draw.view(cameras, index)

    def save(
        self,
        path: Path | str,
        *,
        quality: Quality = "standard",
        cameras: Cameras | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        """Writes a model file, which :func:`voxelfield.load` reads; it holds what rendering needs.

        Args:
            path: File to write, usually ``*.safetensors``.
            quality: As for :func:`voxelfield.export.model_file.save_model`.
            cameras: As for :func:`voxelfield.export.model_file.save_model`.
            rounding: As for :func:`voxelfield.export.model_file.save_model`.

        Raises:
            ValueError: ``quality`` is none of the three, or ``rounding`` is given with ``exact``.
            OSError: The file cannot be written.
        """
        save_model(path, self, quality=quality, cameras=cameras, rounding=rounding)

    def surface(self, options: SurfaceOptions | None = None, cameras: Cameras | None = None) -> FieldSurface:
        """Finds the surface of the field, of which meshes and points are made.

        Args:
            options: Which surface is meant; None: where the density crosses its default level.
            cameras: As for :class:`voxelfield.export.mesh.FieldSurface`.

        Raises:
            MissingPackageError: A package of the extra ``mesh`` is not installed.
            ValueError: The field has no such surface or box, or there are no cameras to fuse.
        """
        settings = render_settings(self.trainer, self.field)
        return FieldSurface(self.field, self.occupancy, settings, options or SurfaceOptions(), cameras)

    def export_mesh(
        self,
        path: Path | str,
        *,
        surface: SurfaceOptions | None = None,
        mesh: MeshOptions | None = None,
        cameras: Cameras | None = None,
    ) -> None:
        """Writes the field's surface as a mesh, see :func:`voxelfield.export.geometry.mesh.save_mesh`.

        Args:
            path: ``*.ply``, ``*.obj`` or ``*.glb``.
            surface: As for :meth:`surface`.
            mesh: What is done to the mesh; None: nothing.
            cameras: As for :meth:`surface`.

        Raises:
            MissingPackageError: A package of the extra ``mesh`` is not installed.
            ValueError: The path has another ending, or as for :meth:`surface`.
            OSError: The file cannot be written.
        """
        check_mesh_path("path", Path(path))
        save_mesh(Path(path), self.surface(surface, cameras).mesh(mesh))

    @cached_property
    def _default_renderer(self) -> FieldRenderer:
        return self.renderer()


def load_run(path: Path | str, device: torch.device | str) -> Run:
    """Loads what a run has trained; none of its scene's files are needed.

    Args:
        path: A run directory or a checkpoint, see :func:`voxelfield.training.checkpoint.resolve_checkpoint`.
        device: Where field and occupancy go, such as ``"cuda"``.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no usable checkpoint, or its configuration does not make sense.
    """
    path = resolve_checkpoint(Path(path))
    checkpoint = load_checkpoint(path, device, ("config", "field", "occupancy", "step", "cameras"))
    with contents_of(path):
        config = OmegaConf.create(dict(checkpoint["config"]))
        run = restore_run(config, checkpoint["field"], checkpoint["occupancy"], checkpoint["step"], device)
        if "cameras" not in checkpoint:
            return run
        return replace(run, cameras=RefinedCameras.from_state(checkpoint["cameras"]))


def load_model(path: Path | str, device: torch.device | str) -> Run:
    """Loads a model file; none of its scene's files are needed.

    Args:
        path: What :meth:`Run.save` wrote.
        device: Where field and occupancy go, such as ``"cuda"``.

    Returns:
        The run. It renders as before, but features that were left out are zero, and it knows nothing of empty cells.

    Raises:
        FileNotFoundError: There is no such file.
        ModelFileError: It is truncated or damaged, is no voxelfield model, or was written by another version.
        ValueError: Its configuration does not make sense.
    """
    path, device = Path(path), torch.device(device)
    parts = read_model(path, device)
    with parts_of(path):
        return restore_run(*parts, device)


def restore_run(
    config: DictConfig,
    field_state: Mapping[str, Any],
    occupancy_state: Mapping[str, Tensor],
    steps: int,
    device: torch.device | str,
) -> Run:
    """Puts a run together again from what was saved of it.

    Args:
        config: The run's whole configuration.
        field_state: State of its field.
        occupancy_state: State of its occupancy grid.
        steps: Steps of training done.
        device: Where field and occupancy go.

    Raises:
        ValueError: The configuration does not make sense.
        RuntimeError: A state does not fit it.
    """
    device = torch.device(device)
    trainer = parse(TrainerConfig, config.trainer, "trainer")
    scene = parse(SceneConfig, config.scene, "scene")
    recipe = parse(Recipe, config.model, "model")
    state = {name: item.to(device) if isinstance(item, Tensor) else item for name, item in field_state.items()}
    # Without values, because these are about to be replaced: drawing the initial ones would take seconds, and memory
    # for whatever sizes the configuration names.
    with torch.device("meta"):
        field = untrained_field(recipe, scene, trainer, "meta")
    field.load_state_dict(state, assign=True)
    if any(tensor.is_meta for tensor in (*field.parameters(), *field.buffers())):
        # Someone's decoder has buffers that are not saved.
        field = untrained_field(recipe, scene, trainer, device)
        field.load_state_dict(state)
    field.requires_grad_(False)
    field.grid.to(copies_dtype(trainer.precision, device))
    with torch.device("meta"):
        occupancy = OccupancyGrid(trainer.occupancy.resolution, grid_box(scene))
    occupancy.load_state_dict({name: item.to(device) for name, item in occupancy_state.items()}, assign=True)
    return Run(field.to(device), occupancy.to(device), recipe, trainer, config, steps)
