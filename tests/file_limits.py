"""A limit on the size of files, which stands in for a full disk."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """Sets the largest size of a file, beyond which writing fails as on a full disk.

    It ends before the test does, because pytest then writes to its own output, which may be a longer file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
