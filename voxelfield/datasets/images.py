"""Image files of a scene, as every format of data sets reads them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor


def read_images(paths: Sequence[Path], downscale: int = 1) -> Tensor:
    """Reads the images of a split, several at a time.

    Args:
        paths: N PNG or JPEG files with 8 bits a channel, N at least 1, all of one size.
        downscale: Whole factor to shrink by with :func:`area_average`; must divide width and height.

    Returns:
        (N, H / downscale, W / downscale, 4) uint8 on the CPU, RGBA with straight alpha; images without alpha become
        opaque.

    Raises:
        ValueError: An image is unreadable or of another size than the first, or the factor does not divide its size.
    """
    first = _decode(paths[0])
    height, width = first.shape[:2]
    if height % downscale or width % downscale:
        raise ValueError(f"downscale={downscale} does not divide the size {width}x{height} of {paths[0]}")
    images = np.empty((len(paths), height // downscale, width // downscale, 4), dtype=np.uint8)

    def fill(index: int) -> None:
        image = first if index == 0 else _decode(paths[index])
        if image.shape != first.shape:
            size = f"{image.shape[1]}x{image.shape[0]}"
            raise ValueError(f"{paths[index]}: size must be {width}x{height}, like {paths[0]}, got {size}")
        images[index] = image if downscale == 1 else area_average(image, downscale)

    # Pillow releases the GIL while it decodes, so threads are enough and nothing is copied between processes.
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        for _ in pool.map(fill, range(len(paths))):
            pass
    return torch.from_numpy(images)


def factor_to_fit(path: Path, max_size: int) -> int:
    """Finds the smallest whole factor that divides both sides of an image and leaves neither longer than ``max_size``.

    Args:
        path: The image.
        max_size: Longest side wanted, in pixels.

    Raises:
        ValueError: The image is unreadable, or no factor divides both sides to fit.
    """
    height, width = _decode(path).shape[:2]
    for factor in range(1, min(width, height) + 1):
        if max(width, height) <= max_size * factor and width % factor == 0 and height % factor == 0:
            return factor
    raise ValueError(f"{path}: no whole factor shrinks {width}x{height} to at most {max_size} pixels a side")


def area_average(image: npt.NDArray[np.uint8], factor: int) -> npt.NDArray[np.uint8]:
    """Shrinks an RGBA image by averaging ``factor`` x ``factor`` blocks, weighting colours by their alpha.

    Transparent pixels have no say in the colour of the block, so silhouettes get no dark or stray fringe.

    Args:
        image: (H, W, 4) uint8 RGBA, straight alpha; ``factor`` divides H and W.
        factor: 1 to 256.

    Returns:
        (H / factor, W / factor, 4) uint8, straight alpha, rounded to nearest; black where fully transparent.

    Raises:
        ValueError: ``factor`` is out of range or does not divide the size.
    """
    height, width = image.shape[:2]
    if not 1 <= factor <= 256:
        raise ValueError(f"factor must be 1 to 256, got {factor}")
    if height % factor or width % factor:
        raise ValueError(f"factor {factor} does not divide the image size {width}x{height}")
    # uint32 is exact: 255 * 255 * 256 * 256 is still below 2**32.
    alpha = image[..., 3:].astype(np.uint32)
    weighted = np.concatenate((image[..., :3] * alpha, alpha), axis=-1)
    rows = weighted.reshape(height // factor, factor, width, 4).sum(axis=1, dtype=np.uint32)
    sums = rows.reshape(height // factor, width // factor, factor, 4).sum(axis=2, dtype=np.uint32)
    total = sums[..., 3:]
    # The halves round to nearest; in 64 bits, since the largest sum leaves no room for them.
    rgb = (sums[..., :3].astype(np.uint64) + total // 2) // np.maximum(total, 1)
    mean_alpha = (total + factor * factor // 2) // (factor * factor)
    return np.concatenate((rgb, mean_alpha), axis=-1).astype(np.uint8)


def _decode(path: Path) -> npt.NDArray[np.uint8]:
    try:
        with Image.open(path) as image:
            # Pillow would clip these to 255 instead of scaling them.
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"channels must have 8 bits, got pixel mode {image.mode}")
            # To convert what has this mode already would copy it, while no other thread decodes.
            return np.asarray(image if image.mode == "RGBA" else image.convert("RGBA"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        # Pillow's own words for an unidentified file repeat the path.
        reason = "not an image" if isinstance(error, Image.UnidentifiedImageError) else str(error)
        raise ValueError(f"{path}: unreadable image ({reason})") from error
