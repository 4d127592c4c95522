"""``voxelfield VERB ...``: imports the verb's module and runs it; ``python -m voxelfield`` is the same.

User errors are reported in one line. Importing this module does not import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NoReturn

import voxelfield
from voxelfield.installed import MissingPackageError, without_garbage_collection
from voxelfield.messages import LONGEST_MESSAGE, clipped, one_line

logger = logging.getLogger(__name__)

# Only the records of these loggers are escaped: other packages may log several lines.
_LOGGERS = ("voxelfield", "train")

# The module of each verb in this package, and its purpose.
VERBS = {
    "train": (
        "train",
        "fit a field to a scene: a folder or a name, and overrides as of train.py, such as trainer=fast",
    ),
    "runs": ("scenes", "list the runs: scene, PSNR, seconds of training, size on disk and date"),
    "eval": ("trained", "compare a trained field with views of its scene"),
    "render": ("render", "render a trained field along a path, as a video or as images"),
    "view": ("trained", "explore a trained field in a browser"),
    "report": ("trained", "rewrite the report of a finished run"),
    "export": ("trained", "write a trained field as a mesh, points or a volume, or its scene's cameras"),
    "push": ("trained", "upload a finished run to the Hugging Face Hub, from which others load it as hf://REPO"),
    "download": ("scenes", "fetch a public scene"),
    "process": ("scenes", "find the poses of photographs or of a video's frames"),
    "inspect": ("scenes", "draw a scene's cameras, box and images, and warn of common problems"),
    "doctor": ("machine", "check this machine: versions, compilers, GPUs, compiled kernels and optional packages"),
    "build": ("machine", "compile the extension now instead of on first use"),
    "bench": ("machine", "time the sampling op against torch's grid_sample, as README does"),
}

_NAMED_ALIKE = (
    "numpy",
    "tensorboard",
    "jinja2",
    "matplotlib",
    "safetensors",
    "imageio",
    "av",
    "pooch",
    "tqdm",
    "plyfile",
)
TRAINING_PACKAGES = {name: name for name in _NAMED_ALIKE} | {
    "hydra": "hydra-core",
    "omegaconf": "hydra-core",
    "yaml": "pyyaml",
    "PIL": "pillow",
}
"""Packages that ``pip install "voxelfield[train]"`` installs: import names -> distributions."""

INTERRUPTED = 130
"""Exit status of a program that a signal has stopped."""

# Stands on a terminal while a verb imports its packages, which may take seconds.
_IMPORTING = "importing packages ..."

LAUNCHER = "VOXELFIELD_LAUNCHER"
"""Variable of the number of the process that has started this one as one of several."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line without the program's name, None for that of this process; returns the exit status.

    Ctrl-C and a package that is not installed are reported in one line.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        _print_usage()
        return 0 if given else 2
    if given == ["--version"]:
        print(f"voxelfield {voxelfield.__version__}")  # noqa: T201
        return 0
    verb, *rest = given
    if verb not in VERBS:
        return complain(f"verb must be one of {', '.join(VERBS)}, got {verb!r}", 2)
    if verb == "train":
        # Torch's C++ code would report in many lines what becomes an error of one line.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        _end_with_launcher()
    try:
        module = _imported(f"voxelfield.cli.{VERBS[verb][0]}")
        if verb == "train":
            # It handles signals itself: it stops after a step and saves a checkpoint.
            return module.main(rest)
        return _run(verb, module, rest)
    except ModuleNotFoundError as error:
        package = TRAINING_PACKAGES.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        return complain(f'{package} must be installed for `voxelfield {verb}`: pip install "voxelfield[train]"', 2)
    except KeyboardInterrupt:
        return complain("stopped", INTERRUPTED)


def complain(message: str, status: int) -> int:
    """Prints a message in one line to the standard error stream, and returns the exit status."""
    print(one_line(clipped(message, LONGEST_MESSAGE)), file=sys.stderr)  # noqa: T201
    return status


