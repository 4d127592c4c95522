"""The page in a browser: it loads without the internet, shows what the field looks like, and obeys."""

from __future__ import annotations

import threading

import pytest
import torch
from chromium import Browser, browser_fixture, eventually
from torch.nn import functional as F
from viewer_scene import served_page, trained_run, watched

from voxelfield.datasets.camera_path import read_camera_path
from voxelfield.rendering.viewpoints import viewpoint_of, viewpoint_of_camera
from voxelfield.viewer.pictures import Detail, Painter, PictureRequest

# Chromium takes its time on a busy machine, and its timing decides.
pytestmark = [pytest.mark.long]
pytest.importorskip("viser")

browser = browser_fixture((1000, 700))


@pytest.fixture
def page():
    with served_page() as served:
        yield served


def url_of(page) -> str:
    return f"http://127.0.0.1:{page.server.get_port()}"


def only_client(page):
    eventually(lambda: page.server.get_clients(), "a connection")
    return next(iter(page.server.get_clients().values()))


def settled(page) -> None:
    """Waits until the sharp picture of the requested view has been sent."""

    def is_sharp() -> bool:
        clients = page.worker._clients.values()
        drawn = clients and all(client.detail == Detail.SHARP for client in clients)
        return drawn and "(at rest)" in page.view.status.content

    eventually(is_sharp, "a sharp picture")


def expected_picture(page, mode: str) -> torch.Tensor:
    camera = only_client(page).camera
    viewpoint = viewpoint_of_camera(camera)
    request = PictureRequest(viewpoint, mode, camera.image_height, camera.image_width)
    return Painter(trained_run()).picture(request, sharp=True)


def difference(browser: Browser, expected: torch.Tensor) -> float:
    """Mean absolute difference of the page and a direct render, in the part that no panel and no notice covers.

    Of means over 8 x 8 pixels, because JPEG blurs the colours of noise, of which a hardly trained field has much.
    """
    shown = browser.picture().float().permute(2, 0, 1)
    # viser asks for fewer pixels for a while where a browser is slow, and stretches them over the page.
    expected = F.interpolate(expected.float().permute(2, 0, 1)[None], shown.shape[1:], mode="bilinear")[0]
    small = [F.avg_pool2d(image[:, 200:520, 100:620], 8) for image in (shown, expected)]
    return float((small[0] - small[1]).abs().mean())


def shows(browser: Browser, page, mode: str) -> None:
    settled(page)
    drawn: dict[tuple[float, ...], torch.Tensor] = {}

    def same() -> bool:
        # Rendered once per camera pose, because doing so in each comparison would leave no time for the page itself.
        camera = only_client(page).camera
        place = (camera.image_height, *viewpoint_of_camera(camera).matrix.flatten().tolist())
        if place not in drawn:
            drawn[place] = expected_picture(page, mode)
        return difference(browser, drawn[place]) < 3

    eventually(same, f"a picture of {mode}")


def moved_from(page, before) -> float:
    return float((viewpoint_of_camera(only_client(page).camera).matrix - before.matrix).norm())


