"""Everything that a run is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from voxelfield.config.parsing import Form, Range
from voxelfield.config.types import NotNegative
from voxelfield.devices import DEVICES, DEVICES_IN_WORDS
from voxelfield.fields.recipes.pyramid import PyramidRecipe
from voxelfield.fields.recipes.recipe import Recipe
from voxelfield.grids.boxes import parse_box
from voxelfield.grids.nested_boxes import MAX_BOXES, NestedBoxes
from voxelfield.training.config.camera import CameraConfig
from voxelfield.training.config.optimizer import OptimizerConfig
from voxelfield.training.config.trainer import TrainerConfig

AUTO = "auto"
"""Value of ``resume`` that means the run's own directory."""

Corner: TypeAlias = tuple[float, float, float]
Device: TypeAlias = Annotated[str, Form(DEVICES, DEVICES_IN_WORDS)]


@dataclass
class SceneConfig:
    """What is shown.

    Attributes:
        name: Of the scene's folder.
        aabb: Low and high corner of the box that holds what matters, world units; None: as the scene's format has it.
        boxes: Number of nested boxes around one another, the smallest of which is ``aabb``; 1: there is nothing outside
            of ``aabb``; None: as the scene's format has it.
        box_ratio: How many times as large as the one inside of it each nested box is.
        near: Distance from a camera before which nothing is sampled, world units, with nested boxes; None: as the
            scene's format has it.
    """

    name: Annotated[str, Form(r".+", "the name of a folder")] = "lego"
    aabb: tuple[Corner, Corner] | None = ((-1.5, -1.5, -1.5), (1.5, 1.5, 1.5))
    boxes: Annotated[int, Range(1, MAX_BOXES)] | None = None
    box_ratio: Annotated[float, Range(1, low_open=True)] = 2.0
    near: NotNegative | None = None

    def check(self, name: str) -> None:
        """Raises ValueError unless the box has a finite inside."""
        if self.aabb is None:
            return
        try:
            parse_box(self.aabb)
        except ValueError as error:
            raise ValueError(f"{name}.{error}") from error

    @property
    def nested(self) -> NestedBoxes | None:
        """The nested boxes, if there is more than one box."""
        if self.aabb is None or self.boxes is None or self.boxes == 1:
            return None
        return NestedBoxes(self.aabb, self.boxes, self.box_ratio, self.near or 0.0)


@dataclass
class DataConfig:
    """Where scenes come from.

    Attributes:
        root: Folder with one subfolder a scene.
        download: Fetch the scene if it is absent and public.
        downscale: Images are shrunk by this factor N, or taken from the folder ``images_N`` of a capture.
        holdout: Every so many views are the test split where the format lists no splits; 0 holds none out.
        missing_images: ``error`` refuses a scene that lacks images, ``skip`` leaves such views out; None does what is
            usual for the format.
        lens_distortion: Whether rays are bent as the lenses of a capture bend them.
    """

    root: str = "data"
    download: bool = False
    downscale: Annotated[int, Range(1)] = 1
    holdout: Annotated[int, Range(0)] = 8
    missing_images: Literal["error", "skip"] | None = None
    lens_distortion: bool = True


@dataclass
class LoggerConfig:
    """Where scalars and pictures go.

    Attributes:
        name: ``tensorboard``, or ``none``.
        viewer: Whether the field can be looked at in a browser while it is trained.
        viewer_host: Address of this machine that the viewer listens at; other machines can reach it only if this is
            not a loopback address.
        viewer_port: Its port.
    """

    name: Literal["tensorboard", "none"] = "tensorboard"
    viewer: bool = False
    viewer_host: Annotated[str, Form(r".+", "an address of this machine")] = "127.0.0.1"
    viewer_port: Annotated[int, Range(1, 65535)] = 8080


@dataclass
class RunConfig:
    """A whole run: what ``configs/train.yaml`` composes.

    Attributes:
        scene: What is shown.
        data: Where it comes from.
        model: What is fitted to it.
        optimizer: How fast that learns.
        trainer: The training loop.
        camera: Whether cameras are learned too.
        logger: Where scalars and pictures go.
        seed: Of torch's random numbers.
        deterministic: Whether the run repeats itself bit for bit on the same machine, which on a GPU takes longer. A
            :class:`voxelfield.Session` leaves this to ``torch.use_deterministic_algorithms``.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:<index>``.
        resume: A checkpoint or a run directory to continue from; ``auto`` for the newest sound checkpoint in the run's
            own directory, if there is one; or None.
    """

    scene: SceneConfig = field(default_factory=SceneConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: Recipe = field(default_factory=PyramidRecipe)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    camera: CameraConfig = field(default_factory=CameraConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    seed: Annotated[int, Range(-(2**63), 2**64 - 1)] = 0
    deterministic: bool = False
    device: Device = "auto"
    resume: str | None = None

    def check(self, name: str) -> None:
        """Raises ValueError where the model does not fit the trainer."""
        prefix = f"{name}." if name else ""
        self.model.check_resolution(max(self.trainer.resolutions), f"{prefix}model")
        for term in ("tv_density", "tv_color"):
            weight = getattr(self.trainer.loss, term)
            if weight > 0 and term not in self.model.grid_terms:
                raise ValueError(
                    f"{prefix}trainer.loss.{term} must be 0 for model={self.model.kind}, which has no such term, "
                    f"got {weight}"
                )
