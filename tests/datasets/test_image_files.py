"""Image files: which are opened, which pixels are read, and what shrinking them gives."""

from __future__ import annotations

import io
import math
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from raw_png import GREY, png_of_16_bits, raw_png

from voxelfield.datasets.images import area_resized, exif_orientation, image_files, image_size, read_images
from voxelfield.files import HEIC_SUFFIXES, IMAGE_SUFFIXES

READ = {"PNG", "JPEG", "MPO", "WEBP", "TIFF", "BMP"}
"""Formats of Pillow that are read."""


def shrunk(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """RGBA pixels, shrunk."""
    return np.asarray(area_resized(Image.fromarray(image), size).convert("RGBA"))


def pixels(*shape: int, high: int = 256, dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, high, shape, dtype=dtype)


def encoded(image: Image.Image, file_format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def refusal(path: Path) -> str:
    """Returns the message with which both ways to read a file refuse it."""
    messages = set()
    for read in (image_size, lambda path: read_images([path])):
        with pytest.raises(ValueError, match="unreadable image") as error:
            read(path)
        messages.add(str(error.value))
    (message,) = messages
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


def formats_to_write() -> list[str]:
    Image.init()
    return sorted(Image.SAVE)


@pytest.mark.parametrize("file_format", formats_to_write())
def test_formats_are_told_by_content_and_only_common_ones_are_read(tmp_path, file_format):
    for mode in ("RGB", "L", "P", "1"):
        try:
            content = encoded(Image.fromarray(pixels(48, 64, 3)).convert(mode), file_format)
        except (OSError, ValueError, KeyError, AttributeError):
            continue  # not in this mode, or not with this installation of Pillow
        break
    else:
        pytest.skip("Pillow cannot write this format here")
    for suffix in (".png", ".jpg"):
        path = tmp_path / f"r_0{suffix}"
        path.write_bytes(content)
        if file_format in READ:
            assert image_size(path) == (64, 48)
            assert read_images([path]).shape == (1, 48, 64, 4)
        else:
            assert "not a PNG, JPEG, WebP, TIFF or BMP image" in refusal(path)


def test_postscript_is_not_run(tmp_path):
    """Pillow would hand such a file to Ghostscript."""
    written = tmp_path / "written"
    program = f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n({written}) (w) file closefile\n{{}} loop\n%%EOF\n"
    path = tmp_path / "r_0.png"
    path.write_text(program)
    refusal(path)
    assert not written.exists()


@pytest.mark.parametrize("suffix", IMAGE_SUFFIXES)
def test_every_listed_suffix_is_written_and_read(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    if suffix in HEIC_SUFFIXES:
        pytest.importorskip("pillow_heif").register_heif_opener()
    Image.new("RGB", (8, 6), (10, 200, 30)).save(path)
    np.testing.assert_allclose(read_images([path])[0, 3, 4], (10, 200, 30, 255), atol=3)


@pytest.mark.skipif(sys.platform == "win32", reason="has no named pipes in folders")
@pytest.mark.parametrize("make", [lambda p: os.mkfifo(p), Path.mkdir, lambda p: p.symlink_to("/dev/zero")])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, make):
    make(tmp_path / "r_0.png")
    assert re.search("must be a file, got a (named pipe|folder|device)", refusal(tmp_path / "r_0.png"))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_pixels_of_any_usual_kind_are_read(tmp_path, mode):
    path = tmp_path / "a.png"
    Image.fromarray(pixels(6, 8, 4)).convert(mode).save(path)
    with Image.open(path) as image:
        assert image.mode == mode
        assert np.array_equal(read_images([path])[0].numpy(), np.asarray(image.convert("RGBA")))


def test_a_transparent_colour_is_read(tmp_path):
    image = Image.fromarray(np.array([[[1, 2, 3], [4, 5, 6]]], dtype=np.uint8))
    image.save(tmp_path / "a.png", transparency=(4, 5, 6))
    assert read_images([tmp_path / "a.png"])[0, 0, :, 3].tolist() == [255, 0]


@pytest.mark.parametrize("channels", [3, 4])
def test_the_upper_8_of_16_bits_are_read(tmp_path, channels):
    wide = pixels(6, 8, channels, high=65536, dtype=np.uint16)
    (tmp_path / "a.png").write_bytes(png_of_16_bits(wide))
    assert np.array_equal(read_images([tmp_path / "a.png"])[0, ..., :channels].numpy(), wide >> 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (png_of_16_bits(pixels(6, 8, 1)), "got grey with 16 bits: convert the images"),
        (png_of_16_bits(pixels(6, 8, 2)), "got grey with 16 bits: convert the images"),
        (encoded(Image.fromarray(pixels(6, 8).astype(np.uint16)), "TIFF"), "got grey with 16 bits: convert the images"),
        (png_of_16_bits(pixels(6, 8, 3), (b"tRNS" + bytes(6),)), "got RGB with 16 bits and a transparent colour"),
        (encoded(Image.new("CMYK", (8, 6)), "JPEG"), "got Pillow's mode CMYK"),
        (encoded(Image.new("F", (8, 6)), "TIFF"), "got Pillow's mode F"),
        (encoded(Image.new("LAB", (8, 6)), "TIFF"), "got Pillow's mode LAB"),
        (raw_png(60_000, 60_000, 8, b"", GREY), "exceeds limit"),
    ],
)
def test_pixels_that_would_not_be_read_as_they_are_are_refused(tmp_path, content, message):
    (tmp_path / "a.png").write_bytes(content)
    assert message in refusal(tmp_path / "a.png")


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "TIFF", "MPO"])
def test_animations_are_refused_and_previews_ignored(tmp_path, file_format):
    first, *others = (Image.new("RGB", (16, 8), color) for color in ("red", "green", "blue"))
    (tmp_path / "a.png").write_bytes(encoded(first, file_format, save_all=True, append_images=others))
    if file_format in ("PNG", "WEBP"):
        assert "must be a single picture, got an animation of 3 frames" in refusal(tmp_path / "a.png")
    else:
        np.testing.assert_allclose(read_images([tmp_path / "a.png"])[0, 4, 8], (255, 0, 0, 255), atol=3)


