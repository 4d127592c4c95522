"""``voxelfield train``, or ``python train.py``: fits a field to a scene, configured by Hydra from ``configs/``."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shlex
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, NoReturn, cast

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import CompactHydraException, HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from hydra.utils import get_original_cwd
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from voxelfield import launch_environment, processes
from voxelfield.cli import launching
from voxelfield.cli.command import INTERRUPTED, TerminalHandler, complain, exit_status, one_line_records, show
from voxelfield.cli.train_help import help_text
from voxelfield.config import parse
from voxelfield.datasets.loading import configured_scenes, is_path
from voxelfield.datasets.registry import FoundScene, scene_in, why_no_folder
from voxelfield.devices import choose_device
from voxelfield.foundation.extensions import raised_by
from voxelfield.installed import config_folder
from voxelfield.interrupt import Interrupt
from voxelfield.messages import LONGEST_MESSAGE, clipped, error_in_words, in_shell, one_line
from voxelfield.models.training import EmptyFieldError
from voxelfield.report.record import read_overrides
from voxelfield.run_directory import RunDirectoryLock
from voxelfield.runs.train import check_results, train_as_configured
from voxelfield.settings import RunConfig
from voxelfield.settings.presets import composition_error, config_name, offer_defaults, preset
from voxelfield.settings.resolve import AutoTrainer
from voxelfield.settings.schema import AUTO

logger = logging.getLogger("train")

# Options of Hydra's command line that are followed by a value.
_WITH_VALUE = (
    *("--cfg", "-c", "--package", "-p", "--info", "-i"),
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
)


@dataclass
class _Run:
    """What is settled of the run of this process before Hydra writes into its directory."""

    found: FoundScene | None = None
    resumed: str = ""
    settings: RunConfig | None = None
    lock: RunDirectoryLock | None = None


def main(arguments: Sequence[str]) -> int:
    """Trains as Hydra's command line says, which is given without the program's name; returns the exit status."""
    try:
        status = _main(arguments)
    except SystemExit as ended:  # of Hydra too
        status = ended.code if isinstance(ended.code, int) else 1
    launching.leave(status)
    return status


def _main(arguments: Sequence[str]) -> int:
    # By default Hydra prints an error over many lines and exits; with this it raises the error instead.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    offer_defaults()
    if any(text.startswith("--e") for text in arguments):
        return complain("--experimental-rerun is not supported: continue a run with resume=RUN_DIRECTORY", 2)
    options: list[str] = []
    overrides: list[str] = []
    for before, text in pairwise(["", *arguments]):
        (options if text.startswith("-") or before in _WITH_VALUE else overrides).append(text)
    StartRun.run = run = _Run()
    try:
        run.resumed = shlex.join(recorded := resumed_overrides(overrides))
        overrides, run.found = with_scene_folder([*recorded, *overrides])
    except (ValueError, FileNotFoundError) as error:
        return complain(str(error), 2)
    devices = [value for key, _, value in (text.lstrip("+").partition("=") for text in overrides) if key == "device"]
    try:
        configuration = config_name(*devices[-1:])
    except ValueError:  # not one device, or it is not there, as the run itself says
        configuration = config_name()
    try:
        with one_line_records(), without_tracebacks(), Interrupt(last=True) as interrupt, interrupt.at_once():
            if {"-h", "--help"}.isdisjoint(options):
                _run_hydra(configuration, overrides, options)
            else:
                show(help_text(preset(*overrides, name=configuration)))
    except (CompactHydraException, ValueError) as error:
        return complain(composition_error(error), 2)
    except OSError as error:  # Hydra's, without the name of a file where the disk is full
        return complain(f"the run directory cannot be written to: {error}", 1)
    except KeyboardInterrupt:
        # Of several processes, each is told to end when one has failed, which is the one to report.
        return INTERRUPTED if launch_environment.started() > 1 else complain("stopped at once", INTERRUPTED)
    finally:
        if run.lock is not None:
            run.lock.release()
    return 0


def _run_hydra(configuration: str, overrides: Sequence[str], options: Sequence[str]) -> None:
    """Runs Hydra, which composes the settings, calls :class:`StartRun`, makes the run directory and calls ``train``."""
    if not options and not any(text.startswith("hydra.mode") for text in overrides):
        # hydra.main would compose the settings once more, only to see whether they are those of a sweep.
        with hydra.initialize_config_dir(str(config_folder()), job_name="train", version_base="1.3"):
            started = GlobalHydra.instance().hydra
            assert started is not None
            started.run(configuration, train, list(overrides))
        return
    before, program = sys.argv, sys.argv[0] if Path(sys.argv[0]).name == "train.py" else "voxelfield train"
    sys.argv = [program, *overrides, *options]
    try:
        hydra.main(str(config_folder()), configuration, version_base="1.3")(train)()
    finally:
        sys.argv = before


class StartRun(Callback):
    """Starts the processes of a run and locks ``hydra.run.dir``, before Hydra writes there, until the program ends.

    Ends the program in one line if the directory is in use, contains files of something else, or is read-only. The runs
    of a sweep have one process each, and lock their directories themselves, once Hydra has made them.
    """

    run: ClassVar[_Run] = _Run()

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Starts the other processes, or joins them, and locks the directory."""
        try:
            settings = parse(RunConfig, OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"]))
            count = launching.count_processes(settings)
            if count > 1 and launch_environment.started() > 1:
                launching.join(settings)
            if count > processes.count():
                sys.exit(launching.launch(count, choose_device(settings.device).type))
            self.run.settings = settings
            if processes.is_first():
                self.run.lock = _locked(config, settings)
            with launching.failing_together():
                (directory, *_) = processes.gather_objects(str(Path(config.hydra.run.dir).resolve()))
        except Exception as error:  # of which Hydra would only warn, and then train in this process alone
            status = exit_status(error)
            sys.exit(complain(str(error) if status else error_in_words(error), status or 1))
        if not processes.is_first():
            _follow(config, directory)


def _locked(config: DictConfig, settings: RunConfig) -> RunDirectoryLock:
    directory = Path(config.hydra.run.dir)
    try:
        if directory.resolve() == Path(settings.data.root, settings.scene.name).resolve():
            raise ValueError(f"hydra.run.dir must not be the folder of the scene, got {directory}")
        check_results(directory)
        return RunDirectoryLock(directory)
    except OSError as error:
        folder, reason = clipped(config.hydra.run.dir), error.strerror or error
        raise ValueError(f"hydra.run.dir must be a folder that can be written to, got {folder}: {reason}") from error


def _follow(config: DictConfig, directory: str) -> None:
    """Makes Hydra write nothing in this process, which uses the run directory of the first one and reports errors."""
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.run.dir = directory
        config.hydra.output_subdir = None
        config.hydra.job_logging = {
            "version": 1,
            "formatters": {"ranked": {"format": f"{launching.describe()}: %(message)s"}},
            "handlers": {"console": {"class": "voxelfield.cli.command.TerminalHandler", "formatter": "ranked"}},
            # The first process logs the warnings.
            "root": {"level": "ERROR", "handlers": ["console"]},
            "disable_existing_loggers": False,
        }


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


def resumed_overrides(overrides: Sequence[str]) -> list[str]:
    """Returns the overrides of the run from which others resume, without those that are given another value now.

    They do not include losses, which have to be given again. Empty if the run has no record of them, as one of a
    :class:`voxelfield.Session`; raises ValueError if it is damaged.
    """
    given = {"scene" if _is_alone(text) else _key(text): text.partition("=")[2] for text in overrides}
    if given.get("resume", AUTO) in ("", AUTO):
        return []
    try:
        source = OverridesParser.create().parse_override(f"resume={given['resume']}").value()
    except HydraException:  # which composing will report
        return []
    if source is None:
        return []
    folder = Path(str(source))
    replaced = [f"{key}." for key in (*given, *(["data.root"] if "scene" in given else []))]
    # Hydra's own settings, which no run records, and losses name code to be called. A folder may be a stranger's.
    left_out = ("hydra", "losses.", *replaced)
    recorded = read_overrides(folder if folder.is_dir() else folder.parent) or ()
    return [text for text in recorded if not f"{_key(text)}.".startswith(left_out)]


def _key(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def with_scene_folder(overrides: Sequence[str]) -> tuple[list[str], FoundScene | None]:
    """Returns overrides for Hydra, which knows no folders and no scene without its key, and the scene of a folder.

    A scene may be given by itself, as in ``voxelfield train FOLDER``. ``scene=FOLDER`` becomes ``scene=folder`` with
    its name and root, unless it is the name of a file in ``configs/scene``.

    Raises ValueError if a scene is a path that is not a folder, or given twice, and FileNotFoundError if the folder
    contains no scene.
    """
    scenes = [text for text in overrides if text.startswith("scene=") or _is_alone(text)]
    alone = [text for text in scenes if _is_alone(text)]
    if alone and len(scenes) > 1:
        raise ValueError(f"scene must be given once, got {' and '.join(map(clipped, scenes))}")
    if alone and launch_environment.started() == 1:
        print(one_line(f"{clipped(alone[0])} is read as scene={clipped(alone[0])}"), file=sys.stderr)  # noqa: T201
    replaced, found = [], None
    for text in overrides:
        scene = text.removeprefix("scene=")
        if text not in scenes:
            replaced.append(text)
        elif (given := scene_folder(scene)) is None:
            replaced.append(f"scene={scene}")
        else:
            found = given
            texts = (found.folder.name, str(found.folder.parent))
            name, root = (QuotedString(text, Quote.single).with_quotes() for text in texts)
            replaced += ["scene=folder", f"scene.name={name}", f"data.root={root}"]
    return replaced, found


def _is_alone(argument: str) -> bool:
    """Returns whether an argument can only be a scene, because it is not an override."""
    key, equals, _ = argument.partition("=")
    # Hydra's keys may have slashes, and a folder's name an equals sign.
    is_override = equals != "" and not ("/" in key and Path(argument).is_dir())
    return not is_override and argument != "" and not argument.startswith(("+", "~"))


def scene_folder(scene: str) -> FoundScene | None:
    """Returns the scene that ``scene=FOLDER`` means, or None for a name, which Hydra looks up in its configurations."""
    names = configured_scenes()
    if scene in ("", *names):
        return None
    expected = f"scene must be a folder, or one of {', '.join(names)}, got {clipped(scene)!r}"
    try:
        # Shells leave the tilde in scene=~/captures/mine.
        folder = Path(scene).expanduser()
        if not folder.is_dir():
            if is_path(scene):
                raise ValueError(f"{expected}, {why_no_folder(folder)}")
            return None
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{expected}: {getattr(error, 'strerror', None) or error}") from error
    whole = folder.resolve()
    if "${" in str(whole):
        raise ValueError(
            f"scene must be a folder without ${{ in its path, which stands for another setting in a configuration, got "
            f"{clipped(str(whole))!r}: rename it, or load it with voxelfield.load_scene"
        )
    return FoundScene(whole, scene_in(folder).formats)


def train(config: DictConfig) -> float | None:
    """Trains with a composed configuration; returns the test PSNR, which Hydra's sweepers can optimise.

    Of several processes, only the first one returns it.
    """
    job = HydraConfig.get()
    choices, sweeps = job.runtime.choices, job.mode == RunMode.MULTIRUN
    logger.info("scene=%s model=%s trainer=%s", choices["scene"], choices["model"], choices["trainer"])
    if StartRun.run.resumed:
        logger.info("the settings of the run that is resumed: %s", StartRun.run.resumed)
    on_cpu = job.job.config_name == "train_cpu"
    if on_cpu and (choices["model"], choices["trainer"]) == ("dense", "cpu"):
        logger.info("on a CPU, model=dense and trainer=cpu are the defaults (smaller images, one smaller grid)")
    settings = StartRun.run.settings  # None in a sweep
    try:
        with launching.failing_together():
            run = StartRun.run  # without settings and a lock in a sweep
            settings = settings or parse(RunConfig, config)
            if sweeps and settings.devices not in (None, "1"):
                raise ValueError(f"devices must be 1 in a sweep, got {settings.devices}")
            output, auto = Path(job.runtime.output_dir), None
            if choices["trainer"] == "auto" and not settings.ends_at_box:
                record = None if job.output_subdir is None else output / job.output_subdir
                given = cast("list[str]", OmegaConf.to_container(job.overrides.task))
                auto = AutoTrainer(config, given, choices["model"], record)
            with contextlib.ExitStack() as stack:
                if sweeps:
                    reserved = launching.reserve_device(settings.device, Path(job.sweep.dir))
                    settings = replace(settings, device=stack.enter_context(reserved))
                root = Path(get_original_cwd())
                if settings.losses:
                    sys.path.append(str(root))  # for functions in files there
                metrics = train_as_configured(settings, output, root, auto=auto, lock=run.lock, found=run.found)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        status = 1 if isinstance(error, EmptyFieldError) else exit_status(error)
        raiser = raised_by(error, settings.losses if settings else ()) if status is None else None
        if isinstance(error, SystemExit) and not (isinstance(error.code, int) and error.code != 0):
            raiser = raiser or "a package"
        if status is None and raiser is None and (processes.count() == 1 or not isinstance(error, Exception)):
            raise
        text = str(error) if status is not None else error_in_words(error)
        if raiser is not None:
            text = f"training was ended by {raiser}, which raised {text}"
            if StartRun.run.lock is not None:
                StartRun.run.lock.created = False  # the directory stays, for the log
        # The logs of the others name them anyway.
        named = processes.count() > 1 and processes.is_first() and status != 2
        fail(f"{launching.describe()}: {text}" if named else text, status or 1, None if raiser is None else error)
    if metrics is None:
        sys.exit(INTERRUPTED)
    if not processes.is_first():
        return None
    psnr: float = metrics["psnr"]
    if metrics.get("diverged", False):
        diverged = f"training diverged ({psnr:.2f} dB): lower trainer.rates.grid and trainer.rates.network"
        # A sweep over rates continues with the next ones.
        if not sweeps:
            fail(diverged, 1)
        logger.error(diverged)
    elif not sweeps:
        show(_summary(output, metrics))
    return psnr


def _summary(directory: Path, metrics: Mapping[str, Any]) -> str:
    """Returns a table of the results of a run, and commands to be pasted."""
    psnr, ssim, seconds = (metrics.get(key, math.nan) for key in ("psnr", "ssim", "train_seconds"))
    run = in_shell(directory)
    return f"""
    PSNR   SSIM  seconds  folder
{psnr:5.2f} dB  {ssim:.3f}  {seconds:7.1f}  {run}

voxelfield view {run}
voxelfield export {run} --mesh mesh.glb
voxelfield report {run}"""


def fail(error: str, status: int, cause: BaseException | None = None) -> NoReturn:
    """Ends the run with its error on stderr, where Hydra does not write, and in its log, with a cause's traceback."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, TerminalHandler):
            handler.setStream(sys.stderr)
            handler.addFilter(lambda record: record.exc_info is None)
    logger.error("%s", clipped(error, LONGEST_MESSAGE))
    if cause is not None:
        logger.error("the traceback of this error:", exc_info=cause)
    sys.exit(status)
