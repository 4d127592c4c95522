"""A trained model, loaded for rendering rather than for more training."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from voxelfield import processes
from voxelfield.components.exposure import AffineExposure, CameraTones, recolored
from voxelfield.components.refinement import RefinedCameras, refine_views
from voxelfield.datasets.loading import find_scene, load_scene
from voxelfield.datasets.scene import Scene, Split
from voxelfield.evaluation.evaluation import (
    Evaluation,
    OnView,
    check_pictures,
    evaluate_split,
    evenly_spaced,
    save_images,
)
from voxelfield.evaluation.metrics import Lpips
from voxelfield.fields.environment import Environment
from voxelfield.fields.field import RadianceField
from voxelfield.foundation.checks import check_at_least_one, check_tensor
from voxelfield.foundation.errors import is_out_of_memory, shown
from voxelfield.grids.boxes import box_extent, box_tensor, parse_box
from voxelfield.grids.working_copies import copies_dtype
from voxelfield.media.png import BackgroundWriter
from voxelfield.messages import clipped
from voxelfield.models.model import Model
from voxelfield.models.settings import reached_resolution
from voxelfield.rendering.backends import GenericBackend
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.occupancy import OccupancyGrid, occupied_density
from voxelfield.rendering.paths import overview, reference_camera
from voxelfield.rendering.render import View
from voxelfield.rendering.renderer import FieldRenderer
from voxelfield.settings import RunConfig, TrainerConfig
from voxelfield.settings.schema import parse_recorded
from voxelfield.trained.checkpoint_file import check_state

logger = logging.getLogger(__name__)

# A loss of PSNR by drawing from stored values, in dB, above which the message about it is a warning.
_LARGE_COST = 0.5


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """The result of training a field on a scene.

    Attributes:
        model: The model, whose field has no gradients; its grids are in the dtype in which training on that device
            reads them.
        config: All settings of the run.
        steps: Number of training steps done.
        cameras: The refined training cameras, if cameras were refined. The field is then in the world frame of the
            refined ones, into which :meth:`evaluate` moves the views of a split.
        tones: State of the training cameras' vignetting and response
            (:class:`voxelfield.components.exposure.CameraTones`), if they were learned. Views are rendered
            without them; :meth:`evaluate` applies them before it compares views with photographs.
        exposures: State of the training images' exposures (:class:`voxelfield.components.exposure.AffineExposure`), if
            they were learned and differ. Views are rendered without them; :meth:`evaluate` predicts those of other
            views from them.
    """

    model: Model
    config: RunConfig
    steps: int
    cameras: RefinedCameras | None = None
    tones: Mapping[str, Tensor] | None = None
    exposures: Mapping[str, Tensor] | None = None

    @property
    def field(self) -> RadianceField:
        """The field of the model."""
        return self.model.field

    @property
    def occupancy(self) -> OccupancyGrid:
        """The occupied cells of the model."""
        return self.model.occupancy

    @property
    def trainer(self) -> TrainerConfig:
        """Settings of the training loop, which include those of the evaluation."""
        return self.config.trainer

    def __repr__(self) -> str:
        """Returns one line that says what was trained."""
        kind, name = self.config.model.kind, self.config.scene.name
        return f"TrainedModel(scene={name!r}, model={kind!r}, steps={self.steps}, device={self.model.device})"

    def overview(self, size: int = 320) -> View:
        """Renders the field's box from obliquely above; this image represents the run in a notebook.

        A field in normalised device coordinates is rendered from its reference camera.

        Args:
            size: Width and height in pixels.
        """
        camera = reference_camera(self.model.warp, size, size)
        return self.render(overview(self.model.field.aabb, size, size) if camera is None else camera)

    def _repr_png_(self) -> bytes | None:
        return self.overview()._repr_png_()

    def renderer(
        self, backend: str | None = None, *, supersampling: int | None = None, background: Tensor | None = None
    ) -> FieldRenderer:
        """Returns a renderer, by default with the settings of the run's own evaluation.

        Args:
            backend: As for :class:`voxelfield.FieldRenderer`.
            supersampling: As for :class:`voxelfield.FieldRenderer`.
            background: (3,) float32 on the field's device, the colour behind the scene; None for what was learned
                with ``model.environment=map``, or else for that of the evaluation.
        """
        return self.model.renderer(backend, supersampling=supersampling, background=background)

    @torch.no_grad()
    def density(self, points: Tensor) -> Tensor:
        """Evaluates the density as rendered.

        Args:
            points: (..., 3) world positions, on the run's device.

        Returns:
            (...), per world unit, 0 in cells that are not occupied and outside the box; float32.

        Raises:
            ValueError: ``points`` has another shape.
        """
        check_tensor("points", points, ("...", 3))
        return occupied_density(self.field, self.occupancy, points.reshape(-1, 3)).view(points.shape[:-1])

    def backend_for(self, cameras: Cameras, backend: str | None = None) -> str:
        """Returns the name of the function that renders views of these cameras where ``backend`` is asked for."""
        return (backend or self._default_renderer.backend) if cameras.has_ray_kernel else GenericBackend.name

    def evaluate(
        self,
        split: Split,
        *,
        views: int | None = None,
        images: Path | str | None = None,
        lpips: bool | None = None,
        on_view: OnView | None = None,
        progress: bool = True,
        backend: str | None = None,
    ) -> Evaluation:
        """Compares the field with photographs, as the run's own evaluation does.

        After training with ``trainer.exposure``, ``trainer.vignetting`` or ``trainer.response``, views are evaluated as
        their cameras would show them: with the exposure that those of the training images nearby predict
        (:meth:`voxelfield.components.exposure.AffineExposure.predict`), and with the vignetting and the response of the
        cameras that took them. They are evaluated once more with an exposure that is fitted to each.

        In processes that train together (:mod:`voxelfield.processes`), all of them must make this call: each evaluates
        every n-th view, or those whose images it holds, writes their images and calls ``on_view``, and all return the
        evaluation of all views.

        Args:
            split: Images and cameras, such as ``scene.test``, in the scene's world frame.
            views: Number of views to evaluate, spread evenly; None for all.
            images: Folder to which the rendered views are written as PNG; None writes none.
            lpips: Whether to compute LPIPS too; None for the value of ``trainer.evaluation.lpips``.
            on_view: Called with each view (:data:`voxelfield.evaluation.evaluation.OnView`).
            progress: Display how many views are done.
            backend: As for :meth:`renderer`; None for the fastest one.

        Raises:
            TypeError: ``split`` is not a :class:`voxelfield.datasets.scene.Split`.
            ValueError: ``views`` is not an int of at least 1, the split has no views, or the backend does not render
                this field.
            MissingPackageError: LPIPS needs a package that is not installed.
            FileNotFoundError: A file of weights that LPIPS needs does not exist.
            FileExistsError: ``images`` contains an image of a view's name that voxelfield has not written.
            FloatingPointError: A rendered image contains NaN or infinity.
        """
        if not isinstance(split, Split):
            raise TypeError(f"split must be a Split, such as scene.test, got {shown(split)}")
        if views is not None:
            check_at_least_one("views", views)
        split, tones = self._as_photographed(split)
        chosen = evenly_spaced(len(split) if views is None else views, len(split))
        if tones is not None:
            others = [split.names[index] for index in chosen if tones.camera[index] == len(tones.known)]
            if others and processes.is_first():
                logger.warning(
                    "cameras that took no training photograph have no known vignetting and response, without which "
                    "%d of the views are compared: %s",
                    *(len(others), clipped(", ".join(others))),
                )
        if not chosen:
            raise ValueError("split must have views to evaluate, got none")
        lpips = self.trainer.evaluation.lpips if lpips is None else lpips
        return self._compare(
            split, tones, chosen, backend, images=images, lpips=lpips, on_view=on_view, progress=progress
        )

    def _as_photographed(self, split: Split) -> tuple[Split, CameraTones | None]:
        """Returns views in the poses in which they are evaluated, and the vignetting and response of their cameras."""
        # Cameras are recognised by their intrinsics, which refinement changes.
        tones = None if self.tones is None else CameraTones.restored(self.tones, split.cameras)
        if self.cameras is None:
            return split, tones
        split, steps, rate = self.cameras.follow_split(split), self.config.camera.test_steps, self.config.camera.test_lr
        if steps > 0:
            split = refine_views(self.model, self.trainer, split, steps=steps, rate=rate, tones=tones)
        return split, tones

    def _compare(
        self,
        split: Split,
        tones: CameraTones | None,
        chosen: Sequence[int],
        backend: str | None,
        *,
        images: Path | str | None = None,
        lpips: bool = False,
        on_view: OnView | None = None,
        progress: bool = False,
    ) -> Evaluation:
        """Compares the chosen views of :meth:`_as_photographed`, see :meth:`evaluate`; a collective call."""

        def evaluate_local() -> Evaluation:
            called = [] if on_view is None else [on_view]
            with contextlib.ExitStack() as stack:
                if images is not None:
                    folder = Path(images)
                    check_pictures("images", folder, (split.names[index] for index in chosen))
                    called.append(save_images(folder, stack.enter_context(BackgroundWriter())))
                local = chosen[processes.rank() :: processes.count()]
                if split.local_slice is not None:
                    local = [index for index in chosen if index in split.local_indices]
                renderer = self._default_renderer if backend is None else self.renderer(backend)
                return evaluate_split(
                    self._photographing(renderer, split, tones),
                    split,
                    self.model.background,
                    views=local,
                    lpips=Lpips(self.model.device) if lpips else None,
                    fit_exposure=self.exposures is not None or tones is not None,
                    environment=self.model.environment is not None,
                    on_view=called,
                    progress=progress,
                )

        parts = processes.gather_results(evaluate_local)
        return Evaluation.joined(parts, (split.names[index] for index in chosen))

    def baking_cost(self, split: Split, evaluation: Evaluation, views: int = 3) -> float | None:
        """Returns how much PSNR it costs that images are drawn from stored values, and logs it.

        These are the values of :func:`voxelfield.rendering.bricks.bake`. With fitted exposures, the PSNR is that of the
        fitted images. A collective call in processes that train together.

        Args:
            split: The views that :meth:`evaluate` was given.
            evaluation: What it has returned, with the default backend.
            views: Largest number of evaluated views that are drawn again, by ``render_view``; spread evenly.

        Returns:
            The difference between the mean PSNRs, dB. None if images are not drawn from stored values. None as well,
            with a warning, if drawing without them takes too much memory or gives an image that is not finite.
        """
        if self.backend_for(split.cameras) not in (kind.name for kind in self.model.image_backends if kind.bakes):
            return None
        names = [evaluation.names[index] for index in evenly_spaced(views, len(evaluation.names))]
        split, tones = self._as_photographed(split)
        chosen = [split.names.index(name) for name in names]
        try:
            exact = self._compare(split, tones, chosen, GenericBackend.name).means()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            logger.warning("not enough memory to measure what drawing from stored values costs: %s", error)
            return None
        except FloatingPointError as error:
            logger.warning("the cost of drawing from stored values is not known: without them, %s", error)
            return None
        metric = "psnr_fitted" if "psnr_fitted" in exact else "psnr"
        scores = dict(zip(evaluation.names, evaluation.scores[metric], strict=True))
        stored = sum(scores[name] for name in names) / len(names)
        cost = exact[metric] - stored
        if processes.is_first():
            logger.log(
                logging.WARNING if cost > _LARGE_COST else logging.INFO,
                "%d views: mean PSNR %.2f dB drawn from stored values, %.2f dB without",
                *(len(names), stored, exact[metric]),
            )
        return cost

    def _photographing(
        self, renderer: FieldRenderer, split: Split, tones: CameraTones | None
    ) -> Callable[[Cameras, int], View]:
        """Returns a function that renders one of the views of a split as its camera shows it."""
        device, background = self.model.device, self.model.background if self.model.environment is None else None
        shown = None if tones is None else copy.deepcopy(tones).to(device)
        predicted = None
        if self.exposures is not None:
            exposure = AffineExposure.restored(self.exposures).to(device)
            predicted = exposure.predict(split.cameras.c2w, None if exposure.exif is None else split.exposures)

        def photograph(cameras: Cameras, index: int) -> View:
            view = renderer.view(cameras, index)
            if predicted is not None:
                gain, offset = (values[index] for values in predicted)
                view = recolored(view, background, lambda rgb, opacity: gain * rgb + offset * opacity[:, None])
            return view if shown is None else shown.photograph(view, index, background)

        return photograph

    def render(self, cameras: Cameras, index: int = 0) -> View:
        """Renders one camera's image as the run's own evaluation does.

        Args:
            cameras: One camera or several, on any device.
            index: Index of the camera.
        """
        return self._default_renderer.view(cameras, index)

    def render_path(self, cameras: Cameras, renderer: FieldRenderer | None = None) -> Iterator[View]:
        """Renders the images of successive cameras lazily.

        Args:
            cameras: The cameras of the path, for example from :func:`voxelfield.rendering.paths.orbit` or
                :mod:`voxelfield.rendering.paths`.
            renderer: A renderer from :meth:`renderer`; None for the one of the run's own evaluation.
        """
        renderer = self._default_renderer if renderer is None else renderer
        # All at once, because copying each camera separately would wait for the images before it.
        cameras = cameras.to(renderer.device)
        for index in range(len(cameras)):
            yield renderer.view(cameras, index)

    def scene_folder(self, root: Path | str | None = None) -> Path:
        """Finds the folder of the run's scene; the folder of scenes ``root`` replaces that of the run."""
        return find_scene(self.config.scene.name, root or self.config.data.root).folder

    def load_scene(
        self, splits: Sequence[str] | None = None, *, root: Path | str | None = None, **changes: Any
    ) -> Scene:
        """Loads splits of the run's scene.

        Args:
            splits: Names of the splits; None for all.
            root: Folder of scenes; None for that of the run.
            changes: Options of :func:`voxelfield.load_scene` that replace those of the run, unless they are None.
                Images are shrunk either by ``downscale`` or to the size that the run was trained at.

        Raises:
            FileNotFoundError: The scene is not there.
            ValueError: It is damaged, or there is no such split.
        """
        replaced = {name: value for name, value in changes.items() if value is not None}
        if "downscale" in replaced:
            replaced["image_size"] = None
        stated = {"splits": splits, "origin": self.config.scene.origin or (0.0, 0.0, 0.0)}
        return load_scene(self.scene_folder(root), **self.config.load_options(**stated | replaced))

    @cached_property
    def _default_renderer(self) -> FieldRenderer:
        return self.renderer()


