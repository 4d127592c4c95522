"""The checkpoints of a session: written in the background, compared with the session that restores them, restored."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from voxelfield import processes
from voxelfield.components.logger import flattened
from voxelfield.components.registry import keys_with, recorded, registered
from voxelfield.datasets.scene import Scene, Split
from voxelfield.installed import VERSION
from voxelfield.messages import clipped
from voxelfield.models.component import Component
from voxelfield.models.settings import reached_resolution
from voxelfield.run_directory import RunDirectoryLock, Writer
from voxelfield.settings import RunConfig
from voxelfield.settings.schema import parse_recorded
from voxelfield.trained.checkpoint_file import (
    ADDED,
    CheckpointError,
    check_state,
    check_whole,
    checkpoint_path,
    pack_checkpoint,
    write_checkpoint,
)
from voxelfield.training.state import ENTRIES, TrainingState

logger = logging.getLogger(__name__)

# Settings that a run may change when it is resumed, which is worth a warning.
_CHANGEABLE = ("optimizer.", "trainer.", "camera.", "losses", "seed")


class Checkpoints:
    """Writes the checkpoints of a session one after another in a thread, each replacing the previous ones.

    At most two checkpoints wait to be written, because each takes memory. Of processes that train together, the first
    writes, and all call the same methods. It is a ValueError if only some of them have a folder.

    Args:
        output: Folder for the files, created if needed and locked while they are written, or the lock of one; None
            writes none.
        split: The training data, of which checkpoints contain a fingerprint.
        keep: Keep all checkpoints.
        before: Called in the thread before each file is written.

    Attributes:
        directory: The folder, or None.
        newest: The last valid checkpoint on disk, or the one from which training was resumed; None if there is neither.
    """

    def __init__(
        self, output: Path | str | RunDirectoryLock | None, split: Split, keep: bool, before: Callable[[], None]
    ) -> None:
        if len(set(processes.gather_objects(output is None))) > 1:
            raise ValueError("output must be given in all processes of a group or in none, got one in some of them")
        self.newest: Path | None = None
        # A lock that is handed on ends with the caller; a lock taken here lasts as long as files are written.
        self._lock = output if isinstance(output, RunDirectoryLock) else None
        self._unlocks_after_waiting = False
        folder = output.directory if isinstance(output, RunDirectoryLock) else output
        self.directory = directory = None if folder is None else Path(folder)
        self._split, self._keep, self._before = split, keep, before
        self._writes = directory is not None and processes.is_first()
        self._writer = Writer()
        self._replaceable: list[Path] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: list[Future[None]] = []
        self._fingerprint: Future[dict[str, Tensor]] | None = None
        if self._writes or (directory is not None and split.local_slice is not None):
            # Computed in the background, so that the first checkpoint need not wait for it.
            self._fingerprint = self._thread.submit(fingerprint, split)

    @contextlib.contextmanager
    def locked_output(self, wait: bool) -> Iterator[None]:
        """Locks the output folder for a block that saves, and until :meth:`wait`, which ``wait`` calls at its end."""
        locks = self._writes and (self._lock is None or self._unlocks_after_waiting)
        if self._writes and self.directory is not None:
            self._writer.claim(self.directory)
            if locks:
                self._lock = self._lock or RunDirectoryLock(self.directory, "output")
                self._unlocks_after_waiting = False
        try:
            yield
            self._unlocks_after_waiting = locks and not wait
            if wait:
                self.wait()
        finally:
            if locks and not self._unlocks_after_waiting:
                self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._lock, self._unlocks_after_waiting = None, False

    def save(
        self, training: TrainingState, *, finite: bool | None = None, settled: bool = False, optional: bool = False
    ) -> Path | None:
        """Copies the state of a training and schedules its writing; raises an OSError of an earlier checkpoint.

        Args:
            training: What is saved.
            finite: Whether training can resume from the checkpoint; None looks at the field. If not, the file gets a
                name that ``resume=DIRECTORY`` ignores, and replaces no other checkpoint.
            settled: Whether the state does not change until :meth:`wait` returns, so that it can be copied in the
                thread.
            optional: Whether an OSError of writing is only logged, instead of being raised by the next call.

        Returns:
            The file, which exists once :meth:`wait` has returned; None if this process writes none.
        """
        if self.directory is None:
            return None
        finite = training.is_finite() if finite is None else finite
        data = {} if self._fingerprint is None else self._whole_fingerprint()
        state = training.entries()
        if not self._writes:
            return None
        self._writer.claim(self.directory)
        state["data"] = data
        path = checkpoint_path(self.directory, training.steps)
        if not settled:
            state = pack_checkpoint(state, path)
        while len(self._pending) > 1 or (self._pending and self._pending[0].done()):
            self._finish_first()
        if not finite:
            path = path.with_name(path.name.replace("checkpoint", "not_finite"))
        self._pending.append(self._thread.submit(self._write, path, state, not settled, finite, optional))
        return path

    @contextlib.contextmanager
    def saved_unless_finite(self, training: TrainingState) -> Iterator[None]:
        """Saves the state for inspection if a block raises FloatingPointError, whose message then names the file."""
        try:
            yield
        except FloatingPointError as error:
            hints = ""
            try:
                path = self.save(training, finite=False)
                self.wait()
                hints = "" if path is None else f"; the state is in {path}"
            except OSError as failure:
                hints = f"; {failure}"
            if self.newest is not None:
                hints += f", and the last valid checkpoint is {self.newest}"
            raise FloatingPointError(f"{error}{hints}") from None

    def wait(self) -> None:
        """Waits until all checkpoints are on disk; raises OSError if one could not be written."""
        try:
            while self._pending:
                self._finish_first()
        finally:
            if self._unlocks_after_waiting:
                self._unlock()

    def _finish_first(self) -> None:
        self._pending[0].exception()  # waits; the entry is removed afterwards, because that may be interrupted
        self._pending.pop(0).result()

    def _write(self, path: Path, state: dict[str, Any], packed: bool, finite: bool, optional: bool) -> None:
        lock = self._lock  # which another thread may release
        if lock is not None:
            lock.renew()
        self._before()
        try:
            write_checkpoint(path, state if packed else pack_checkpoint(state, path))
        except OSError as error:
            # The original error names the temporary file, or none.
            reason = f"{path} could not be written: {error.strerror or error}"
            if not optional:
                raise OSError(reason) from error
            last = "there is no checkpoint yet" if self.newest is None else f"the last checkpoint is {self.newest}"
            logger.error("%s; training continues, and %s", reason, last)
            return
        if not finite:
            return
        older = [] if self._keep else [file for file in self._replaceable if file != path]
        try:
            if older:
                check_whole(path)
            for file in older:
                file.unlink(missing_ok=True)
        except (CheckpointError, OSError) as error:
            logger.error("%s; earlier checkpoints are not removed", error)
            self._replaceable.append(path)
        else:
            self.newest, self._replaceable = path, [path]

    def restore(
        self, training: TrainingState, checkpoint: Mapping[str, Any], path: Path | None, replaced: Sequence[Path]
    ) -> None:
        """Loads a checkpoint that fits; arguments and errors are those of :meth:`voxelfield.Session.restore`."""
        check_complete(checkpoint)
        # The model of a script is not found by its name, and most saved settings of the model have no effect here.
        behind = checkpoint["config"]["model"]["environment"]
        config = {**checkpoint["config"], "model": replace(training.config.model, environment=behind)}
        saved = parse_recorded(config, "config of the checkpoint")
        _check_resumable(checkpoint, saved, training)
        if processes.is_first() or self._split.local_slice is not None:
            changed = changed_data(checkpoint["data"], self._whole_fingerprint(), self._split.names)
            if changed:
                logger.warning("scene %s: training continues with the present data", changed)
        if self._writes and path is not None:
            self.newest, self._replaceable = path, list(replaced)
        self._writer = Writer()
        training.load(checkpoint)

    def _whole_fingerprint(self) -> dict[str, Tensor]:
        """Returns the fingerprint of all training data; a collective call if processes divide the images."""
        own = fingerprint(self._split) if self._fingerprint is None else self._fingerprint.result()
        return own | {"images": torch.tensor(self._split.all_gather(own["images"].tolist()))}


def fingerprint(split: Split) -> dict[str, Tensor]:
    """Returns checksums (CRC-32), int64, of training data on the CPU.

    They are ``images``, of each local image with its mask, and ``cameras`` (N,), of each pose with its intrinsics.
    """

    def of_image(index: int) -> int:
        checksum, mask = _checksum(split.image(index)), split.mask(index)
        return checksum if mask is None else _checksum(mask, checksum)

    cameras = split.cameras
    lens = None if cameras.lens is None else cameras.lens.rows
    columns = (cameras.c2w.flatten(1), cameras.intrinsics, cameras.sizes, lens, cameras.rolling)
    # zlib releases Python's interpreter lock.
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        images = list(pool.map(of_image, split.local_indices))
    rows = torch.cat([column for column in columns if column is not None], dim=1)
    return {"images": torch.tensor(images), "cameras": torch.tensor([_checksum(camera) for camera in rows])}


def changed_data(saved: Mapping[str, Any], now: Mapping[str, Tensor], names: Sequence[str]) -> str:
    """Describes how the present data differ from a checkpoint's, in words that follow "scene"; "" if equal."""
    count = len(now["images"])
    if len(saved["images"]) != count:
        return f"has {count} training images, but the checkpoint was trained on {len(saved['images'])}"
    for part in ("images", "cameras"):
        differ = (saved[part].cpu() != now[part]).nonzero()[:, 0].tolist()
        if differ:
            first = f"{len(differ)} of {count}, the first is {names[differ[0]]}"
            return f"has different training {part} from the checkpoint ({first})"
    return ""


