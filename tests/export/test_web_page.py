"""The web page of a field: what is written, and what a browser makes of it."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from baked_fields import BOX, NESTED, half_empty, look_at, make_field
from chromium import Browser, browser_fixture, eventually, serving
from PIL import Image
from small_pyramid import settings

import voxelfield
from voxelfield import FieldRenderer
from voxelfield.cli.command import main
from voxelfield.export import save_model, web_page
from voxelfield.export.web_page import save_web_page
from voxelfield.fields.decoders import FusedMLPDecoder
from voxelfield.fields.density import ExponentialDensity
from voxelfield.fields.environment import Environment
from voxelfield.fields.field import RadianceField
from voxelfield.models import Model, Sampling
from voxelfield.progress import size_in_words
from voxelfield.rendering.bricks import bake, stored_bytes
from voxelfield.rendering.cameras import Cameras, distance_to_nearest, views_of_points
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.render import render_view
from voxelfield.trained.trained_model import restore_trained_model
from voxelfield.warps.ndc_box import NdcBox
from voxelfield.warps.nested_boxes import NestedBoxes

CPU = torch.device("cpu")
SAMPLING = Sampling(voxels_per_step=0.55, min_transmittance=1e-3, min_weight=1e-3)
with torch.random.fork_rng():
    torch.manual_seed(0)
    CAMERAS = look_at(CPU).enlarged(4)


def write(
    folder: Path, field: RadianceField, occupancy: OccupancyGrid | None = None, cameras: Cameras = CAMERAS
) -> Model:
    model = Model(field, occupancy or half_empty(field), SAMPLING)
    save_web_page(folder, model, cameras, "</script>")
    return model


def forward_facing() -> NdcBox:
    identity = tuple(map(tuple, torch.eye(4)[:3].tolist()))
    return NdcBox(((-1, -1, -3), (1, 1, -2)), identity, 1.0, ((-1.0, -1.0), (1.0, 1.0)), 2.0)


def per_sample(warp: NestedBoxes | NdcBox | None = None) -> RadianceField:
    """A field whose colours depend on the direction at each sample."""
    decoder = FusedMLPDecoder(8, 32, 16, 1, 2, ExponentialDensity(0.5))
    with torch.no_grad():
        decoder.density_network[-1].mul_(2)
        decoder.color_network[-1].mul_(2)
    return RadianceField(make_field(CPU, warp).grid, decoder, warp)


def stored_arrays(folder: Path) -> dict[str, bytes]:
    """Reads what the page would load."""
    text = (folder / "index.html").read_text()
    found = {file.stem: file.read_bytes() for file in folder.glob("*.bin")}
    for name, part in re.findall(r'data-array="(\w+)">([^<]*)<', text):
        found[name] = found.get(name, b"") + base64.b64decode(part, validate=True)
    return {name: zlib.decompress(data) for name, data in found.items()}


def drawn_atlas(arrays: dict[str, bytes], across: tuple[int, int], coarse: bool = False) -> torch.Tensor:
    """Returns what a page has at vertices, (X, Y, Z, 17) float16, in atlases with so many blocks across."""
    side, parts = 3 if coarse else 8, []
    sides = [side * count for count in across]
    if coarse:
        parts = [b"".join(data for name, data in sorted(arrays.items()) if name.startswith("coarse_"))]
    else:
        parts = [arrays[f"layer{number}"] for number in range(sum(name.startswith("layer") for name in arrays))]
    layers = []
    for part in parts:
        rows = torch.frombuffer(bytearray(part), dtype=torch.uint8).view(18, -1, *sides)
        log_density = rows[:2].reshape(-1, *sides, 2).view(torch.float16)
        layers.append(torch.cat((log_density, *rows[2:].reshape(4, -1, *sides, 4).half()), dim=-1))
    return torch.cat(layers)


def block_at(atlas: torch.Tensor, place: int, side: int) -> torch.Tensor:
    x, y, z = (side * (place >> shift & 1023) for shift in (20, 10, 0))
    return atlas[x : x + side, y : y + side, z : z + side].float()


@pytest.mark.parametrize("inline", [True, False])
def test_a_page_holds_what_is_drawn(tmp_path, monkeypatch, device, inline):
    field = make_field(device, None, 16)
    if inline:
        monkeypatch.setattr(web_page, "_PART", 1001)
    else:
        monkeypatch.setattr(web_page, "MAX_INLINE", 1000)
    occupancy = write(tmp_path, field).occupancy
    arrays, bricks = stored_arrays(tmp_path), bake(field, occupancy)
    assert len(list(tmp_path.iterdir())) == (1 if inline else 1 + len(arrays))
    assert arrays["cells"] == occupancy.empty_distance.cpu().numpy().tobytes()
    log_density, values = bricks.unpacked()
    atlas = torch.cat((log_density[..., None], values), dim=-1).cpu()
    stored = bricks.blocks.cpu()
    page = torch.frombuffer(bytearray(arrays["blocks"]), dtype=torch.int32).view(stored.shape)
    assert torch.equal(page >= 0, stored >= 0)
    assert len(page[page >= 0].unique()) == int((stored >= 0).sum()) > 8
    across = (atlas.shape[1] // 8, atlas.shape[2] // 8)
    fine, coarse = drawn_atlas(arrays, across), drawn_atlas(arrays, across, coarse=True)
    for ours, theirs in zip(page[page >= 0].tolist(), stored[stored >= 0].tolist(), strict=True):
        block, few = block_at(atlas, theirs, 8), block_at(coarse, ours, 3)
        assert torch.equal(block_at(fine, ours, 8), block)
        assert torch.equal(few[::2, ::2, ::2], block[::7, ::7, ::7])
        assert (few[1, 1, 1] - block[3:5, 3:5, 3:5].mean(dim=(0, 1, 2))).abs().max() < 0.51
    text = (tmp_path / "index.html").read_text()
    assert "<title>&lt;/script&gt;</title>" in text
    assert "http:" not in text
    assert "https:" not in text


def test_a_page_leaves_no_files_of_the_one_that_it_replaces(tmp_path, monkeypatch):
    field = make_field(CPU, None, 16)
    (tmp_path / "mine.bin").touch()
    with monkeypatch.context() as patched:
        patched.setattr(web_page, "MAX_INLINE", 1000)
        write(tmp_path, field)
    assert len(list(tmp_path.glob("*.bin"))) > 2
    write(tmp_path, field)
    assert {file.name for file in tmp_path.iterdir()} == {"index.html", "mine.bin"}


@pytest.mark.parametrize("name", ["mine.bin", "weights.bin"])
def test_files_that_a_tampered_page_names_stay(tmp_path, monkeypatch, name):
    field = make_field(CPU, None, 16)
    (tmp_path / name).write_bytes(b"mine")
    write(tmp_path, field)
    page = tmp_path / "index.html"
    page.write_bytes(page.read_bytes() + f'"file": "{name}"'.encode() + b"\xff")
    write(tmp_path, field)
    assert (tmp_path / name).read_bytes() == b"mine"
    monkeypatch.setattr(web_page, "MAX_INLINE", 1000)
    refusal = pytest.raises(FileExistsError, match=r"weights\.bin was not written by voxelfield: choose another folder")
    with refusal if name == "weights.bin" else contextlib.nullcontext():
        write(tmp_path, field)
    assert (tmp_path / name).read_bytes() == b"mine"


def test_a_page_without_room_for_two_vertices_per_voxel_has_one(tmp_path, monkeypatch, caplog):
    field = make_field(CPU, None)
    occupancy = half_empty(field)
    whole, few = (stored_bytes(field, occupancy, count) for count in (2, 1))
    assert few < whole / 2
    monkeypatch.setattr(web_page, "_MAX_MEMORY", whole - 1)
    write(tmp_path, field, occupancy)
    assert "the page has one vertex for each voxel instead of 2" in caplog.text
    (log_density, _), arrays = bake(field, occupancy, 1).unpacked(), stored_arrays(tmp_path)
    stored = [len(data) for name, data in arrays.items() if name.startswith("layer")]
    assert sum(stored) == 10 * log_density.numel()


def test_blocks_for_which_a_browser_has_no_room_stay_coarse(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    field = make_field(CPU, None)
    occupancy = half_empty(field)
    write(tmp_path, field, occupancy)
    whole = {name: len(data) for name, data in stored_arrays(tmp_path).items()}
    layers = [name for name in whole if name.startswith("layer")]
    monkeypatch.setattr(web_page, "_vertices_per_voxel", lambda *_: 2)
    monkeypatch.setattr(web_page, "_MAX_MEMORY", sum(whole.values()) - 1)
    write(tmp_path, field, occupancy)
    assert stored_arrays(tmp_path).keys() == whole.keys() - {layers[-1]}
    assert "of the blocks stay coarse, so that the page and its textures fit" in caplog.text


def test_the_command_starts_the_page_at_the_scenes_first_camera(tmp_path, caplog):
    caplog.set_level("INFO")
    config = settings("model.shading=deferred")
    field = config.model.build(torch.tensor(BOX), config.trainer.resolutions, "cpu")
    occupancy = OccupancyGrid(16, BOX).state_dict(prefix="occupancy.")
    save_model(
        tmp_path / "a.safetensors", restore_trained_model(config, field.state_dict(prefix="field.") | occupancy, 7, CPU)
    )
    assert main(["export", str(tmp_path / "a.safetensors"), "--web", str(tmp_path / "page"), "--device", "cpu"]) == 0
    assert caplog.messages[-1] == (
        f"wrote index.html to {tmp_path / 'page'} ({size_in_words(tmp_path / 'page')}, opens in a browser)"
    )
    text = (tmp_path / "page" / "index.html").read_text()
    scene = json.loads(text.partition('id="scene">')[2].partition("<")[0])
    first = voxelfield.load_scene("bricks").train.cameras.c2w[0, :3]
    assert np.allclose(scene["c2w"], first.T)
    assert scene["up"] == [0, 0, 1]
    assert scene["size"] == [200, 200]
    assert "<title>bricks</title>" in text
    assert "<h1>bricks</h1>" in text
    assert scene["around"]
    assert float(re.search(r"by (\d+\.\d) dB \(PSNR of 3 views\)", caplog.text)[1]) > 30


def test_a_page_of_a_given_name_has_all_of_its_data(tmp_path, monkeypatch):
    page = tmp_path / "new" / "harbour.html"
    write(page, make_field(CPU, None))
    assert [file.name for file in page.parent.iterdir()] == ["harbour.html"]
    whole = page.stat().st_size
    monkeypatch.setattr(web_page, "MAX_INLINE", whole // 2)
    write(page, make_field(CPU, None))
    assert [file.name for file in page.parent.iterdir()] == ["harbour.html"]
    assert page.stat().st_size < whole
    monkeypatch.setattr(web_page, "MAX_INLINE", 1000)
    with pytest.raises(ValueError, match=r"web_size must be at least .* MiB for .* a folder has room"):
        write(page, make_field(CPU, None))


def test_a_page_of_a_given_size_refines_the_blocks_that_cover_the_most_pixels(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(web_page, "_PAGE", 0)
    compared = []
    monkeypatch.setattr(web_page, "_compare", lambda model, shown, cameras: compared.append(shown))
    field = make_field(CPU, None)
    occupancy, page = half_empty(field), tmp_path / "index.html"
    model = Model(field, occupancy, SAMPLING)
    save_web_page(page, model, CAMERAS)
    whole = stored_arrays(tmp_path)
    sizes = {name: len(zlib.compress(data)) for name, data in whole.items()}
    few = sum(size for name, size in sizes.items() if not name.startswith("layer"))
    save_web_page(page, model, CAMERAS, web_size=4 / 3 * (few + sizes["layer0"] + 1) / 2**20)
    limited = stored_arrays(tmp_path)
    assert limited == {name: data for name, data in whole.items() if name == "layer0" or not name.startswith("layer")}
    assert re.search(r"\d+ % of the blocks stay coarse", caplog.text)
    bricks = bake(field, occupancy)
    places = torch.frombuffer(bytearray(limited["blocks"]), dtype=torch.int32).view(bricks.blocks.shape)
    exists = places >= 0
    low, edges = bricks.aabb[0], bricks.aabb.diff(dim=0)[0] / torch.tensor(places.shape)
    centres = low + (exists.nonzero() + 0.5) * edges
    pixels = views_of_points(CAMERAS, centres) / distance_to_nearest(CAMERAS, centres) ** 2
    refined = places[exists] >> 20 == 0
    assert pixels[refined].min() >= pixels[~refined].max()
    changes = compared[1].density(centres) / compared[0].density(centres) - 1
    assert torch.equal(changes == 0, refined)
    assert changes[~refined].abs().mean() > 0.02
    with pytest.raises(ValueError, match=r"web_size must be at least 0\.\d\d MiB for .*, got 0\.0001"):
        save_web_page(page, model, CAMERAS, web_size=0.0001)


def test_a_page_replaces_only_another_page(tmp_path):
    field, foreign = make_field(CPU, None), tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "index.html").write_text("My holidays")
    with pytest.raises(FileExistsError, match=r"index\.html was not written by voxelfield: choose another folder"):
        write(foreign, field)
    assert (foreign / "index.html").read_text() == "My holidays"
    write(tmp_path / "own", field)
    first = (tmp_path / "own" / "index.html").read_bytes()
    write(tmp_path / "own", field)
    assert (tmp_path / "own" / "index.html").read_bytes() != first


def test_fields_that_no_browser_can_draw_are_refused(tmp_path, monkeypatch):
    field, timed, nothing = make_field(CPU, None), per_sample(), OccupancyGrid(4, BOX)
    timed.extra_inputs = ("time",)
    nothing.occupied.zero_()
    for arguments, message in (
        ((field, None, CAMERAS[[]]), "cameras must be at least one, got none"),
        ((timed,), r"must depend on position and direction alone for a web page, .* needs time"),
        ((per_sample(), nothing), "must have occupied cells for a web page, got none"),
    ):
        with pytest.raises(ValueError, match=message):
            write(tmp_path, *arguments)
    monkeypatch.setattr(web_page, "_MAX_MEMORY", 2**10)
    with pytest.raises(ValueError, match=r"got \d+ coarse blocks of stored values in 0\.\d\d GiB and a side of \d+: "):
        write(tmp_path, field)
    with torch.no_grad():
        field.decoder.color_network[0][0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="weights of the field must be finite"):
        write(tmp_path, field)
    assert not list(tmp_path.iterdir())


browser = browser_fixture((400, 300))


def opened(browser: Browser, url: str) -> str:
    """Opens a page; returns its message once it has loaded."""
    browser.driver.get(url)
    loading = "return message.textContent === 'Loading\N{HORIZONTAL ELLIPSIS}' || bar.isConnected"
    eventually(lambda: not browser.driver.execute_script(loading), "the data")
    return browser.driver.execute_script("return message.textContent")


def drawn(browser: Browser, camera: int) -> torch.Tensor:
    width, height = CAMERAS.size(camera)
    url = browser.driver.execute_script(
        "draw(...arguments); return canvas.toDataURL()",
        *(CAMERAS.c2w[camera, :3].T.flatten().tolist(), CAMERAS.intrinsics[camera].tolist(), width, height),
    )
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")
    return torch.from_numpy(np.array(image)).float() / 255


@pytest.mark.long
@pytest.mark.parametrize(
    ("warp", "geometry", "environment"),
    [(None, 8, False), (None, 16, False), (NESTED, 8, False), (NESTED, 16, False), (None, 8, True)],
    ids=["one box", "one box, 16", "nested boxes", "nested boxes, 16", "environment"],
)
def test_a_browser_draws_the_images_of_the_backend(browser, tmp_path, warp, geometry, environment):
    field = make_field(CPU, warp, geometry)
    if environment:
        field.environment = Environment()
        with torch.no_grad():
            field.environment.maps[0].normal_()
            field.environment.maps[1].normal_(std=0.2)
    model = write(tmp_path, field)
    background = field.environment if environment else model.background
    renderer = FieldRenderer(field, model.occupancy, model.settings, background, backend="render_baked_image")
    address = (tmp_path / "index.html").as_uri()
    assert opened(browser, address) == ""
    for camera in range(2):
        view = renderer.view(CAMERAS, camera)
        assert 0.2 < view.opacity.mean() < 0.95, "the test shows nothing"
        error = drawn(browser, camera) - view.rgb.clamp(0, 1)
        # Values of vertices and colours are rounded to 8 bits. A sample on the border of a cell may also round to its
        # other side. Browsers interpolate colours of an environment between texels of 8 bits, not their logits.
        assert error.abs().quantile(0.99) < (3 if environment else 1.1) / 255
        assert environment or error.square().mean() < 10**-5
    assert browser.complaints() == []
    assert browser.requested() == {address}


@pytest.mark.long
def test_the_view_turns_until_touched_and_follows_mouse_and_keys(browser, tmp_path):
    write(tmp_path, make_field(CPU, None), cameras=CAMERAS[:1])  # whose y axis is up
    assert opened(browser, (tmp_path / "index.html").as_uri()) == ""

    def position() -> np.ndarray:
        return np.array(browser.driver.execute_script("return view.position"))

    started = position()
    eventually(lambda: not np.allclose(position(), started), "the slow turn")
    assert browser.driver.execute_script("return hint.style.opacity") == ""
    browser.press("r", 0.1)
    first = position()
    assert np.allclose(first, CAMERAS.c2w[0, :3, 3])
    assert browser.driver.execute_script("return hint.style.opacity") == "0"
    browser.drag((150, 100), (60, 0))
    turned = position()
    assert np.linalg.norm(turned) == pytest.approx(np.linalg.norm(first))
    assert np.linalg.norm(turned - first) > 0.3
    assert turned[1] == pytest.approx(first[1])
    browser.press("w", 0.5)
    assert np.linalg.norm(position() - turned) > 0.1
    browser.press("r", 0.1)
    assert np.allclose(position(), first)


@pytest.mark.long
@pytest.mark.parametrize("warp", [None, NESTED, forward_facing()], ids=["one box", "nested boxes", "ndc"])
def test_a_browser_draws_the_compared_values_of_a_field_with_colors_per_sample(browser, tmp_path, monkeypatch, warp):
    compared = {}
    monkeypatch.setattr(web_page, "_compare", lambda model, shown, cameras: compared.update(shown=shown))
    field = per_sample(warp)
    model = write(tmp_path, field)
    assert opened(browser, (tmp_path / "index.html").as_uri()) == ""
    for camera in range(2 if warp is None or warp is NESTED else 1):  # the other one looks past the window
        scene = (CAMERAS, camera, model.occupancy, model.settings, model.background, 1 << 14)
        truth, view = (render_view(each, *scene) for each in (field, compared["shown"]))
        assert 0.2 < view.opacity.mean() < 0.95, "the test shows nothing"
        error = drawn(browser, camera) - view.rgb.clamp(0, 1)
        assert error.square().mean() < 10**-5
        assert error.abs().quantile(0.99) < 0.6 / 255
        assert (truth.rgb - view.rgb).square().mean() < 10**-3
    assert browser.complaints() == []


@pytest.mark.long
def test_files_beside_a_page_need_a_server(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(web_page, "MAX_INLINE", 0)
    write(tmp_path, make_field(CPU, None))
    assert "run python -m http.server" in opened(browser, (tmp_path / "index.html").as_uri())
    with serving(tmp_path) as address:
        assert opened(browser, address) == ""
        assert float(drawn(browser, 0).std()) > 0.05