def untrained_model(config: RunConfig, device: torch.device | str) -> Model:
    """Builds a model in its state at the start of training, with all cells occupied, in the recorded box and warp.

    The device may be ``meta``, to find out shapes only. Raises ValueError if the scene has no box, or if it has a warp,
    which this kind of field does not support.
    """
    if config.scene.aabb is None:
        raise ValueError("scene.aabb must be the box that the field was trained in, got None")
    warp, trainer = config.recorded_warp, config.trainer
    box = parse_box(config.scene.aabb) if warp is None else warp.warped_aabb
    aabb = box_tensor(box, torch.device("cpu"))
    cells: int | list[int] = trainer.occupancy.resolution
    if warp is not None:
        # As many cells per two units of warped coordinates.
        cells = [max(1, round(trainer.occupancy.resolution * extent / 2)) for extent in box_extent(box)]
    unit = config.scene.unit or 1.0
    field = config.model.in_unit(unit if warp is None else 1.0).build(aabb, trainer.resolutions, device)
    if warp is not None:
        if not isinstance(field, RadianceField):
            name, wanted = ("ndc", "false") if warp.is_forward_facing else ("boxes", 1)
            raise ValueError(f"warp.{name} must be {wanted} for a {type(field).__name__}, which is no RadianceField")
        field.warp = warp
    if config.model.environment == "map":
        field.environment = Environment(device)
    with torch.device(device):
        occupancy = OccupancyGrid(cells, aabb)
    model = config.model.build_model(field, occupancy, trainer.sampling)
    model.unit = unit
    return model