@pytest.mark.parametrize("orientation", [0, 1, 3, 6, 8, 9])
@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_pixels_stay_where_they_are_stored_whatever_exif_says(tmp_path, file_format, orientation):
    """Pillow turns TIFF files by itself."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = np.zeros((16, 32, 3), dtype=np.uint8)
    image[:, 16:] = 200
    path = tmp_path / "a.png"
    path.write_bytes(encoded(Image.fromarray(image), file_format, exif=exif))
    assert image_size(path) == (32, 16)
    np.testing.assert_allclose(read_images([path])[0, ..., :3], image, atol=8)
    assert exif_orientation(path) == (orientation if 1 <= orientation <= 8 else 1)


def test_an_unreadable_folder_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    def refuse(folder):
        raise PermissionError(f"Permission denied: {folder}")

    assert image_files(tmp_path) == image_files(tmp_path / "absent") == []
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(PermissionError, match="Permission denied"):
        image_files(tmp_path)


def test_neither_hidden_files_nor_masks_count_as_photographs(tmp_path):
    names = ["a.jpg", "a_mask.png", "b.png", "b.png_mask.png", "c.1.png", "dynamic_mask_c.1.png", "other_mask.png"]
    for name in (*names, "._a.jpg", ".thumbnails/a.jpg", "in/._a.jpg", "in/a.PNG", "in/a_MASK.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [path.relative_to(tmp_path).as_posix() for path in image_files(tmp_path, "**/*")]
    assert found == ["a.jpg", "b.png", "c.1.png", "in/a.PNG", "other_mask.png"]
    assert [path.name for path in image_files(tmp_path, masks=True)] == sorted(names)


@pytest.mark.parametrize("size", [(13_400, 13_400), (19_200, 9_600)])
def test_the_refusal_of_an_image_above_the_limit_of_pillow_says_how_to_go_on(tmp_path, size):
    (tmp_path / "panorama.png").write_bytes(raw_png(*size, 8, b""))
    expected = rf"unreadable image \(Image size \({math.prod(size)} pixels\) exceeds limit of \d+ pixels: shrink the"
    with pytest.raises(ValueError, match=expected) as caught:
        image_size(tmp_path / "panorama.png")
    assert "attack" not in str(caught.value)


def test_damaged_exif_matters_only_where_it_is_read(tmp_path):
    Image.new("RGB", (8, 6)).save(tmp_path / "a.jpg", exif=b"Exif\0\0" + bytes(8))
    assert read_images([tmp_path / "a.jpg"]).shape == (1, 6, 8, 4)
    with pytest.raises(ValueError, match=r"a\.jpg: unreadable image \(its EXIF data are damaged: remove them"):
        exif_orientation(tmp_path / "a.jpg")


def test_colours_of_transparent_pixels_are_kept_unless_the_image_is_shrunk(tmp_path):
    image = np.full((4, 6, 4), (200, 100, 50, 0), dtype=np.uint8)
    Image.fromarray(image).save(tmp_path / "a.png")
    assert np.array_equal(read_images([tmp_path / "a.png"])[0], image)


@pytest.mark.parametrize("size", [(96, 64), (48, 32), (24, 64), (64, 128), (192, 1), (59, 44), (7, 100)])
def test_an_opaque_image_is_shrunk_to_its_average(size):
    """Exactly by powers of two, and within a level by other factors."""
    image = np.concatenate((pixels(128, 192, 3), np.full((128, 192, 1), 255, dtype=np.uint8)), axis=-1)
    planes = [Image.fromarray(image[..., channel].astype(np.float32)) for channel in range(4)]
    exact = np.stack([np.asarray(plane.resize(size, Image.Resampling.BOX)) for plane in planes], axis=-1)
    limit = 0.5 if size in ((96, 64), (48, 32), (24, 64)) else 1.0
    assert np.abs(shrunk(image, size) - exact).max() <= limit + 1e-4


def plain_mean(image: np.ndarray, factor: int) -> np.ndarray:
    """Averages blocks in float64, in premultiplied colour."""
    height, width, _ = image.shape
    blocks = image.reshape(height // factor, factor, width // factor, factor, 4).astype(float)
    alpha = blocks[..., 3:].sum(axis=(1, 3))
    colors = (blocks[..., :3] * blocks[..., 3:]).sum(axis=(1, 3)) / np.where(alpha > 0, alpha, 1)
    return np.concatenate((colors, alpha / factor**2), axis=-1)


@pytest.mark.parametrize("factor", [1, 2, 3, 4])
def test_resizing_by_a_whole_factor_is_the_plain_mean(factor):
    image = pixels(12, 24, 4)
    image[:6, :6, 3] = 0
    averaged = shrunk(image, (24 // factor, 12 // factor))
    assert averaged.dtype == np.uint8
    assert np.abs(averaged - plain_mean(image, factor)).max() <= 0.5 + 1e-4


def test_resizing_ignores_the_colour_of_transparent_pixels():
    image = np.array([[[200, 100, 50, 255], [0, 255, 0, 0]]] * 2, dtype=np.uint8)
    assert shrunk(image, (1, 1)).tolist() == [[[200, 100, 50, 128]]]
    assert shrunk(np.full((2, 2, 4), (9, 9, 9, 0), dtype=np.uint8), (1, 1)).tolist() == [[[0, 0, 0, 0]]]
