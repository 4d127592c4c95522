"""All settings of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeAlias

import torch

from voxelfield.components.registry import Group, check_settings, keys_with, with_components, with_value
from voxelfield.config import BelowOne, Count, Form, Natural, NotNegative, Positive, Range, Resolution, parse
from voxelfield.datasets.options import ImageOptions, LoadOptions
from voxelfield.devices import DEVICES, DEVICES_IN_WORDS
from voxelfield.grids.boxes import parse_box
from voxelfield.models.model_config import ModelConfig
from voxelfield.models.pyramid import PyramidConfig
from voxelfield.models.settings import LossWeights, OccupancyUpdates, Sampling, StageConfig
from voxelfield.warps.choice import WarpConfig
from voxelfield.warps.warp import Warp

AUTO = "auto"
"""Value of ``resume`` that means the run's own directory."""

Corner: TypeAlias = tuple[float, float, float]

# Of the training loop: ``scaling`` enlarges them.
_SIZES_OF_BATCH = ("max_rays", "patches", "visible_samples", "candidate_samples")
# Of the training loop, beside those of components: ``scaling=steps`` reduces them.
_NUMBERS_OF_STEPS = ("steps", "occupancy.start", "occupancy.every", "preview_every", "checkpoint_every")


def default_stages() -> list[StageConfig]:
    """Returns the schedule up to a resolution of 400."""
    return [StageConfig(0, 64, crop=True), StageConfig(150, 128), StageConfig(400, 256), StageConfig(900, 400)]


@dataclass
class RenderConfig:
    """Sampling of rays; see :class:`voxelfield.rendering.march.RenderSettings`.

    Attributes:
        voxels_per_step: Distance between samples, in voxels.
        min_transmittance: A ray stops once its transmittance falls below this.
        min_weight: Samples with a smaller compositing weight are dropped.
    """

    voxels_per_step: Positive = 0.8
    min_transmittance: BelowOne = 3e-3
    min_weight: BelowOne = 1e-3


@dataclass
class RatesConfig:
    """Learning rates for a run of this length: short runs allow higher rates and need a shorter averaging memory.

    Attributes:
        grid: Factor on ``optimizer.grid_lr``.
        network: Factor on ``optimizer.network_lr``.
        weight_decay: Factor on ``optimizer.grid_weight_decay``.
        final_factor: Factor of the learning rates after the last step (exponential decay).
        cooldown: Share of the steps, at the end, over which the learning rates also fall linearly to zero.
        betas: Adam's averaging constants, the first of which is also Muon's.
    """

    grid: Positive = 1.5
    network: Positive = 1.5
    weight_decay: NotNegative = 1.0
    final_factor: Annotated[float, Range(0, 1, low_open=True)] = 0.2
    cooldown: Annotated[float, Range(0, 1)] = 0.3
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)


@dataclass
class LossConfig(LossWeights, Group):
    """Weights of the loss terms, and settings of the components that change them."""


@dataclass
class OccupancyConfig(OccupancyUpdates, Group):
    """Skipping of empty space."""


@dataclass
class CameraConfig(Group):
    """Refinement of the training cameras; see :class:`voxelfield.components.refinement.CameraRefinement`."""

    @property
    def refines(self) -> bool:
        """Whether cameras are refined."""
        return bool(self.name == "refine")


@dataclass
class OptimizerConfig(Group):
    """Settings of the optimizers: AdamW, and those of components.

    Attributes:
        grid_lr: Learning rate of grids.
        network_lr: Learning rate of all other parameters of the field.
        view_lr_factor: Factor on ``grid_lr`` for channels that only describe view dependence, such as all but the
            constant spherical harmonic (``view_channels`` of a :class:`voxelfield.fields.decoders.Decoder`); 3D
            Gaussian Splatting (Kerbl et al. 2023) uses 1/20 for its harmonics. Must be 1 for a decoder without such
            channels.
        eps: Added to the square root of the second moment in Adam; Muon has none.
        grid_weight_decay: Decoupled weight decay of grids (Loshchilov and Hutter 2019), at the vertices that a step
            updates. It makes features decay to zero where the images do not sustain them.
        network_weight_decay: Decoupled weight decay of all other parameters of the field.
        skip_untouched: Do not update vertices, nor their moments, that no sample of the step has read.
        moments: Dtype of Adam's moments of grids: ``float32``; ``bfloat16``, with which a feature needs 14 instead of
            18 bytes in training; or ``auto``, bfloat16 where grids are read from 16-bit copies (``trainer.precision``),
            unless ``trainer.rates.betas`` are too close to 1 for it.
    """

    grid_lr: Positive = 0.02
    network_lr: Positive = 0.005
    view_lr_factor: Positive = 1.0
    eps: NotNegative = 1e-15
    grid_weight_decay: NotNegative = 0.05
    network_weight_decay: NotNegative = 0.0
    skip_untouched: bool = True
    moments: Literal["auto", "float32", "bfloat16"] = "auto"