def _checksum(values: Tensor, before: int = 0) -> int:
    return zlib.crc32(values.contiguous().view(torch.uint8).numpy().data, before)


def check_complete(checkpoint: Mapping[str, Any]) -> None:
    """Raises TypeError if an entry of a checkpoint is missing, or the progress of training is not a valid number."""
    missing = [name for name in ENTRIES if name not in checkpoint]
    if missing:
        raise TypeError(f"checkpoint must be one that load_checkpoint returned, got one without {missing[0]!r}")
    step, seconds = checkpoint["step"], checkpoint["train_seconds"]
    if type(step) is not int or step < 0:
        raise TypeError(f"step must be a whole number, not negative, got {clipped(repr(step))}")
    if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
        raise TypeError(f"train_seconds must be a number, not negative, got {clipped(repr(seconds))}")


def _check_resumable(checkpoint: Mapping[str, Any], saved: RunConfig, training: TrainingState) -> None:
    """Rejects a checkpoint that does not fit a training, and logs a warning about settings that differ."""
    present, model = training.config, training.model
    _check_box(saved, present)
    saved_cells, cells = (list(x.shape) for x in (checkpoint["model"]["occupancy.occupied"], model.occupancy.occupied))
    if saved_cells != cells:
        raise ValueError(
            f"trainer.occupancy.resolution must be that of the checkpoint, {saved_cells[0]}, got {cells[0]}"
        )
    for kind in registered():
        kind.of(present).check_resumed(kind.of(saved), model)
    _check_components(checkpoint, training.components)
    steps = checkpoint["step"]
    reached, wanted = (reached_resolution(config.trainer.stages, steps) for config in (saved, present))
    if reached != wanted:
        raise ValueError(
            f"trainer.stages must have reached the resolution of the checkpoint at step {steps}, {reached}, got "
            f"{wanted}"
        )
    check_state(model, checkpoint["model"], model.grid.levels)
    model.check_state(checkpoint["model"])
    changed = changed_settings(asdict(saved), present)
    warned = [f"{key} is {now} instead of {old}" for key, (old, now) in changed.items() if key.startswith(_CHANGEABLE)]
    if warned:
        logger.warning("settings differ from those of the checkpoint: %s", clipped("; ".join(warned), 500))