def show(text: str) -> None:
    """Prints a text, of which a reader such as ``head`` may read a part only."""
    try:
        print(text, flush=True)  # noqa: T201
    except OSError:  # for the rest of the text, which Python prints at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _imported(name: str) -> ModuleType:
    """Imports a module without garbage collection; Ctrl-C ends the process immediately.

    Modules catch exceptions of their imports, and compiled ones turn them into others, so KeyboardInterrupt would not
    end the program.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda *_: _end()) if in_main_thread else None
    if drawn := sys.stderr.isatty():
        print(_IMPORTING, end="\r", file=sys.stderr, flush=True)  # noqa: T201
    with without_garbage_collection():
        try:
            return importlib.import_module(name)
        finally:
            if drawn:
                print(" " * len(_IMPORTING), end="\r", file=sys.stderr, flush=True)  # noqa: T201
            gc.freeze()
            if in_main_thread:
                signal.signal(signal.SIGINT, handler)


def _end_with_launcher() -> None:
    """Makes a process that ``devices=N`` or torchrun has started end when its launcher ends, even by SIGKILL."""
    launcher = os.environ.pop(LAUNCHER, str(os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else None)
    # 1 is Linux's PR_SET_PDEATHSIG. The launcher may have ended before.
    bound = sys.platform == "linux" and launcher and ctypes.CDLL(None).prctl(1, signal.SIGKILL) == 0
    if launcher and not (bound and os.getppid() == int(launcher)):
        threading.Thread(target=_end_with_store, daemon=True).start()


def _end_with_store() -> None:
    # The launcher serves the store, which is silent until it is asked.
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with contextlib.suppress(OSError), socket.create_connection(address) as connection:
        connection.recv(1)
    os._exit(1)


def _end() -> NoReturn:
    print("stopped".ljust(sys.stderr.isatty() and len(_IMPORTING)), file=sys.stderr, flush=True)  # noqa: T201
    os._exit(INTERRUPTED)


class _Parser(argparse.ArgumentParser):
    """A parser that raises ValueError for a wrong command line instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument ").replace(": must ", " must ", 1))


def _run(verb: str, module: ModuleType, arguments: Sequence[str]) -> int:
    """Runs a verb on its part of the command line and returns the exit status.

    Its module has ``add_VERB_arguments(parser)`` and ``run_VERB(options)``, which may return an exit status, and whose
    docstring is the description.
    """
    from voxelfield import launch_environment

    alone = verb != "build"
    only = "This command is run by one process; several of torchrun or srun are refused." if alone else None
    run, add_arguments = getattr(module, f"run_{verb}"), getattr(module, f"add_{verb}_arguments")
    parser = _Parser(prog=f"voxelfield {verb}", description=run.__doc__, epilog=only)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[TerminalHandler()])
    with one_line_records():
        add_arguments(parser)
        try:
            options = parser.parse_args(arguments)
            if alone and (count := launch_environment.started()) > 1:
                raise ValueError(f"{verb} must be run by one process, got {count} that torchrun or srun has started")
            return run(options) or 0
        except Exception as error:
            status = exit_status(error)
            if status is None:
                raise
            text = " ".join(str(error).split()) or type(error).__name__
            logger.error("%s", clipped(text, LONGEST_MESSAGE))
            return status


def exit_status(error: BaseException) -> int | None:
    """Returns the exit status for an error: 2 for wrong input, 1 for a failure, None for a fault of the program."""
    from voxelfield._library import KernelsUnavailableError
    from voxelfield.foundation.errors import is_out_of_memory

    of_paths = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
    if isinstance(error, (ValueError, MissingPackageError, *of_paths)):
        return 2
    failures = (OSError, FloatingPointError, KernelsUnavailableError)
    return 1 if isinstance(error, failures) or is_out_of_memory(error) else None


class _OneLineRecord(logging.LogRecord):
    """A log record with control characters escaped."""

    def getMessage(self) -> str:  # noqa: N802 - the name in logging
        message = super().getMessage()
        return one_line(message) if self.name.startswith(_LOGGERS) else message


class TerminalHandler(logging.StreamHandler):
    """Writes records above the bars of tqdm, which are cleared before and drawn again."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record."""
        tqdm = sys.modules.get("tqdm")  # without it, there is no bar
        with contextlib.nullcontext() if tqdm is None else tqdm.tqdm.external_write_mode(self.stream):
            super().emit(record)


class ShortFormatter(logging.Formatter):
    """Formats records as short lines: the time of day, the level of warnings and errors, and the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name in logging
        """Returns the line of a record."""
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{record.asctime} {level}{record.message}"


@contextlib.contextmanager
def one_line_records() -> Iterator[None]:
    """Escapes characters that are not printable in the log records of a block.

    A file name with a line break would otherwise forge records, which the report of a run repeats.
    """
    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(_OneLineRecord)
    try:
        yield
    finally:
        logging.setLogRecordFactory(before)


def _print_usage() -> None:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:{width}}  {purpose}" for verb, (_, purpose) in VERBS.items())
    more = "`voxelfield VERB --help` lists the options, and `voxelfield --version` prints the version."
    print(f"usage: voxelfield VERB ...\n\n{verbs}\n\n{more}")  # noqa: T201