@dataclass
class EvaluationConfig:
    """The final evaluation.

    Attributes:
        views: Number of test views to evaluate, evenly spread over the split; null means all.
        supersampling: Number of rays along each side of a pixel; also used for previews and the video.
        lpips: Also compute LPIPS, which requires ``pip install "voxelfield[lpips]"`` and the weights of VGG16.
        save_images: Write each rendered view as PNG.
        video_frames: Number of frames of the video, which takes six seconds with up to 180 of them, and has at most 800
            rows; 0 writes none.
        report: Write ``report.html`` after everything else.
    """

    views: Count | None = None
    supersampling: Count = 3
    lpips: bool = False
    save_images: bool = True
    video_frames: Natural = 180
    report: bool = True


@dataclass
class TrainerConfig(Group):
    """The training loop.

    Attributes:
        steps: Number of optimizer steps.
        rates: Settings of the optimizer that depend on the length of the run.
        image_size: Longest image side after downscaling by a whole factor; null keeps images as they are.
        images: Where the training images, and their weights in ``loss.structure``, are stored for a GPU: in ``device``
            memory; in pinned memory of the ``host``, which the GPU reads over the bus; or ``auto``, on the device if
            they fit. The result is the same.
        background: Background of transparent pixels in training: ``random`` (per pixel), ``white`` or ``black``.
        evaluation_background: Background over which test views are composited.
        max_rays: Largest number of rays per step.
        extra_rays: Whether ``max_rays`` grows, up to four times, in a scene of a single box that fewer than half of the
            pixels see, as of panoramas around an object (:meth:`with_rays_that_miss`).
        supersampling: Number of rays along each side of a training pixel; 1 casts a single ray through its centre.
        patches: Number of square patches of neighbouring pixels in each step, in addition to single pixels, for losses
            that compare them.
        patch_size: Side of the patches in pixels.
        pixel_averaging: Values that are averaged over a pixel's rays: ``linear_light``, which sRGB values encode, or
            the ``encoded`` values as they are; also used with ``evaluation.supersampling``.
        visible_samples: Number of visible ray samples per step: on CUDA, as many rays are used as fit completely; on
            the CPU, the number of rays is adapted.
        candidate_samples: Number of samples per step, visible or not, for which memory is allocated (CUDA only), for
            fields that are not marched in one kernel (:func:`voxelfield.rendering.march.visible_samples`).
        small_batches: Share of the steps, from the first on, whose batches are smaller, which nearly suffices
            while learning rates are high: a quarter of the rays and samples in the first third of these steps, half of
            them in the other two (after Smith et al. 2018, "Don't Decay the Learning Rate, Increase the Batch Size").
        chunk: Number of rays per chunk where views are rendered by :func:`voxelfield.rendering.render.render_view`.
        precision: ``float32``, ``bfloat16`` or ``float16`` for decoders other than a
            :class:`voxelfield.fields.decoders.FusedMLPDecoder` (which is float16 on CUDA, float32 on the CPU); on CUDA,
            with a 16-bit precision grids are read from float16 copies.
        loss_scale: Factor on gradients against underflow in float16; it does not affect the updates.
        finest_resolution: Resolution of the finest dense level; only an interpolation target for ``stages`` and
            ``model.resolutions``.
        sparse_resolutions: Resolutions of levels, finer than every dense one, that are allocated only where images
            show something; likewise only an interpolation target.
        roulette: Weight below which samples are kept at random in training; likewise only an interpolation target.
        stages: Coarse-to-fine schedule; the first stage starts at step 0.
        model_file: Precision of the features in the model file of a finished run: ``exact``, float16; ``standard``, at
            most one byte each; ``small``, only features that training images show, as coarsely as these allow; or
            ``none`` to write no file.
        log_every: Number of steps between records of scalars.
        preview_every: Number of steps between rendered previews, of which one follows the last step; 0 for none.
        preview_views: Number of fixed test views in a preview.
        checkpoint_every: Number of steps between checkpoints; 0 writes only one at the end.
        keep_checkpoints: Keep all checkpoints; otherwise each replaces the previous one.
        cuda_graph: Whether a step on CUDA is captured in a graph and replayed, which saves the host's time of every
            kernel launch. ``false`` runs the Python code of losses and components in every step, to find their
            errors.
        not_finite: Reaction to a step whose loss or gradients are not finite: ``stop`` training at the next record, or
            ``skip`` the step by setting its gradients to zero, at the cost of a pass over all gradients in every step.
        scaling: Meaning of these settings for several devices. With ``none``, they share one batch, which gives the
            result of one device. With ``steps``, each has a batch as large, and there are as many times fewer steps, at
            higher learning rates. With ``batch``, each has a batch as large in as many steps (:meth:`scaled`).
        checkpoint_errors: Reaction if a checkpoint before the last step cannot be written, as on a full disk:
            ``continue`` or ``stop`` training. Earlier checkpoints remain in either case.
    """

    steps: Count = 5000
    rates: RatesConfig = field(default_factory=RatesConfig)
    image_size: Count | None = None
    images: Literal["auto", "device", "host"] = "auto"
    background: Literal["random", "white", "black"] = "random"
    evaluation_background: Literal["white", "black"] = "white"
    max_rays: Count = 524288
    extra_rays: bool = True
    supersampling: Count = 2
    patches: Natural = 0
    patch_size: Count = 16
    pixel_averaging: Literal["linear_light", "encoded"] = "linear_light"
    visible_samples: Count = 524288
    candidate_samples: Count = 4194304
    small_batches: Annotated[float, Range(0, 1)] = 0.5
    chunk: Count = 65536
    precision: Literal["float32", "bfloat16", "float16"] = "float16"
    loss_scale: Positive = 65536.0
    finest_resolution: Resolution | None = 400
    sparse_resolutions: list[Resolution] = field(default_factory=list)
    roulette: Annotated[float, Range(0, 1)] = 0.0
    stages: list[StageConfig] = field(default_factory=default_stages)
    occupancy: OccupancyConfig = field(default_factory=OccupancyConfig)
    render: RenderConfig = field(default_factory=RenderConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    model_file: Literal["none", "exact", "standard", "small"] = "standard"
    log_every: Count = 100
    preview_every: Natural = 5000
    preview_views: Count = 3
    checkpoint_every: Natural = 0
    keep_checkpoints: bool = False
    cuda_graph: bool = True
    not_finite: Literal["stop", "skip"] = "stop"
    checkpoint_errors: Literal["continue", "stop"] = "continue"
    scaling: Literal["none", "steps", "batch"] = "none"

    @property
    def resolutions(self) -> list[int]:
        """The stages' resolutions, in order."""
        return [stage.resolution for stage in self.stages]

    @property
    def sampling(self) -> Sampling:
        """How the model samples rays and draws views."""
        return Sampling(
            **vars(self.render),
            precision=getattr(torch, self.precision),
            supersampling=self.evaluation.supersampling,
            pixel_averaging=self.pixel_averaging,
            background=self.evaluation_background,
            chunk=self.chunk,
        )

    def batch_share(self, step: int) -> float:
        """Returns the size of the batch of a step, as a share of the settings', as ``small_batches`` says."""
        early = self.small_batches * self.steps
        return 1 / 4 if 3 * step < early else 1 / 2 if step < early else 1

    def with_rays_that_miss(self, share: float) -> TrainerConfig:
        """Returns the settings with more rays, if fewer than half of all rays go through the scene and have samples.

        Settings that have more rays already, and thus ``extra_rays=false``, are returned as they are.

        Args:
            share: Share of the rays that go through the scene's box; below a quarter it counts as a quarter, because
                memory for distances is allocated for each ray.
        """
        if share >= 0.5 or not self.extra_rays:
            return self
        return replace(self, max_rays=math.ceil(self.max_rays / max(share, 1 / 4)), extra_rays=False)

    def scaled(self, devices: int) -> TrainerConfig:
        """Returns the settings that several devices follow together, as ``scaling`` says.

        Learning rates grow with the square root of the batch, as for Adam the noise of a gradient suggests (Malladi et
        al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms").

        Args:
            devices: Their number.
        """
        if self.scaling == "none" or devices == 1:
            return self
        batch = {name: devices * getattr(self, name) for name in _SIZES_OF_BATCH}
        larger = replace(self, **batch, scaling="none")
        if self.scaling == "batch":
            return larger
        for key in (*_NUMBERS_OF_STEPS, *keys_with("steps", below="trainer.")):
            larger = with_value(larger, key, -(-attrgetter(key)(self) // devices))
        root = math.sqrt(devices)
        return replace(
            larger,
            rates=replace(self.rates, grid=self.rates.grid * root, network=self.rates.network * root),
            stages=[replace(stage, step=-(-stage.step // devices)) for stage in self.stages],
        )

    def check(self, name: str) -> None:
        """Raises ValueError if settings contradict each other."""
        if self.max_rays < self.supersampling**2:
            raise ValueError(
                f"{name}.max_rays must be at least {name}.supersampling**2 = {self.supersampling**2}, the rays of a "
                f"pixel, got {self.max_rays}"
            )
        pixels, share = self.patches * self.patch_size**2, self.batch_share(0)
        if pixels > int(share * self.max_rays) // self.supersampling**2:
            early = "" if share == 1 else f", in early steps {share:g} of them ({name}.small_batches)"
            raise ValueError(
                f"{name}.patches must have room in {name}.max_rays = {self.max_rays} rays{early}, got {self.patches} "
                f"patches of {pixels} pixels"
            )
        steps = [stage.step for stage in self.stages]
        if not steps or steps[0] != 0 or steps != sorted(set(steps)):
            raise ValueError(f"{name}.stages must start at step 0 and have rising steps, got steps {steps}")
        # In a cropped box, even fewer voxels can be finer ones.
        if any(later.resolution < earlier.resolution and not later.crop for earlier, later in pairwise(self.stages)):
            raise ValueError(
                f"{name}.stages must not become coarser without a crop (in the presets, {name}.finest_resolution is "
                f"one of them), got resolutions {self.resolutions}"
            )


@dataclass
class SceneConfig:
    """Settings of the scene.

    Attributes:
        name: Name of the scene's folder.
        aabb: Low and high corner of the box of interest, world units; None for the default of the scene's format.
        model: Number N of the COLMAP model ``sparse/N``, if a capture has several; None: the one with the most images.
        origin: Position in the capture that the box, and all positions of the field, are relative to; None: see
            :class:`voxelfield.datasets.options.LoadOptions`. In the record of an earlier version: that of the capture.
        unit: Length, in world units, that settings of densities, distortion and motions of cameras are measured in;
            None: that of the box, :func:`voxelfield.grids.boxes.length_unit`. In the record of an earlier version: 1.
    """

    name: Annotated[str, Form(r".+", "the name of a folder")] = "lego"
    aabb: tuple[Corner, Corner] | None = ((-1.5, -1.5, -1.5), (1.5, 1.5, 1.5))
    model: Natural | None = None
    origin: Corner | None = None
    unit: Positive | None = None

    def check(self, name: str) -> None:
        """Raises ValueError unless the box is finite and not empty."""
        if self.aabb is not None:
            parse_box(self.aabb, f"{name}.aabb")


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
class LoggerConfig(Group):
    """Settings of logging, beside the switches of loggers, and of the viewer.

    Attributes:
        project: Name by which wandb, mlflow, trackio and rerun group runs.
        viewer: Whether to serve a viewer of the field in training to web browsers.
        viewer_host: Local address at which the viewer listens; other machines can connect to it only if this is not a
            loopback address.
        viewer_port: Port of the viewer.
        viewer_keep: Whether the viewer shows the finished field until Ctrl-C, instead of closing at the end of the run.
    """

    project: Annotated[str, Form(r".+", "a name")] = "voxelfield"
    viewer: bool = False
    viewer_host: Annotated[str, Form(r".+", "an address of this machine")] = "127.0.0.1"
    viewer_port: Annotated[int, Range(1, 65535)] = 8080
    viewer_keep: bool = False


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
        losses: Loss terms of other packages or of files in the working directory, each a function as
            ``module:function`` (:func:`voxelfield.models.component.named_losses`).
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
    losses: list[Annotated[str, Form(r"[\w.]+:[\w.]+", "module:function")]] = field(default_factory=list)
    seed: Annotated[int, Range(-(2**63), 2**64 - 1)] = 0
    deterministic: bool = False
    device: Annotated[str, Form(DEVICES, DEVICES_IN_WORDS)] = "auto"
    devices: Annotated[str, Form(r"auto|all|[1-9]\d{0,3}", "all or a number from 1")] | None = None
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


def parse_recorded(values: Any, name: str = "") -> RunConfig:
    """Validates the settings of a run in its files, as :func:`voxelfield.config.parse` does.

    Those of loggers are left out: nothing depends on them, and some may be of packages that are not installed here.
    """
    if isinstance(values, Mapping):
        values = {key: value for key, value in values.items() if key != "logger"}
    return parse(RunConfig, values, name)
