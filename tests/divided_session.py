"""One of several processes that train together: ``python divided_session.py RANK PROCESSES STORE FOLDER [cuda]``.

Draws pixels of :data:`CAPTURES` in FOLDER, trains each of :data:`KINDS`, then trains one with a pause from checkpoints,
and saves in process 0 what came of it as ``FOLDER/PROCESSES.pt``. With ``cuda``, each process has a GPU, and trains
:data:`ON_GPUS`.
"""

from __future__ import annotations

import itertools
import json
import sys
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from quick_presets import preset

import voxelfield
from voxelfield import processes as group
from voxelfield.components.logger import NullLogger
from voxelfield.components.lost_cameras import shrunk
from voxelfield.components.robust import RobustWeights
from voxelfield.components.structure import structure_weights
from voxelfield.datasets.blender import load_blender
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.scene import Split
from voxelfield.distributed import division, exchange
from voxelfield.foundation.zero_packing import put_back_zeros
from voxelfield.models.pixel_sampler import Images, PixelSampler
from voxelfield.trained.checkpoint_file import load_checkpoint
from voxelfield.training import optimizer
from voxelfield.training import state as state_module
from voxelfield.training.checkpoints import fingerprint
from voxelfield.training.session import Session

FIXTURE = Path(__file__).resolve().parent / "fixtures" / "lego"

# Without thresholds that a rounding error decides. Adam divides gradients by their own size: a small epsilon would let
# a gradient that is nothing but rounding errors move a feature as far as any other. Muon has no such limit: it
# magnifies the rounding errors of directions with little gradient, so only one kind uses it, with a tolerance of its
# own.
BASE = (
    "trainer=smoke",
    "trainer.visible_samples=2048",
    "trainer.preview_every=0",
    "trainer.checkpoint_every=0",
    "trainer.stages=[{step: 0, resolution: 12}, {step: 8, resolution: 16}]",
    "trainer.occupancy.resolution=12",
    "trainer.occupancy.start=4",
    "trainer.occupancy.every=3",
    "trainer.occupancy.threshold=1e-4",
    "trainer.background=random",
    "trainer.render.voxels_per_step=0.5",
    "trainer.render.min_weight=0",
    "trainer.render.min_transmittance=0",
    "optimizer.eps=1e-4",
    "optimizer.matrices=adamw",
)
PYRAMID = ("model=pyramid", "model.resolutions=[4,8,16]", "model.width=16")

KINDS = {
    "dense": (
        "model=dense",
        "trainer.steps=100",
        "trainer.loss.tv_features=1e-4",
        "trainer.loss.tv_every=1",
        "trainer.loss.tv_until=80",
    ),
    "sum": (
        "model=sh",
        "model.resolutions=[4,8,16]",
        "model.view_resolution=8",
        "trainer.average_steps=4",
        "trainer.steps=40",
        "trainer.loss.depth=0.1",
        "trainer.loss.robust=0.3",
        "trainer.loss.robust_from=0",
        "trainer.loss.robust_every=4",
        "trainer.loss.robust_cells=17",
        "trainer.loss.sharpness=1",
        "trainer.vignetting=true",
    ),
    # Networks of rectified units, which rounding errors switch after some more steps.
    "pyramid": (
        *PYRAMID,
        "trainer.patches=6",
        "trainer.patch_size=11",
        "trainer.supersampling=2",
        "trainer.exposure=affine",
        "trainer.steps=16",
    ),
    "sparse": (
        "model=pyramid",
        "model.resolutions=[4,8,12]",
        "model.sparse_resolutions=[16]",
        "model.width=16",
        "trainer.not_finite=skip",  # of one step
        "trainer.steps=16",
    ),
    "orthogonal": (*PYRAMID, "optimizer.matrices=muon", "trainer.steps=16"),
    # Of opaque matter, in which no weight is near the threshold.
    "hidden": (
        *PYRAMID,
        "model.density.initial=1000",
        "trainer.render.min_weight=1e-4",
        "trainer.stages=[{step: 0, resolution: 16}]",
        "trainer.occupancy.hidden_at=0.3",
        "trainer.steps=12",
    ),
    "refined": (*PYRAMID, "camera=refine", "trainer.steps=16"),
    "deferred": (*PYRAMID, "model.shading=deferred", "trainer.loss.sample_rgb=0.05", "trainer.steps=16"),
    "environment": (*PYRAMID, "model.environment=map", "trainer.exposure=affine", "trainer.steps=16"),
    # With float16 copies, as on GPUs: a rounding error of a master may round its copy the other way.
    "halves": (
        "model=pyramid",
        "model.resolutions=[4,8,14]",  # the last one not in the first stage
        "model.sparse_resolutions=[16]",
        "model.width=16",
        "trainer.steps=12",
        "trainer.average_steps=2",
        "trainer.loss.tv_features=1e-4",
        "trainer.loss.tv_every=1",
        "trainer.loss.tv_until=12",
    ),
}
# The same, but several processes write into each other's memory, or all grids are whole between stages.
OTHERWISE = ("direct", "gathered")
KINDS |= dict.fromkeys(OTHERWISE, KINDS["halves"])
OF_THREE = ("sum", "sparse", "halves", *OTHERWISE)
"""The kinds that three processes train, which share two cores where tests run."""
# Room for all rays, so that any number of devices keeps the same ones; and enough steps to replay a captured graph.
ON_GPUS = {
    kind: (*KINDS[kind], "trainer.visible_samples=262144", "trainer.loss_scale=4096", "trainer.steps=24")
    for kind in ("pyramid", "sparse", "environment")
}
PAUSED = "sum"
STOPS = (10, 30)
"""Steps at which the run of :data:`PAUSED` is saved, one before and one within the averaging of its weights."""