def outlined_model(config: RunConfig, device: torch.device | str) -> Model:
    """Builds :func:`untrained_model` for its shapes, on ``meta``, or on a device if its ``build`` reads values."""
    try:
        with torch.device("meta"):
            return untrained_model(config, "meta")
    except (RuntimeError, TypeError) as error:
        # Torch has no exception of its own for this, but all of its messages name the device.
        if "meta" not in str(error).lower():
            raise
    with torch.random.fork_rng(devices=[]):  # as on meta, training continues with the random numbers that it had
        return untrained_model(config, device)


def restore_trained_model(
    config: RunConfig | Mapping[str, Any], state: Mapping[str, Any], steps: int, device: torch.device | str
) -> TrainedModel:
    """Reconstructs a trained model on a device from a run's settings and the state dict of its model after some steps.

    Raises ValueError for an invalid configuration, and for a tensor that no run could have saved; RuntimeError for a
    state that does not match the configuration.
    """
    if type(steps) is not int or steps < 0:
        raise ValueError(f"step must be a whole number, not negative, got {shown(steps)}")
    device = torch.device(device)
    settings = parse_recorded(config)
    state = {name: item.to(device) if isinstance(item, Tensor) else item for name, item in state.items()}
    # The values are about to be replaced: initialising them would take seconds, and memory for any size that the
    # configuration names.
    model = outlined_model(settings, device)
    check_state(model, state, model.grid.levels)
    model.load_state_dict(state, assign=True)
    tensors = (*vars(model).values(), *model.parameters(), *model.buffers())
    if any(tensor.is_meta for tensor in tensors if isinstance(tensor, Tensor)):
        # A user's model may have tensors that are not saved, and a user's decoder such buffers.
        model = untrained_model(settings, device)
        model.load_state_dict(state)
    model.to(device).requires_grad_(False)
    model.grid.to(copies_dtype(settings.trainer.precision, device))
    model.resolution = reached_resolution(settings.trainer.stages, steps)
    _ = model.settings  # rejects settings with which an image would take hours
    return TrainedModel(model, settings, steps)
