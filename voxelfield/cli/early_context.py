"""A GPU's context, created while the command's own modules are imported."""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
import threading
from collections.abc import Sequence


def begin_context(arguments: Sequence[str]) -> threading.Thread | None:
    """Has the driver create the context of the GPU that a training will use, in a thread.

    That takes most of a second, in which nothing of Python is needed: but torch would hold the interpreter's lock for
    part of it. A driver or GPU that is not there is left for torch to report.

    Args:
        arguments: Hydra's command line, such as ``device=cuda:1``.

    Returns:
        The thread, or None where no GPU is asked for.
    """
    wishes = [text.lstrip("+").removeprefix("device=") for text in arguments if text.lstrip("+").startswith("device=")]
    found = re.fullmatch(r"(?:auto|cuda)(?::(\d{1,2}))?", wishes[-1] if wishes else "auto")
    if found is None or sys.platform != "linux":
        return None
    thread = threading.Thread(target=_create_context, args=(int(found[1] or 0),), name="context", daemon=True)
    thread.start()
    return thread


def _create_context(index: int) -> None:
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        # torch's CUDA runtime uses the primary context too.
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