GATHER = optimizer.Optimizers.gather


def gather_all(optimizers: optimizer.Optimizers, grids: object = None) -> None:
    GATHER(optimizers)


class MappedFiles:
    """Memory that all processes write to, as :class:`voxelfield.distributed.exchange.PeerMemory`, but on a CPU."""

    folder = Path()
    made = 0

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        names = [self.folder / f"peer_{self.made}_{process}" for process in range(dist.get_world_size())]
        MappedFiles.made += 1
        self.tensors = [torch.from_file(str(name), shared=True, size=size, dtype=dtype) for name in names]

    def run_beside(self, send):
        return send  # as late as possible

    def barrier(self) -> None:
        dist.barrier()


CAPTURES = ("object", "place")
PLACES: tuple[Images, ...] = ("local", "device")
REFUSED = "refused"
"""A capture of which the last process reads a photograph without the alpha channel that the others have."""
WHOLE = "dense"
"""The kind of which each process holds all images."""


def make_captures(folder: Path) -> None:
    """Writes an object, cut out, of several sizes; a place, with masks and depths; and the object, partly cut out."""
    split = load_blender(FIXTURE, LoadOptions(splits=("train",), downscale=2)).train[:7]
    for kind in (*CAPTURES, REFUSED):
        frames = []
        for index, image in enumerate(split.images.numpy().copy()):
            fx, fy, cx, cy = split.cameras.intrinsics[index].tolist()
            height = 50
            frame = {"file_path": f"images/{index}.png", "time": index / 7}
            frame |= {"fl_x": fx, "fl_y": fy, "cx": cx, "cy": cy, "transform_matrix": split.cameras.c2w[index].tolist()}
            if kind == "object":
                height = 50 - 3 * (index % 3)
            elif kind == REFUSED:
                image = image if index < 6 else image[..., :3]
            else:
                frame["k1"] = -0.1 * index
                image[..., 3] = 255
                image[10:15, 5:30, 3] = 0 if index == 6 else 255
                if index in (0, 5):
                    save(folder / kind / "depth" / f"{index}.png", np.arange(2500, dtype=np.uint16).reshape(50, 50))
                    frame["depth_file_path"] = f"depth/{index}.png"
                if index in (1, 2):
                    mask = np.full((50, 50), 255, dtype=np.uint8)
                    mask[index : 20 * index, 3:40] = 0
                    save(folder / kind / "masks" / f"{index}.png", mask)
                    frame["mask_path"] = f"masks/{index}.png"
            save(folder / kind / frame["file_path"], image[:height])
            frames.append(frame | {"w": 50, "h": height})
        (folder / kind / "transforms.json").write_text(json.dumps({"frames": frames}))


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def draw(capture: Path, images: Images) -> dict[str, torch.Tensor]:
    """What is drawn of a capture, by pixel, and what its images show together."""
    scene = voxelfield.load_scene(capture, holdout=0, divided=True, depth=capture.name == "place")
    assert len(scene.train.images) == len(scene.train.local_indices) <= -(-7 // group.count())
    sampler = PixelSampler(scene.train, torch.device("cpu"), 2, patches=6, patch_size=9, images=images)
    sampler.carry("structure", structure_weights(sampler.images, sampler.sizes))
    if "depth" in scene.train.extras:
        sampler.favour(scene.train.extras["depth"] > 0, 0.2)
    torch.manual_seed(0)
    batch = sampler.batch(1500, scene.aabb, "white", shared=True)
    rays = {name: getattr(batch.rays, name).view(len(batch.pixels), -1) for name in ("origins", "directions", "far")}
    names = ("time", "structure", "depth") if capture.name == "place" else ("time", "structure")
    found = {"pixels": batch.pixels, "rgba": batch.rgba, **rays, **{name: batch[name] for name in names}}
    # Through given cameras, as where they are refined, and by the same pixels in all processes.
    further = sampler.batch(1000, scene.aabb, "white", sampler.cameras)
    gathered = [dict(zip(found, values, strict=True)) for values in group.gather_objects(list(found.values()))]
    found = {name: torch.cat([values[name] for values in gathered]) for name in found}
    order = found["pixels"].argsort(stable=True)
    found = {name: values[order] for name, values in found.items()}
    if capture.name == "object":
        found["hull"] = sampler.visual_hull(scene.aabb, (24, 24, 24))
    else:
        small = shrunk(scene.train, 5)
        found |= {"small images": small.images, "small masks": small.masks}
    return found | {
        "aabb": scene.aabb,
        "fingerprint": torch.tensor(scene.train.all_gather(fingerprint(scene.train)["images"].tolist())),
        "further pixels": further.pixels,
        "further rgba": further.rgba,
        "further directions": further.rays.directions,
    }


def refusals(capture: Path) -> list[str]:
    """The messages with which the processes refuse a capture."""
    with pytest.raises(ValueError, match=r"must have an alpha channel") as refusal:
        voxelfield.load_scene(capture, holdout=0, divided=True)
    return group.gather_objects(str(refusal.value))


def kinds_of(processes: int) -> tuple[str, ...]:
    """The kinds that so many processes train."""
    if processes == 1:
        return tuple(kind for kind in KINDS if kind not in OTHERWISE)
    return tuple(KINDS) if processes == 2 else OF_THREE


class Scalars(NullLogger):
    """Keeps scalars by step."""

    def __init__(self) -> None:
        self.records: dict[int, dict[str, float]] = {}

    def scalars(self, step, values) -> None:
        self.records.setdefault(step, {}).update(values)


def begin(kind: str, output: Path | None = None, device: str = "cpu") -> tuple[Session, Scalars]:
    scene, log = load_blender(FIXTURE, LoadOptions(downscale=2, divided=kind != WHOLE)), Scalars()
    if kind == "sum":
        scene.splits["train"] = with_points(scene.train)
    if kind == "environment":
        for split in scene.splits.values():
            split.images[..., 3] = 255
    halves = kind in ("halves", "direct", "gathered") or device == "cuda"
    if device == "cpu":
        exchange.PeerMemory = MappedFiles
        division.shares_memory = lambda _: kind == "direct"

    def watch(session: Session) -> None:
        if halves:
            check_copies(session)
        if session.step % 4 == 0:  # the last one among them
            session.result()  # grids are whole for a moment, which must change nothing
        if kind == "sparse":
            poison(session, at=session.step == 10)
        if kind == "hidden" and session.step > 4:
            assert 0.1 < session.occupancy.allowed.float().mean() < 0.8

    settings = preset(*BASE, *(KINDS if device == "cpu" else ON_GPUS)[kind], "trainer.log_every=4", device=device)
    optimizer.Optimizers.gather = gather_all if kind == "gathered" else GATHER
    state_module.copies_dtype = lambda *_: torch.float16 if halves else torch.float32
    return Session(scene, settings, output=output, logger=log, on_step=watch), log


def with_points(split: Split) -> Split:
    """Gives some pixels of a split a depth and how reliable it is; the last image has none."""
    numbers = torch.arange(split.images[..., 0].numel()).view(split.images.shape[:3])
    numbers += split.local_indices.start * numbers[0].numel()
    known = (numbers % 17 == 0) & (numbers < (len(split) - 1) * numbers[0].numel())
    depth = torch.where(known, 3 + 2 * torch.frac(numbers * 0.618), 0.0)
    return replace(split, extras={"depth": depth, "depth_weight": torch.frac(numbers * 0.382).half()})


def poison(session: Session, at: bool) -> None:
    """Makes the loss of the next step not finite, or finite again."""
    pixels = session._state.training_step._pixels
    vars(pixels).pop("_read", None)
    if at:
        read = pixels._read

        def read_nothing(*arguments: Any) -> Any:
            rays, rgba = read(*arguments)
            return rays, torch.full_like(rgba, torch.nan)

        pixels._read = read_nothing


def check_copies(session: Session) -> None:
    """All processes must have the rounded masters of all."""
    division = session.optimizers.division
    if division is None or session.step % 4 > 0:
        return
    grid = session.field.grid
    assert not grid.working_copies._sources, "whole masters are still in memory"
    for level, copy in zip(grid.levels, grid.working_copies.copies, strict=False):
        master = put_back_zeros(division.collected(level, division.local_shard(level).detach()))
        copies = [torch.empty_like(copy) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, copy.contiguous())
        if master is not None:
            assert all(torch.equal(copied.cpu(), master.half()) for copied in copies)


def weights_of(session: Session) -> dict[str, torch.Tensor]:
    own = {name: value.detach().clone() for name, value in session.field.named_parameters()}
    for part in session.components:
        own |= {f"{part.name}.{index}": value.detach().clone() for index, value in enumerate(part.parameters())}
        if isinstance(part, RobustWeights):
            assert 0 < part.moves.sum() < part.moves.numel()
            own |= {"moves": part.moves.float(), "weights": session._state.training_step.batch.weights.unique()}
    return own


def checkpoint(folder: Path, processes: int, stop: int) -> Path:
    """The checkpoint that some processes saved at a stop."""
    return next((folder / f"by_{processes}_at_{stop}").glob("checkpoint_*.pt"))


def train_all(kinds: Iterable[str], device: str = "cpu") -> dict[str, Any]:
    results = {}
    for kind in kinds:
        session, log = begin(kind, device=device)
        session.fit()
        log.records["evaluation"] = session.evaluate("train", views=5, progress=False).means()
        results[kind] = weights_of(session), session.occupancy.occupied, log.records
    return results


def train_with_pauses(processes: int, folder: Path) -> dict[str, Any]:
    results = {}
    for stop in STOPS:
        session, _ = begin(PAUSED, folder / f"by_{processes}_at_{stop}")
        while session.step < stop:
            session.train_step()
        session.save()
    # From the checkpoints of as many processes, and of one.
    for saved_by in {1, processes}:
        for stop in STOPS:
            session, _ = begin(PAUSED)
            session.restore(load_checkpoint(checkpoint(folder, saved_by, stop)))
            session.fit()
            results[f"resumed from {saved_by} at {stop}"] = weights_of(session), session.occupancy.occupied, {}
    return results


def main(rank: int, processes: int, store: str, folder: Path, device: str = "cpu") -> None:
    torch.set_num_threads(1)
    MappedFiles.folder = folder / f"peers_{processes}"
    MappedFiles.folder.mkdir(exist_ok=True)
    # Most levels here are too small for lists of active tiles otherwise.
    optimizer._WORTH_LISTING = 200
    if device == "cuda":
        torch.cuda.set_device(rank)
    if processes > 1:
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=processes)
    if device == "cpu":
        drawn = itertools.product(CAPTURES, PLACES)
        results: dict[Any, Any] = {(capture, place): draw(folder / capture, place) for capture, place in drawn}
        results[REFUSED] = refusals(folder / REFUSED)
        results |= train_all(kinds_of(processes)) | train_with_pauses(processes, folder)
    else:
        results = train_all(ON_GPUS, device)
    if rank == 0:
        torch.save(results, folder / f"{processes}.pt")
    if processes > 1:
        dist.barrier()
        group = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        # Threads of a group that is still referenced may end the process with an error when Python exits.
        assert group() is None


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), *sys.argv[5:])
