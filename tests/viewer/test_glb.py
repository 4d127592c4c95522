"""Exported meshes in a viewer that runs in a browser."""

from __future__ import annotations

import pytest
import torch
from chromium import browser_fixture, eventually
from free_ports import free_port

from voxelfield.export.mesh_file import Mesh, Texture, save_mesh

# Chromium takes its time on a busy machine.
pytestmark = [pytest.mark.long]
viser = pytest.importorskip("viser")

COLOR = (200, 90, 30)

browser = browser_fixture((900, 700))


@pytest.fixture
def server():
    started = viser.ViserServer("127.0.0.1", free_port(), verbose=False)
    started.initial_camera.position, started.initial_camera.look_at = (0.0, 0.0, 3.0), (0.0, 0.0, 0.0)
    started.scene.set_up_direction("+y")
    yield started
    started.stop()


def square(textured: bool) -> Mesh:
    """An upright square, all of one colour, which faces the camera once its z axis has become the file's y axis."""
    corners = torch.tensor([[-1.0, 0.0, -1.0], [1.0, 0.0, -1.0], [1.0, 0.0, 1.0], [-1.0, 0.0, 1.0]])
    colors = torch.tensor(COLOR, dtype=torch.uint8)
    texture = Texture(0.5 + 0.5 * corners[:, ::2], colors.repeat(8, 8, 1)) if textured else None
    normals = torch.tensor([0.0, -1.0, 0.0]).repeat(4, 1)
    return Mesh(corners, torch.tensor([[0, 1, 2], [0, 2, 3]]), normals, colors.repeat(4, 1), texture)


@pytest.mark.parametrize("textured", [False, True], ids=["vertices", "texture"])
def test_a_glb_has_its_colours_in_a_browser_and_no_complaint_is_heard(browser, server, tmp_path, textured):
    save_mesh(tmp_path / "square.glb", square(textured))
    server.scene.add_glb("/square", (tmp_path / "square.glb").read_bytes())
    # The page before complains that its server has gone.
    browser.driver.get("about:blank")
    browser.driver.get_log("browser")
    browser.driver.get(f"http://127.0.0.1:{server.get_port()}")
    middle = (slice(340, 360), slice(350, 370))

    def shown() -> bool:
        found = browser.picture()[middle].float().mean(dim=(0, 1))
        # viser maps tones a little brighter. Colours in the wrong encoding would be off by 60.
        return bool((found - torch.tensor(COLOR)).abs().max() < 16)

    eventually(shown, "the mesh in its own colour")
    complaints = [entry["message"] for entry in browser.driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert complaints == []
