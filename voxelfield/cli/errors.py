"""Reports user errors in one line."""

from __future__ import annotations

import logging
from collections.abc import Callable

from voxelfield._library import KernelsUnavailableError
from voxelfield.cli.log_lines import one_line_records
from voxelfield.installed import MissingPackageError
from voxelfield.messages import LONGEST_MESSAGE, clipped
from voxelfield.ops._errors import is_out_of_memory

logger = logging.getLogger(__name__)


def in_one_line(action: Callable[[], None]) -> int:
    """Runs an action and returns the exit status; prints a user error in one line.

    Args:
        action: Raises ValueError, OSError or MissingPackageError for errors that the user can fix, and
            FloatingPointError for a field that is not finite. Running out of memory is reported in the same way.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with one_line_records():
        return _run(action)


def _run(action: Callable[[], None]) -> int:
    try:
        action()
    except (ValueError, OSError, KernelsUnavailableError, MissingPackageError) as error:
        return _failed(error, 2)
    except FloatingPointError as error:
        return _failed(error, 1)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return _failed(error, 1)
    return 0


def _failed(error: Exception, status: int) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    logger.error("%s", clipped(text, LONGEST_MESSAGE))
    return status
