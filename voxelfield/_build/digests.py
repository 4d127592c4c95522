"""A digest beside every compiled module, which detects a damaged module before it is loaded.

Loading one that is cut short kills the process, and one with a flipped bit computes something else.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def digest_path(module: Path) -> Path:
    """Returns the path of the file that holds a module's digest."""
    return module.with_name(f"{module.name}.digest")


def module_digest(content: bytes) -> str:
    """Returns the digest of a module's content: BLAKE2b, which takes a few milliseconds."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def write_digest(module: Path) -> Path:
    """Writes the digest of a module beside it, and returns that file."""
    path = digest_path(module)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(module_digest(module.read_bytes()) + "\n", encoding="ascii")
    temporary.replace(path)
    return path


def verify_digest(module: Path, content: bytes) -> str:
    """Says what is wrong with a module by its digest, in words that follow its path; "" if nothing is.

    Args:
        module: Its file.
        content: What was read from there.
    """
    path = digest_path(module)
    try:
        written = path.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        return f"has no digest beside it ({path.name}) to be checked against"
    return "" if written == module_digest(content) else f"is damaged, or was changed: {path.name} does not match"
