"""``voxelfield train``, or ``python train.py``: fits a field to a scene, configured by Hydra from ``configs/``."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, MissingConfigException
from hydra.types import RunMode
from hydra.utils import get_original_cwd
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from voxelfield._library import KernelsUnavailableError
from voxelfield.cli.log_lines import one_line_records
from voxelfield.cli.stopping import INTERRUPTED
from voxelfield.config.parsing import parse, unknown_key
from voxelfield.datasets.download import DownloadError
from voxelfield.datasets.locate import configured_scenes, find_scene, is_path
from voxelfield.datasets.registry import format_of, why_no_folder
from voxelfield.datasets.scene import Scene
from voxelfield.devices import DEVICES
from voxelfield.installed import MissingPackageError, config_folder
from voxelfield.messages import LONGEST_MESSAGE, clipped, one_line
from voxelfield.models.training import EmptyFieldError
from voxelfield.ops._errors import is_out_of_memory
from voxelfield.runs.configured import Watcher, train_as_configured
from voxelfield.training.config import LoggerConfig, RunConfig, config_name, trainer_for
from voxelfield.training.config.defaults import offer_defaults
from voxelfield.training.interrupt import Interrupt
from voxelfield.training.state.run_directory import release

logger = logging.getLogger("train")

# Why trainer=auto stands for a file in configs/trainer.
_REASONS = {
    "default": "a scene that ends at its box, and for models other than pyramid",
    "few_photographs": "this number of photographs",
    "forward_facing": "photographs that all face the same way",
    "many_photographs": "this number of photographs",
    "unbounded": "this number of photographs with settings that rule out sparse levels",
}

# Settings that rule out a preset with sparse levels.
_RESOLUTION_SETTINGS = (
    "trainer.finest_resolution",
    "trainer.sparse_resolutions",
    "trainer.stages",
    "model.resolutions",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains; returns the exit status.

    Args:
        arguments: Hydra's command line without the program's name; None takes that of this process.
    """
    # By default Hydra prints an error over many lines and exits; with this it raises the error instead.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    offer_defaults()
    parser = get_args_parser()
    if arguments is not None:
        parser.prog = "voxelfield train"
    given = parser.parse_args(arguments)
    if given.experimental_rerun is not None:
        parser.error("--experimental-rerun is not supported: continue a run with resume=RUN_DIRECTORY")
    try:
        configuration = config_name(_given_device(given.overrides))
    except ValueError:  # the device is not there, as the run itself says
        configuration = config_name()
    try:
        given.overrides = [part for text in with_scene_key(given.overrides) for part in with_folder(text)]
    except (ValueError, FileNotFoundError) as error:
        print(one_line(str(error)), file=sys.stderr)  # noqa: T201
        return 2
    try:
        with one_line_records(), without_tracebacks(), Interrupt(last=True) as interrupt, interrupt.at_once():
            hydra.version.setbase("1.3")
            # What hydra.main calls, which has no parameter for a command line other than that of the process.
            _run_hydra(given, parser, train, str(config_folder()), configuration)
    except CompactHydraException as error:
        print(one_line(composition_error(error)), file=sys.stderr)  # noqa: T201
        return 2
    except OSError as error:  # Hydra's, without the name of a file where the disk is full
        message = clipped(f"the run directory cannot be written to: {error}", LONGEST_MESSAGE)
        print(one_line(message), file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        print("stopped at once", file=sys.stderr)  # noqa: T201
        return INTERRUPTED
    finally:
        release()
    return 0


@contextlib.contextmanager
def without_tracebacks() -> Iterator[None]:
    """Suppresses the tracebacks of errors that do not stop a run: failed log records, and errors that end a thread."""
    hook, raising = threading.excepthook, logging.raiseExceptions
    threading.excepthook = lambda ended: logger.error("a background thread failed: %s", ended.exc_value)
    # On a full disk, or once the terminal is closed, each record of the log would be followed by a traceback.
    logging.raiseExceptions = False
    try:
        yield
    finally:
        threading.excepthook, logging.raiseExceptions = hook, raising


def with_scene_key(overrides: Sequence[str]) -> list[str]:
    """Returns overrides in which a scene given by itself, as in ``voxelfield train FOLDER``, is ``scene=FOLDER``.

    Args:
        overrides: Those of Hydra's command line.

    Raises:
        ValueError: There is another scene beside one that is given by itself.
    """
    alone = [text for text in overrides if _is_scene_alone(text)]
    if not alone:
        return list(overrides)
    scenes = [text for text in overrides if text in alone or text.startswith("scene=")]
    if len(scenes) > 1:
        raise ValueError(f"scene must be given once, got {' and '.join(map(clipped, scenes))}")
    print(f"{alone[0]!r} is read as scene={alone[0]}", file=sys.stderr)  # noqa: T201
    return [f"scene={text}" if text == alone[0] else text for text in overrides]


def _is_scene_alone(argument: str) -> bool:
    """Tells whether an argument can only be a scene, because it is not an override."""
    key, equals, _ = argument.partition("=")
    # Hydra's keys may have slashes, and a folder's name an equals sign.
    is_override = equals != "" and not ("/" in key and Path(argument).is_dir())
    return not is_override and argument != "" and not argument.startswith(("+", "~"))


def scene_folder(scene: str) -> Path | None:
    """Returns the folder that ``scene=SCENE`` means, or None for a name, which Hydra looks up in its configurations.

    Raises:
        ValueError: It is a path, but not that of a folder; the message says why.
        FileNotFoundError: The folder holds no scene.
    """
    names = configured_scenes()
    if scene in ("", *names):
        return None
    expected = f"scene must be a folder, or one of {', '.join(names)}, got {clipped(scene)!r}"
    try:
        # Shells leave the tilde in scene=~/captures/mine.
        folder = Path(scene).expanduser()
        is_folder = folder.is_dir()
        if not is_folder and is_path(scene):
            raise ValueError(f"{expected}, {why_no_folder(folder)}")
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{expected}: {getattr(error, 'strerror', None) or error}") from error
    if not is_folder:
        return None
    whole = str(folder.resolve())
    if "${" in whole:
        raise ValueError(
            f"scene must be a folder without ${{ in its path, which stands for another setting in a configuration, got "
            f"{clipped(whole)!r}: rename it, or load it with voxelfield.load_scene"
        )
    format_of(folder)
    return folder


def with_folder(override: str) -> list[str]:
    """Returns an override; for ``scene=FOLDER``, unless settings have that name, overrides that mean the folder.

    Args:
        override: As on Hydra's command line.

    Raises:
        ValueError: See :func:`scene_folder`.
        FileNotFoundError: See :func:`scene_folder`.
    """
    key, _, value = override.partition("=")
    folder = scene_folder(value) if key == "scene" else None
    if folder is None:
        return [override]
    whole = folder.resolve()
    return ["scene=folder", f"scene.name={_quoted(whole.name)}", f"data.root={_quoted(str(whole.parent))}"]


def _quoted(text: str) -> str:
    """Returns a text as Hydra's grammar quotes it, where a backslash counts only before a quote."""
    return "'" + re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text) + "'"


