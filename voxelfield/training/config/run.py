"""All settings of a run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, TypeAlias

from voxelfield.config.parsing import Form, Range
from voxelfield.config.types import Positive
from voxelfield.datasets.options import ImageOptions, LoadOptions, PlaceOptions
from voxelfield.devices import DEVICES, DEVICES_IN_WORDS
from voxelfield.grids.boxes import parse_box
from voxelfield.models.model_config import ModelConfig
from voxelfield.models.pyramid import PyramidConfig
from voxelfield.training.config.camera import CameraConfig
from voxelfield.training.config.trainer import OptimizerConfig, TrainerConfig
from voxelfield.warps.ndc_box import NdcBox, Row
from voxelfield.warps.nested_boxes import NestedBoxes
from voxelfield.warps.warp import Warp

AUTO = "auto"
"""Value of ``resume`` that means the run's own directory."""

NDC_RECORD = ("ndc_camera", "ndc_window", "ndc_depth")
"""Keys of a scene that a run records, and that cannot be set."""

Corner: TypeAlias = tuple[float, float, float]
Device: TypeAlias = Annotated[str, Form(DEVICES, DEVICES_IN_WORDS)]


@dataclass
class SceneConfig(PlaceOptions):
    """Settings of the scene: its name, its box, and the options of loading that say where its field lies.

    Attributes:
        name: Name of the scene's folder.
        aabb: Low and high corner of the box of interest, world units; None for the default of the scene's format.
        box_ratio: Ratio of the sizes of successive nested boxes.
        ndc_camera: Reference camera of these coordinates, three rows of its camera-to-world matrix. A run records it
            and the following two (:data:`NDC_RECORD`); they are not settings.
        ndc_window: Limits of x / depth and y / depth in the reference camera's frame.
        ndc_depth: Extent of the grid along the optical axis, in units of x / depth.
    """

    name: Annotated[str, Form(r".+", "the name of a folder")] = "lego"
    aabb: tuple[Corner, Corner] | None = ((-1.5, -1.5, -1.5), (1.5, 1.5, 1.5))
    box_ratio: Annotated[float, Range(1, low_open=True)] = 2.0
    ndc_camera: tuple[Row, Row, Row] | None = None
    ndc_window: tuple[tuple[float, float], tuple[float, float]] | None = None
    ndc_depth: Positive | None = None

    def check(self, name: str) -> None:
        """Raises ValueError unless the box is finite and not empty, and a recorded warp is complete and valid."""
        recorded = {key: getattr(self, key) for key in NDC_RECORD}
        given = [key for key, value in recorded.items() if value is not None]
        if given and (len(given) < len(recorded) or not self.ndc or self.near is None or self.aabb is None):
            needed = ", ".join(f"{name}.{key}" for key in (*recorded, "near", "aabb"))
            raise ValueError(f"{name}.{given[0]} must come with {name}.ndc=true and with all of {needed}")
        try:
            if self.aabb is not None:
                parse_box(self.aabb)
            _ = self.warp if given else None
        except ValueError as error:
            raise ValueError(f"{name}.{error}") from error

    @property
    def ends_at_box(self) -> bool:
        """Whether the settings alone make the scene end at its box, whatever its images show."""
        return self.aabb is not None and self.boxes in (None, 1) and not self.ndc

    @property
    def warp(self) -> NestedBoxes | NdcBox | None:
        """The warp of the field's grid; None for the world frame."""
        if self.aabb is None:
            return None
        if self.ndc_camera is not None and self.ndc_window is not None and self.ndc_depth is not None:
            return NdcBox(self.aabb, self.ndc_camera, self.near or 0.0, self.ndc_window, self.ndc_depth)
        if self.boxes is None or self.boxes == 1:
            return None
        return NestedBoxes(self.aabb, self.boxes, self.box_ratio, self.near or 0.0)

    def record(self, warp: Warp | None) -> None:
        """Sets the values from which :attr:`warp` makes an equal warp.

        Raises:
            TypeError: The warp is of another class.
        """
        if isinstance(warp, NestedBoxes):
            self.boxes, self.box_ratio, self.near = warp.count, warp.ratio, warp.near
        elif isinstance(warp, NdcBox):
            self.ndc, self.near = True, warp.near
            self.ndc_camera, self.ndc_window, self.ndc_depth = warp.camera, warp.window, warp.depth
        elif warp is not None:
            raise TypeError(f"warp must be NestedBoxes, an NdcBox or None, got {type(warp).__name__}")


@dataclass
class DataConfig(ImageOptions):
    """Settings of the data sets: where they are, and the options of loading that say how photographs are read.

    Attributes:
        root: Folder with one subfolder per scene.
        download: Download the scene if it is absent and publicly available.
    """

    root: str = "data"
    download: bool = False


@dataclass
class LoggerConfig:
    """Settings of logging and of the viewer.

    Attributes:
        name: ``tensorboard``, or ``none``.
        viewer: Whether to serve a viewer of the field in training to web browsers.
        viewer_host: Local address at which the viewer listens; other machines can connect to it only if this is not a
            loopback address.
        viewer_port: Port of the viewer.
    """

    name: Literal["tensorboard", "none"] = "tensorboard"
    viewer: bool = False
    viewer_host: Annotated[str, Form(r".+", "an address of this machine")] = "127.0.0.1"
    viewer_port: Annotated[int, Range(1, 65535)] = 8080


@dataclass
class RunConfig:
    """All settings of a run, as composed by ``configs/train.yaml``.

    Attributes:
        scene: The scene.
        data: The location and preparation of the data.
        model: The kind of field to fit.
        optimizer: The optimizer.
        trainer: The training loop.
        camera: Camera refinement.
        logger: Logging and the viewer.
        seed: Seed of torch's random number generators.
        deterministic: Whether runs on the same machine are bit-for-bit reproducible, which is slower on a GPU. A
            :class:`voxelfield.Session` leaves this to ``torch.use_deterministic_algorithms``.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:<index>``.
        resume: A checkpoint or a run directory to resume from; ``auto`` for the newest valid checkpoint in the run's
            own directory, if there is one; or None.
    """

    scene: SceneConfig = field(default_factory=SceneConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=PyramidConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    camera: CameraConfig = field(default_factory=CameraConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    seed: Annotated[int, Range(-(2**63), 2**64 - 1)] = 0
    deterministic: bool = False
    device: Device = "auto"
    resume: str | None = None

    def check(self, name: str) -> None:
        """Raises ValueError if the model is incompatible with the trainer."""
        prefix = f"{name}." if name else ""
        self.model.check_resolution(max(self.trainer.resolutions), f"{prefix}model")
        if self.camera.refines:
            self.model.check_camera_refinement(max(self.trainer.resolutions), f"{prefix}model")
        for term in ("tv_density", "tv_color"):
            weight = getattr(self.trainer.loss, term)
            if weight > 0 and term not in self.model.grid_terms:
                raise ValueError(
                    f"{prefix}trainer.loss.{term} must be 0 for model={self.model.kind}, which has no such term, "
                    f"got {weight}"
                )

    def load_options(self, **changes: Any) -> dict[str, Any]:
        """Returns what :func:`voxelfield.load_scene` takes as options, as these settings have it.

        Args:
            changes: Options that are others.
        """
        stated = vars(self.scene) | vars(self.data) | {"image_size": self.trainer.image_size}
        return {option.name: stated[option.name] for option in fields(LoadOptions) if option.name in stated} | changes
