"""Log records of one line each, whatever names of files or values of settings they contain."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from voxelfield.messages import one_line

# Other packages decide for themselves how they log.
_OWN = ("voxelfield", "train")


class _OneLineRecord(logging.LogRecord):
    """A record whose message cannot look like another record or control a terminal."""

    def getMessage(self) -> str:  # noqa: N802 - the name in logging
        """Returns the message, in one line."""
        message = super().getMessage()
        return one_line(message) if self.name.startswith(_OWN) else message


@contextlib.contextmanager
def one_line_records() -> Iterator[None]:
    """Writes characters that are not printable as escapes in the log records that a block makes.

    A name that contains a line break would otherwise forge records, which the report of a run repeats.
    """
    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(_OneLineRecord)
    try:
        yield
    finally:
        logging.setLogRecordFactory(before)
