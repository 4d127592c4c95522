from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from voxelfield.media.png import BackgroundWriter
from voxelfield.rendering.pixels import to_uint8


def test_png_holds_the_rounded_image(tmp_path, device):
    rgb = torch.rand(5, 7, 3, device=device) * 1.2 - 0.1
    with BackgroundWriter() as pictures:
        pictures.save(tmp_path / "folder" / "view.png", rgb)
    with Image.open(tmp_path / "folder" / "view.png") as image:
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), to_uint8(rgb).cpu().numpy())


@pytest.mark.parametrize("options", [{}, {"workers": 1, "waiting": 2}])
def test_images_written_in_the_background_are_those_that_were_given(tmp_path, device, options):
    given = torch.rand(50, 9, 7, 3)
    with BackgroundWriter(**options) as pictures:
        for index, rgb in enumerate(given):
            passing = rgb.to(device, copy=True)
            pictures.save(tmp_path / "views" / f"{index}.png", passing)
            passing.zero_()
    for index, rgb in enumerate(given):
        written = np.asarray(Image.open(tmp_path / "views" / f"{index}.png"))
        assert np.array_equal(written, to_uint8(rgb).numpy())


def test_an_image_that_cannot_be_written_is_an_error_in_the_end(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"), BackgroundWriter() as pictures:
        pictures.save(tmp_path / "file" / "view.png", torch.rand(4, 4, 3))


def test_a_closed_writer_takes_no_image(tmp_path):
    pictures = BackgroundWriter(1, waiting=1)
    pictures.close()
    for _ in range(2):  # the second one must not wait for room
        with pytest.raises(RuntimeError, match="shutdown"):
            pictures.save(tmp_path / "view.png", torch.rand(4, 4, 3))


def test_an_error_of_the_caller_is_not_hidden_by_one_of_writing(tmp_path):
    (tmp_path / "file").touch()

    def draw() -> None:
        with BackgroundWriter() as pictures:
            pictures.save(tmp_path / "file" / "view.png", torch.rand(4, 4, 3))
            raise KeyError

    with pytest.raises(KeyError):
        draw()


def test_nobody_goes_on_drawing_for_a_folder_that_takes_no_more(tmp_path):
    (tmp_path / "file").touch()
    drawn = []

    def draw() -> None:
        with BackgroundWriter() as pictures:
            for index in range(10_000):
                drawn.append(index)
                pictures.save(tmp_path / "file" / "view.png", torch.rand(4, 4, 3))

    with pytest.raises(OSError, match="file"):
        draw()
    assert len(drawn) < 1000