def _check_box(saved: RunConfig, present: RunConfig) -> None:
    """Rejects another box or warp of the scene."""
    warp, own = saved.recorded_warp, present.recorded_warp
    if warp is not own and (warp is None or not warp.agrees_with(own)):
        remedy = ""
        if warp is not None and own is not None and warp.is_forward_facing != own.is_forward_facing:
            remedy = f": set warp.ndc={str(warp.is_forward_facing).lower()}"
        raise ValueError(
            f"scene.aabb and the settings of warp must be those of the checkpoint ({warp}), got {own}{remedy}"
        )
    if warp is None and saved.scene.aabb != present.scene.aabb:
        boxes = ([list(corner) for corner in config.scene.aabb or ()] for config in (saved, present))
        raise ValueError("scene.aabb must be that of the checkpoint, {}, got {}".format(*boxes))
    units = [config.scene.unit or 1.0 for config in (saved, present)]
    if units[0] != units[1] and (warp is None or present.camera.refines):
        raise ValueError("scene.unit must be that of the checkpoint: set scene.unit={:g}, got {:g}".format(*units))


def _check_components(checkpoint: Mapping[str, Any], components: Sequence[Component]) -> None:
    """Rejects a checkpoint with the state of other components than this session has."""
    own = {component.name: component for component in components if component.state_dict()}
    saved = [name for name in checkpoint if name not in {*ENTRIES, *ADDED}]
    for name in {**own, **dict.fromkeys(saved)}:
        if (name in saved) == (name in own):
            continue
        kinds = {kind.name: kind for kind in registered()}
        if name not in kinds:
            before, now = (", ".join(each for each in names if each not in kinds) for names in (saved, own))
            raise ValueError(f"components must be those of the checkpoint, {before or 'none'}, got {now or 'none'}")
        if not kinds[name].switches():
            raise TypeError(f"checkpoint must be one that load_checkpoint returned, got one without {name!r}")
        (key, wanted), (_, got) = kinds[name].in_words(name in saved), kinds[name].in_words(name in own)
        raise ValueError(f"{key} must be {wanted}, as in the checkpoint, got {got}")
    for name, component in own.items():
        component.check_state(checkpoint[name])