def _given_device(overrides: Sequence[str]) -> str:
    """Returns the one device that overrides name, on which a run's defaults depend; ``auto`` if they name none."""
    values = [value for key, _, value in (text.lstrip("+").partition("=") for text in overrides) if key == "device"]
    return values[-1] if values and re.fullmatch(DEVICES, values[-1]) else "auto"


def train(config: DictConfig) -> float | None:
    """Runs what Hydra composed; returns the test PSNR, which Hydra's sweepers can optimise."""
    choices = HydraConfig.get().runtime.choices
    logger.info("scene=%s model=%s trainer=%s", choices["scene"], choices["model"], choices["trainer"])
    on_cpu = HydraConfig.get().job.config_name == "train_cpu"
    if on_cpu and (choices["model"], choices["trainer"]) == ("dense", "cpu"):
        logger.info("on a CPU, model=dense and trainer=cpu are the defaults (smaller images, one smaller grid)")
    try:
        settings = parse(RunConfig, config)
        output, root = Path(HydraConfig.get().runtime.output_dir), Path(get_original_cwd())
        depends_on_scene = choices["trainer"] == "auto" and not settings.scene.ends_at_box
        for_scene = functools.partial(settings_for, settings) if depends_on_scene else None
        metrics = train_as_configured(settings, output, root, configured_viewer(settings.logger), for_scene)
    except (ValueError, FileNotFoundError, FileExistsError, DownloadError, MissingPackageError) as error:
        fail(error, 2)
    except (EmptyFieldError, FloatingPointError, KernelsUnavailableError, OSError) as error:
        fail(error, 1)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        fail(error, 1)
    if metrics is None:
        sys.exit(INTERRUPTED)
    psnr: float = metrics["psnr"]
    if metrics.get("diverged", False):
        diverged = f"training diverged ({psnr:.2f} dB): lower trainer.rates.grid and trainer.rates.network"
        # A sweep over rates continues with the next ones.
        if HydraConfig.get().mode == RunMode.RUN:
            fail(ValueError(diverged), 1)
        logger.error(diverged)
    return psnr


