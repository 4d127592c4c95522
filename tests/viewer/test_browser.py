"""The page in a browser: it loads without the internet, shows what the field looks like, and obeys."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch
from chromium import Browser, chromium, eventually
from free_ports import free_port
from PIL import Image
from torch.nn import functional as F
from viewer_scene import served_page, session, trained_run

from voxelfield.training.config import LoggerConfig
from voxelfield.viewer.display import Display, viewpoint_of
from voxelfield.viewer.painter import Painter
from voxelfield.viewer.state import viewpoint_of_camera
from voxelfield.viewer.watch import TrainingViewer
from voxelfield.viewer.worker import Detail

# Chromium takes its time on a busy machine, and its timing decides.
pytestmark = [pytest.mark.long]
pytest.importorskip("viser")

WINDOW = (1000, 700)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium"), WINDOW) as started:
        yield started


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
    eventually(
        lambda: page.worker._clients and all(client.detail == Detail.SHARP for client in page.worker._clients.values()),
        "a sharp picture",
    )


def expected_picture(page, display: Display, photo: int | None = None) -> torch.Tensor:
    camera = only_client(page).camera
    painter = Painter(trained_run(), page.state.photographs)
    viewpoint = viewpoint_of_camera(camera)
    return painter.picture(viewpoint, display, camera.image_height, camera.image_width, sharp=True, photo=photo)


def difference(browser: Browser, expected: torch.Tensor) -> float:
    """Mean absolute difference of the page and a direct render, in the part that no panel and no notice covers.

    Of means over 8 x 8 pixels, because JPEG blurs the colours of noise, of which a hardly trained field has much.
    """
    shown = browser.picture().float().permute(2, 0, 1)
    # viser asks for fewer pixels for a while where a browser is slow, and stretches them over the page.
    expected = F.interpolate(expected.float().permute(2, 0, 1)[None], shown.shape[1:], mode="bilinear")[0]
    small = [F.avg_pool2d(image[:, 200:520, 100:620], 8) for image in (shown, expected)]
    return float((small[0] - small[1]).abs().mean())


def shows(browser: Browser, page, display: Display, photo: int | None = None) -> None:
    settled(page)
    drawn: dict[tuple[float, ...], torch.Tensor] = {}

    def same() -> bool:
        # Rendered once per camera pose, because doing so in each comparison would leave no time for the page itself.
        camera = only_client(page).camera
        place = (camera.image_height, *viewpoint_of_camera(camera).matrix.flatten().tolist())
        if place not in drawn:
            drawn[place] = expected_picture(page, display, photo)
        return difference(browser, drawn[place]) < 3

    eventually(same, f"a picture of {display}")


def moved_from(page, before) -> float:
    return float((viewpoint_of_camera(only_client(page).camera).matrix - before.matrix).norm())


def test_the_page_shows_the_field_and_obeys(browser, page):
    browser.open(url_of(page))
    client, worker = only_client(page), page.worker
    shows(browser, page, Display())
    assert expected_picture(page, Display()).float().std() > 15, "nothing to compare"
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
    eventually(lambda: moved_from(page, page.state.home) < 1e-3, "home")

    # Modes and settings.
    browser.choose("Show", "depth")
    eventually(lambda: worker.display.mode == "depth", "the mode")
    shows(browser, page, Display("depth"))
    for mode in ("normal", "opacity", "samples per ray", "occupancy"):
        page.view.mode.value = mode
        shows(browser, page, Display(mode))
    page.view.mode.value = "rgb"
    page.view.rows.value = 200
    settled(page)
    assert worker._clients[client.client_id].request.height == 200
    page.view.rows.value = 800
    page.view.rate.value = 33
    assert worker.frames_per_second == 33

    # Crop.
    page.region.crop.value = True
    page.region.sides[0].value = (page.state.crop_limits[0][0], 0.0)
    assert worker.display.crop[1][0] == pytest.approx(0.0, abs=0.02)
    settled(page)
    page.region.crop.value = False
    shows(browser, page, Display())

    browser.button("Screenshot")
    with Image.open(browser.downloaded("voxelfield_*.png")) as image:
        assert image.size == (client.camera.image_width, client.camera.image_height)
        taken = torch.from_numpy(np.array(image.convert("RGB"))).int()
    assert (taken - expected_picture(page, Display()).int()).abs().max() <= 1


def test_cameras_are_shown_gone_to_and_compared_with(browser, page):
    browser.open(url_of(page))
    client = only_client(page)
    browser.tab("Cameras")
    browser.checkbox("Show cameras")
    eventually(lambda: len(page.cameras.frusta) == len(page.state.photographs), "frusta")
    photographs = page.state.photographs
    # From far behind one camera, that is what one clicks at in the middle of the picture.
    number = 7
    behind = viewpoint_of(*photographs.camera(number))
    c2w = behind.matrix.clone()
    c2w[:3, 3] += 0.5 * c2w[:3, 2]
    page.state.move(client, type(behind).of(c2w, 0.7))
    eventually(lambda: moved_from(page, type(behind).of(c2w, 0.7)) < 1e-3, "the way there")
    settled(page)
    browser.drag((client.camera.image_width // 2, client.camera.image_height // 2), (0, 0))
    eventually(lambda: page.state.photo_of.get(client.client_id) == number, "a click at a camera")
    eventually(lambda: moved_from(page, behind) < 1e-3, "the camera's place")
    assert page.cameras.view.value == photographs.names[number]

    browser.checkbox("Compare")
    eventually(lambda: page.worker.display.photo_fraction == 0.5, "the comparison")
    page.cameras.fraction.value = 0.3
    display = Display(photo_fraction=0.3)
    shows(browser, page, display, number)
    assert difference(browser, expected_picture(page, Display())) > 1, "the photograph is not to be seen"
    browser.button("Next")
    eventually(lambda: page.state.photo_of.get(client.client_id) == number + 1, "the next view")
    shows(browser, page, display, number + 1)
    browser.drag((300, 400), (40, 0))
    eventually(lambda: page.worker._clients[client.client_id].request.photo is None, "an end of comparing elsewhere")


def test_a_path_is_recorded_played_saved_and_loaded(browser, page, tmp_path):
    browser.open(url_of(page))
    client = only_client(page)
    browser.tab("Path")
    for number, view in enumerate((0, 5, 9), start=1):
        page.state.go_to_photograph(client, view)
        settled(page)
        browser.button("Add key frame")
        eventually(lambda number=number: len(page.path.keys) == number, "a key frame")
    page.path.seconds.value = 0.5
    page.path.fps.value = 10
    browser.button("Save camera_path.json")
    content = json.loads(browser.downloaded("camera_path.json").read_text())
    assert len(content["camera_path"]) == 5
    places = [frame["matrix"][3::4][:3] for frame in content["keyframes"]]
    for place, view in zip(places, (0, 5, 9), strict=True):
        cameras, index = page.state.photographs.camera(view)
        assert place == pytest.approx(cameras.c2w[index, :3, 3].tolist(), abs=1e-3)
    page.state.go_to_photograph(client, 0)
    browser.button("Play")
    last = page.path.keys[-1]
    eventually(lambda: moved_from(page, last) < 1e-2, "the end of the path")
    browser.button("Clear")
    eventually(lambda: page.path.keys == [], "no key frame")
    saved = browser.downloads / "camera_path.json"
    # The input stays hidden behind its button.
    from selenium.webdriver.common.by import By

    browser.driver.find_element(By.XPATH, "//input[@type='file']").send_keys(str(saved))
    eventually(lambda: len(page.path.keys) == 3, "the loaded path")


def test_training_is_watched_and_paused(browser):
    viewer = TrainingViewer(LoggerConfig(viewer_port=free_port()))
    training = session(steps=2000, on_step=viewer.after_step)
    viewer.begin(training)
    viewer.live.pause()
    thread = threading.Thread(target=training.fit)
    thread.start()
    try:
        eventually(lambda: viewer.page is not None, "the page")
        browser.open(url_of(viewer.page))
        settled(viewer.page)
        assert training.step == 1
        browser.tab("Training")
        browser.button("Resume")
        eventually(lambda: training.step > 60, "training to go on")
        browser.button("Pause")
        eventually(lambda: viewer.live.paused, "a pause")
        eventually(lambda: browser.find("//*[contains(., ', paused')]"), "the word for it")
    finally:
        training.config.trainer.steps = training.step
        viewer.end()
        thread.join(60)
    assert not thread.is_alive()
