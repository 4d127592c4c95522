"""The stamp in every compiled module: what it was compiled from, by which CUDA and for which GPUs."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from .architectures import Architectures, driver_for
from .sources import source_digest

_PATTERN = re.compile(
    rb"voxelfield-source-digest:(?P<digest>[0-9a-f]+);sm:(?P<sm>[0-9a-z,]*);ptx:(?P<ptx>[0-9a-z,]*);"
    rb"variant:(?P<variant>[^;]*);cuda:(?P<cuda>[0-9]+);"
)


class Stamp(NamedTuple):
    """The information that a module is stamped with."""

    digest: str
    architectures: Architectures
    variant: str  # the VOXELFIELD_* macros that NVCC_APPEND_FLAGS and NVCC_PREPEND_FLAGS defined
    cuda: int  # major version of the compiling nvcc; 0 in the CPU module

    def __str__(self) -> str:
        """Returns words for messages: ``"sources 0123ab; CUDA 13 (driver …); compute capability 9.0; no macros"``."""
        if not self.cuda:
            return f"sources {self.digest}; no CUDA"
        macros = f"macros {self.variant}" if self.variant else "no macros"
        return (
            f"sources {self.digest}; CUDA {self.cuda} (driver {driver_for(self.cuda)}); {self.architectures}; {macros}"
        )


def read_stamp(module: Path) -> Stamp | None:
    """Returns the stamp of a compiled module without loading it, None if the file has none."""
    return find_stamp(module.read_bytes())


def find_stamp(content: bytes) -> Stamp | None:
    """Returns the stamp in what was read from a compiled module, None if there is none."""
    found = _PATTERN.search(content)
    if found is None:
        return None
    text = {name: value.decode() for name, value in found.groupdict().items()}
    architectures = Architectures(*(tuple(filter(None, text[kind].split(","))) for kind in ("sm", "ptx")))
    return Stamp(text["digest"], architectures, text["variant"], int(text["cuda"]))


def stamp_source(architectures: Architectures, variant: str) -> str:
    """Returns the translation unit that stamps a module of the present sources.

    It alone contains the digest: on every compiler's command line, each change would recompile every file.
    """
    sm, ptx = ",".join(architectures.sm), ",".join(architectures.ptx)
    stamp = f"voxelfield-source-digest:{source_digest()};sm:{sm};ptx:{ptx};variant:{variant};"
    return f'#define VOXELFIELD_STAMP "{stamp}"\n#include "module/stamp.h"\n'


def requested_variant() -> str:
    """Returns the macros of voxelfield that the environment makes nvcc define, such as ``VOXELFIELD_SCALAR_ATOMICS``.

    Other flags in ``NVCC_APPEND_FLAGS``, such as ``-lineinfo``, do not change what a kernel computes and are left out.
    """
    flags = [
        flag for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS") for flag in shlex.split(os.environ.get(name, ""))
    ]
    return ",".join(sorted({flag[2:] for flag in flags if re.fullmatch(r"-DVOXELFIELD_\w+(=\w+)?", flag)}))
