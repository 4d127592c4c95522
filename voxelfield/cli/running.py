"""Runs a verb: parses its command line, and reports user errors in one line."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NoReturn

from voxelfield import processes
from voxelfield._library import KernelsUnavailableError
from voxelfield.foundation.errors import is_out_of_memory
from voxelfield.installed import MissingPackageError
from voxelfield.messages import LONGEST_MESSAGE, clipped, one_line

logger = logging.getLogger(__name__)

# Only the records of these loggers are escaped: other packages may log several lines.
_LOGGERS = ("voxelfield", "train")


class _Parser(argparse.ArgumentParser):
    """A parser that raises ValueError for a wrong command line instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument ").replace(": must ", " must ", 1))


def run(verb: str, module: ModuleType, arguments: Sequence[str]) -> int:
    """Runs a verb and returns the exit status; logs a user error in one line.

    Args:
        verb: The verb.
        module: Its module, with ``add_arguments(parser)`` and ``run(options)``, which may return an exit status. The
            docstring is the description.
        arguments: The command line after the verb.
    """
    alone = verb != "build"
    only = "This command is run by one process; several of torchrun or srun are refused." if alone else None
    parser = _Parser(prog=f"voxelfield {verb}", description=module.__doc__, epilog=only)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with one_line_records():
        module.add_arguments(parser)
        try:
            options = parser.parse_args(arguments)
            if alone and (count := processes.started()) > 1:
                raise ValueError(f"{verb} must be run by one process, got {count} that torchrun or srun has started")
            result: int = module.run(options) or 0
            return result
        except Exception as error:
            status = exit_status(error)
            if status is None:
                raise
            text = " ".join(str(error).split()) or type(error).__name__
            logger.error("%s", clipped(text, LONGEST_MESSAGE))
            return status


def exit_status(error: Exception) -> int | None:
    """Returns the exit status for an error: 2 for wrong input, 1 for a failure, None for a fault of the program."""
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