def settings_for(settings: RunConfig, scene: Scene) -> RunConfig:
    """Returns the settings of Hydra's present job with the trainer that ``trainer=auto`` stands for, and records it.

    Args:
        settings: The settings as composed before the scene was loaded.
        scene: The loaded scene.

    Raises:
        ValueError: A setting contradicts those of the trainer.
    """
    job = HydraConfig.get()
    given = OmegaConf.to_container(job.overrides.task)
    assert isinstance(given, list)
    keys = {text.lstrip("+").partition("=")[0] for text in given}
    sparse = not settings.camera.refines and keys.isdisjoint(_RESOLUTION_SETTINGS)
    trainer = trainer_for(scene, job.runtime.choices["model"], sparse=sparse)
    logger.info("trainer=%s is the default for %s", trainer, _REASONS[trainer])
    if trainer == "default":
        return settings
    overrides = [*given, f"trainer={trainer}"]
    composed = hydra.compose(job.job.config_name, overrides)
    if job.output_subdir is not None:
        record = Path(job.runtime.output_dir) / job.output_subdir
        OmegaConf.save(composed, record / "config.yaml")
        OmegaConf.save(OmegaConf.create(overrides), record / "overrides.yaml")
    return parse(RunConfig, composed)


def configured_viewer(settings: LoggerConfig) -> Watcher | None:
    """Returns what shows the training in a browser, if ``logger.viewer`` asks for it.

    Raises:
        ValueError: The port is taken.
        MissingPackageError: viser is not installed.
    """
    if not settings.viewer:
        return None
    from voxelfield.viewer.watch import TrainingViewer

    return TrainingViewer(settings)


def fail(error: Exception, status: int) -> NoReturn:
    """Ends the run with its error on stderr and in its log; Hydra's handler of the terminal writes to stdout."""
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)
    logger.error("%s", clipped(str(error), LONGEST_MESSAGE))
    sys.exit(status)


def composition_error(error: CompactHydraException) -> str:
    """Returns what Hydra could not compose, in one line; a key that there is not, with the nearest that there is."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.partition("/")
        folder = "a folder, or " if group == "scene" else ""
        found = _scene_of_that_name(name) if group == "scene" else ""
        return f"{group} must be {folder}one of {', '.join(error.options)}, got {clipped(name)!r}{found}"
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and cause.full_key and isinstance(cause.parent_node, DictConfig):
        return unknown_key(cause.full_key, [str(key) for key in cause.parent_node])
    return " ".join(str(error).split())


def _scene_of_that_name(name: str) -> str:
    """Names the folder in which a scene without settings is found by its name, for a message."""
    try:
        return f": scene={find_scene(name)} is a scene of that name"
    except OSError:
        return ""