def test_the_page_shows_the_field_and_obeys(browser, page):
    browser.open(url_of(page))
    client, worker = only_client(page), page.worker
    shows(browser, page, "rgb")
    assert expected_picture(page, "rgb").float().std() > 15, "nothing to compare"
    port = page.server.get_port()
    own = (f"http://127.0.0.1:{port}/", f"blob:http://127.0.0.1:{port}/")
    requested = browser.requested()
    assert own[0] in requested
    assert [url for url in requested if not url.startswith(own)] == []

    # Orbit and fly.
    before = viewpoint_of_camera(client.camera)
    browser.drag((300, 400), (120, 30))
    eventually(lambda: moved_from(page, before) > 0.1, "orbiting")
    settled(page)
    before = viewpoint_of_camera(client.camera)
    browser.press("w", 0.5)
    eventually(lambda: moved_from(page, before) > 0.01, "flying")
    step = viewpoint_of_camera(client.camera).matrix[:3, 3] - before.matrix[:3, 3]
    ahead = -before.matrix[:3, 2]
    ahead[2] = 0.0
    assert float(step @ ahead) > 0.99 * float(step.norm() * ahead.norm()), "w flies forward, level"
    browser.button("Home")
    eventually(lambda: moved_from(page, page.home) < 1e-3, "home")

    # Modes and settings.
    browser.choose("Show", "depth")
    eventually(lambda: page.view.mode.value == "depth", "the mode")
    shows(browser, page, "depth")
    page.view.mode.value = "rgb"
    page.view.rows.value = 200
    settled(page)
    eventually(lambda: worker._clients[client.client_id].request.height == 200, "the height")
    page.view.rows.value = 800
    page.view.rate.value = 33
    eventually(lambda: worker.frames_per_second == 33, "the rate")


def photographs_of(page):
    return page.cameras.photographs


def viewpoint_at(photographs, number: int):
    split, index = list(photographs.values())[number]
    return viewpoint_of(split.cameras, index)


def test_cameras_are_shown_and_gone_to(browser, page):
    browser.open(url_of(page))
    client, photographs = only_client(page), photographs_of(page)
    browser.tab("Cameras")
    browser.checkbox("Show cameras")
    eventually(lambda: len(page.cameras.frusta) == len(photographs), "frusta")
    # From far behind one camera, that is what one clicks at in the middle of the picture.
    number = 7
    behind = viewpoint_at(photographs, number)
    c2w = behind.matrix.clone()
    c2w[:3, 3] += 0.5 * c2w[:3, 2]
    page.move(client, type(behind).of(c2w, 0.7))
    eventually(lambda: moved_from(page, type(behind).of(c2w, 0.7)) < 1e-3, "the way there")
    settled(page)
    browser.drag((client.camera.image_width // 2, client.camera.image_height // 2), (0, 0))
    eventually(lambda: moved_from(page, behind) < 1e-3, "the camera's place")
    assert page.cameras.view.value == list(photographs)[number]
    shows(browser, page, "rgb")


def go(page, client, viewpoint) -> None:
    """Moves the camera, and waits until the browser says so; places at which it was before may be reported late."""
    there = threading.Event()

    async def moved(_) -> None:
        if moved_from(page, viewpoint) < 1e-3:
            there.set()

    client.camera.on_update(moved)
    page.move(client, viewpoint)
    eventually(there.is_set, "the camera's place")


def test_a_path_is_recorded_and_saved(browser, page):
    browser.open(url_of(page))
    client, photographs = only_client(page), photographs_of(page)
    browser.tab("Path")
    for number, view in enumerate((5, 9, 0), start=1):
        go(page, client, viewpoint_at(photographs, view))
        browser.button("Add key camera")
        eventually(lambda number=number: len(page.path.keys) == number, "a key camera")
    page.path.seconds.value = 0.5
    page.path.fps.value = 10
    browser.button("Save camera_path.json")
    path = read_camera_path(browser.downloaded("camera_path.json"))
    assert (len(path.cameras), path.fps) == (5, 10)
    for station, view in zip((0, 2, 4), (5, 9, 0), strict=True):
        expected = viewpoint_at(photographs, view).matrix
        torch.testing.assert_close(path.cameras.c2w[station], expected, atol=1e-3, rtol=0)
    browser.button("Clear")
    eventually(lambda: page.path.keys == [], "no key camera")


def test_training_is_watched(browser):
    viewer, training = watched(steps=2000)
    thread = threading.Thread(target=training.fit)
    thread.start()
    try:
        browser.open(url_of(viewer.page))
        settled(viewer.page)
        eventually(lambda: browser.find("//*[contains(., ' of 2000')]"), "the progress")
    finally:
        training.config.trainer.steps = training.step
        thread.join(60)
        viewer.end()
    assert not thread.is_alive()