# Settings on which no result depends. Numbers of steps are compared separately, because a run may be extended.
_WITHOUT_EFFECT = (
    *("resume", "device", "devices", "process_timeout", "logger", "data.download"),
    *("trainer.steps", "trainer.images", "trainer.chunk"),
    *("trainer.log_every", "trainer.preview_every", "trainer.preview_views"),
    *("trainer.checkpoint_every", "trainer.keep_checkpoints", "trainer.checkpoint_errors"),
)

# Settings of the evaluation and of the files written after training.
_AFTER_TRAINING = ("trainer.evaluation", "trainer.evaluation_background", "trainer.model_file")


def recorded_settings(settings: RunConfig) -> dict[str, Any]:
    """Returns a run's settings as JSON values, with lists in place of tuples, for ``metrics.json``."""
    return json.loads(json.dumps(recorded(settings)))


def agreement(settings: RunConfig, scene: Scene | None = None) -> dict[str, Any]:
    """Returns by key what processes that train together have in common: version, settings, checksums of the scene."""
    values = {"version": f"{VERSION} with torch {torch.__version__}"} | flattened(recorded_settings(settings))
    for name, split in ({} if scene is None else scene.splits).items():
        checksums = fingerprint(split)
        # Of images that are divided, each process has others.
        of_images = checksums["images"].tolist() if split.local_slice is None else None
        checksum = zlib.crc32(repr((split.names, checksums["cameras"].tolist(), of_images)).encode())
        values[f"scene.{name}"] = f"{len(split)} views with the checksum {checksum:08x}"
    own = ("device.", "devices.", "process_timeout.", "logger.")
    return {key: value for key, value in values.items() if not f"{key}.".startswith(own)}


def changed_settings(
    saved: Mapping[str, Any], settings: RunConfig, *, evaluation: bool = False
) -> dict[str, tuple[Any, Any]]:
    """Compares settings on which training depends, or also the evaluation, with the settings of an earlier run.

    Returns:
        The earlier and the present value by key, such as ``trainer.rates.grid``.

    Raises:
        TypeError: The saved settings are not plain values.
    """
    before, now = flattened(json.loads(json.dumps(saved))), flattened(recorded_settings(settings))
    ignored = _WITHOUT_EFFECT if evaluation else (*_WITHOUT_EFFECT, *_AFTER_TRAINING, *keys_with("after_training"))
    below = tuple(f"{key}." for key in ignored)
    changed = [key for key, value in now.items() if before.get(key) != value]
    return {key: (before.get(key), now[key]) for key in changed if not f"{key}.".startswith(below)}
