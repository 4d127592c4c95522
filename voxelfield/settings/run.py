"""All settings of a run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, TypeAlias

from voxelfield.components.registry import check_settings, with_components
from voxelfield.config import Form, Natural, Positive, Range
from voxelfield.datasets.options import ImageOptions, LoadOptions
from voxelfield.devices import DEVICES, DEVICES_IN_WORDS
from voxelfield.grids.boxes import parse_box
from voxelfield.models.model_config import ModelConfig
from voxelfield.models.pyramid import PyramidConfig
from voxelfield.settings.trainer import CameraConfig, OptimizerConfig, TrainerConfig
from voxelfield.warps.choice import WarpConfig
from voxelfield.warps.warp import Warp

AUTO = "auto"
"""Value of ``resume`` that means the run's own directory."""

Corner: TypeAlias = tuple[float, float, float]
Device: TypeAlias = Annotated[str, Form(DEVICES, DEVICES_IN_WORDS)]
Devices: TypeAlias = Annotated[str, Form(r"auto|all|[1-9]\d{0,3}", "all or a number from 1")]


@dataclass
class SceneConfig:
    """Settings of the scene.

    Attributes:
        name: Name of the scene's folder.
        aabb: Low and high corner of the box of interest, world units; None for the default of the scene's format.
        model: Number N of the COLMAP model ``sparse/N``, if a capture has several; None: the one with the most images.
    """

    name: Annotated[str, Form(r".+", "the name of a folder")] = "lego"
    aabb: tuple[Corner, Corner] | None = ((-1.5, -1.5, -1.5), (1.5, 1.5, 1.5))
    model: Natural | None = None

    def check(self, name: str) -> None:
        """Raises ValueError unless the box is finite and not empty."""
        try:
            if self.aabb is not None:
                parse_box(self.aabb)
        except ValueError as error:
            raise ValueError(f"{name}.{error}") from error


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


@with_components
@dataclass
class RunConfig:
    """All settings of a run, as composed by ``configs/train.yaml``.

    Attributes:
        scene: The scene.
        warp: The warp of the field, for scenes that extend beyond a box.
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
        devices: Number of processes that ``voxelfield train`` starts on this machine, one a GPU; ``all`` for all GPUs;
            None for one, or for those that torchrun or srun has started. A :class:`voxelfield.Session` trains with the
            process group that there is.
        process_timeout: Time within which each process must answer the others, seconds.
        resume: A checkpoint or a run directory to resume from; ``auto`` for the newest valid checkpoint in the run's
            own directory, if there is one; or None.
    """

    scene: SceneConfig = field(default_factory=SceneConfig)
    warp: WarpConfig = field(default_factory=WarpConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=PyramidConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    camera: CameraConfig = field(default_factory=CameraConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    seed: Annotated[int, Range(-(2**63), 2**64 - 1)] = 0
    deterministic: bool = False
    device: Device = "auto"
    devices: Devices | None = None
    process_timeout: Positive = 600.0
    resume: str | None = None

    def check(self, name: str) -> None:
        """Raises ValueError if the model is incompatible with the trainer, or the box with a recorded warp."""
        prefix = f"{name}." if name else ""
        try:
            _ = self.recorded_warp if self.warp.camera is not None else None
        except ValueError as error:
            raise ValueError(f"{prefix}warp: {error}") from error
        if self.devices == AUTO:
            raise ValueError(f"{prefix}devices must be all or a number from 1, got auto: leave it out for one process")
        self.model.check_resolution(max(self.trainer.resolutions), f"{prefix}model")
        check_settings(self, prefix)

    @property
    def recorded_warp(self) -> Warp | None:
        """The warp that a run has recorded (:meth:`voxelfield.warps.choice.WarpConfig.build`)."""
        return None if self.scene.aabb is None else self.warp.build(self.scene.aabb)

    @property
    def ends_at_box(self) -> bool:
        """Whether the settings alone make the field end at the scene's box, whatever its images show."""
        return self.scene.aabb is not None and self.warp.ends_at_box(bounded=True)

    def load_options(self, **changes: Any) -> dict[str, Any]:
        """Returns the options of :func:`voxelfield.load_scene` from these settings.

        Args:
            changes: Options that replace them.
        """
        stated = vars(self.scene) | vars(self.data) | {"image_size": self.trainer.image_size}
        return {option.name: stated[option.name] for option in fields(LoadOptions) if option.name in stated} | changes
