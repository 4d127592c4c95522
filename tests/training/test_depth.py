"""Supervision by depths: its loss, against sums written out in float64, and what a field learns from it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from camera_poses import random_rotations
from place_capture import write_capture
from quick_presets import preset
from room_corner import ROOM, corner_cameras, photograph
from small_sessions import fitted
from warp_fields import field_over

import voxelfield
from voxelfield.components.depth import depth_error
from voxelfield.components.refinement import CameraRefinement
from voxelfield.datasets.scene import Scene
from voxelfield.models.batch import Batch, Outputs
from voxelfield.models.pixel_sampler import PixelSampler
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import Capacity, RenderSettings
from voxelfield.rendering.rigid import pose_matrices
from voxelfield.runs.train import load_configured_scene
from voxelfield.training.session import Session
from voxelfield.warps.choice import WarpConfig
from voxelfield.warps.nested_boxes import NestedBoxes

BOX = ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))


@pytest.mark.parametrize("boxes", [1, 4], ids=["box", "nested boxes"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_error_is_that_of_samples_on_oblique_rays(device, boxes, weighted):
    field, occupancy = field_over(NestedBoxes(BOX, boxes, near=0.1), (8, 8, 8), device)
    c2w = pose_matrices(random_rotations(3), torch.zeros(3, 3))
    cameras = Cameras(c2w, torch.tensor([[4.0, 4.0, 4.0, 4.0]] * 3), 8, 8).to(device)  # 90 degrees wide
    pixels, side = torch.arange(3 * 64, device=device), 2
    points = torch.rand(len(pixels) * side, 2, device=device)
    points += torch.stack((pixels % 8, pixels // 8 % 8), dim=1).repeat_interleave(side, dim=0)
    images = pixels // 64
    rays = cameras.rays(images.repeat_interleave(side), points, field.aabb)
    settings = RenderSettings(0.05, min_weight=0.0)
    rendering = voxelfield.render(field, rays, occupancy, settings, capacity=Capacity(20000, 2500))
    kept = int(rendering.rays_kept)
    assert 50 < kept < len(rays), "some must not fit, or the test is too weak"
    depth = torch.rand(len(pixels), device=device) * 2
    depth[::3] = 0
    weights = torch.rand(len(pixels), device=device).half() if weighted else None
    batch = Batch(
        rays,
        torch.ones(len(pixels), 4, device=device),
        pixels,
        torch.zeros(len(pixels), 3, device=device),
        look_up=lambda name, numbers: {"depth": depth}[name][numbers],
        images_of=lambda numbers: numbers // 64,
    )
    outputs = Outputs(rendering, rendering.rgb, rendering.rgb, rendering.rgb, None)
    error = depth_error(outputs, batch, cameras, field.warp, weights)

    samples = rendering.samples
    offsets = samples.ray_offsets.tolist()
    known = samples.positions[: offsets[-1]]
    world = known.double() if boxes == 1 else field.warp.to_world(known)[0].double()
    gradient = torch.zeros(len(rendering.weights), dtype=torch.float64)
    for ray in range(kept):
        pixel = ray // side
        for sample in range(offsets[ray], offsets[ray + 1]) if depth[pixel] > 0 else ():
            away = world[sample] - rays.origins[ray]
            z = -float(away @ c2w[images[pixel], :3, 2].double().to(device))
            off = abs(float(torch.log(torch.tensor(z / float(depth[pixel])))))
            gradient[sample] = (off - 1) * (1 if weights is None else float(weights[pixel])) / kept
    hit = (depth > 0).repeat_interleave(side)[:kept]
    through = hit if weights is None else hit * weights.repeat_interleave(side)[:kept]
    expected = float((gradient * rendering.weights.detach().double().cpu()).sum() + through.double().sum() / kept)
    assert float(error.detach()) == pytest.approx(expected, rel=1e-4)
    # The opacity is the sum of the weights.
    found, lost = torch.autograd.grad(error, (rendering.weights, rendering.opacity))
    found = found + torch.where(samples.ray_index < kept, lost[samples.ray_index.clamp(max=len(rays) - 1)], 0.0)
    torch.testing.assert_close(found.double().cpu(), gradient, rtol=1e-3, atol=1e-7)


# --- pixels with a depth are drawn often enough


@pytest.mark.parametrize("masked", [False, True])
def test_favoured_pixels_are_drawn_with_their_probability(device, masked):
    scene = corner(6)
    split = scene.train
    which = torch.zeros(split.images.shape[:3], dtype=torch.bool)
    which[:, ::5, ::7] = True
    split = replace(split, masks=torch.rand(which.shape) < 0.5) if masked else split
    sampler = PixelSampler(split, device)
    sampler.favour(which, 0.3)
    drawn = sampler.batch(20_000, ROOM.to(device), "white").pixels.cpu()
    counts = torch.bincount(drawn, minlength=which.numel()).view(which.shape).double()
    if masked:
        assert not counts[~split.masks].any()
        which &= split.masks
    others = which.sum() / (which.numel() if not masked else split.masks.sum())
    assert float(counts[which].sum()) / 20_000 == pytest.approx(0.3 + 0.7 * float(others), abs=0.02)
    # Each of them equally often: about 20 to 60 times, and Poisson's standard deviation is the root of that.
    mean = counts[which].mean()
    assert (counts[which] - mean).abs().max() < 5.5 * mean.sqrt()


# --- training


def corner(count: int, width: int = 32, height: int = 24) -> Scene:
    """Photographs of a corner of a room with their depths."""
    cameras = corner_cameras(count, width * 4, height * 4).shrunk(4)
    images = torch.stack([torch.from_numpy(np.array(image)) for image in photograph(cameras)])
    depths = []
    for index in range(count):
        rays = cameras.image_rays(index, ROOM)
        distance = torch.where(rays.directions < 0, -rays.origins / rays.directions, torch.inf).amin(dim=-1)
        depths.append((-distance * (rays.directions @ cameras.c2w[index, :3, 2])).view(height, width))
    extras = {"depth": torch.stack(depths)}
    return voxelfield.scene_from_arrays(images, cameras, extras=extras, test=[count // 2], aabb=ROOM - 0.2)


def trained(scene: Scene, weight: float, *overrides: str, warp_boxes: int = 1) -> Session:
    run = preset(
        "model=dense",
        "trainer=smoke",
        "trainer.steps=120",
        "trainer.visible_samples=8192",
        "trainer.preview_every=0",
        f"trainer.loss.depth={weight}",
        *overrides,
        device="cpu",
    )
    warp = WarpConfig(boxes=warp_boxes)
    return fitted(Session(scene, run.model, trainer=run.trainer, camera=run.camera, warp=warp, device="cpu"))


def depth_difference(session: Session, scene: Scene) -> float:
    """Mean relative error of the depth of the test view."""
    cameras = scene.test.cameras
    distance = session.renderer().view(cameras, 0).depth.flatten()
    depth = -distance * (cameras.image_rays(0, ROOM).directions @ cameras.c2w[0, :3, 2])
    true = scene.test.extras["depth"].flatten()
    return float((depth / true - 1).abs().mean())


def with_depth(scene: Scene, **extras: torch.Tensor) -> Scene:
    return replace(scene, splits=scene.splits | {"train": replace(scene.train, extras=extras)})


@pytest.mark.slow
def test_few_depths_tell_a_field_where_walls_are(one_thread):
    scene = corner(5)
    depth = scene.train.extras["depth"]
    known = torch.rand(depth.shape) < 0.03
    # Some are wrong, as those of bad matches are, but known to be unreliable.
    wrong = known & (torch.rand(depth.shape) < 0.2)
    sparse = with_depth(
        scene,
        depth=torch.where(wrong, 0.5 * depth, depth) * known,
        depth_weight=torch.where(wrong, 1e-3, 1.0).half(),
    )
    without, with_depths = (trained(sparse, weight) for weight in (0.0, 0.1))
    assert depth_difference(with_depths, scene) < 0.75 * depth_difference(without, scene)  # 0.46 to 0.66 by seed
    assert with_depths.evaluate().psnr > without.evaluate().psnr + 1


def test_depths_belong_to_the_axes_of_refined_cameras(one_thread):
    scene = corner(3)
    session = trained(scene, 0.1, "camera=refine", "trainer.steps=2")
    refinement = session.component(CameraRefinement)
    (part,) = (component for component in session.components if component.name == "depth")
    with torch.no_grad():
        refinement.twists[:, :3] = 0.3
    batch, model = session._state.training_step.batch, session.model
    rendering = model.render(batch.rays, model.settings)
    outputs = Outputs(rendering, rendering.rgb, rendering.rgb, batch.truth, None)
    refined, given = (depth_error(outputs, batch, each) for each in (refinement.refined(), scene.train.cameras))
    (term,) = part.losses(outputs, batch).values()
    torch.testing.assert_close(term, 0.1 * refined)
    assert not torch.isclose(refined, given, rtol=1e-3)


def test_poses_in_a_warp_stay_finite_where_some_pixels_have_no_depth(one_thread):
    scene = corner(3)
    depth = scene.train.extras["depth"].clone()
    depth[:, ::2] = 0
    session = trained(with_depth(scene, depth=depth), 0.1, "camera=refine", "trainer.steps=3", warp_boxes=3)
    assert isinstance(session.model.warp, NestedBoxes)
    twists = session.component(CameraRefinement).twists
    assert twists.isfinite().all()
    assert twists.any()


def test_images_without_depths_are_refused():
    scene = with_depth(corner(3))
    with pytest.raises(
        ValueError, match=r"^trainer\.loss\.depth must be 0 for training images without depths, got 0\.1"
    ):
        trained(scene, 0.1)
    nothing = with_depth(scene, depth=torch.zeros(scene.train.images.shape[:3]))
    with pytest.raises(ValueError, match=r"trainer\.loss\.depth must be 0 for .* all unknown or masked, got 0\.1"):
        trained(nothing, 0.1)
    with pytest.raises(ValueError, match=r"extras\['depth'\] must have shape \(N, 24, 32\), .* got \(2, 24, 32, 1\)"):
        trained(with_depth(scene, depth=torch.ones(2, 24, 32, 1)), 0.1)


def test_a_run_reads_depths_if_its_loss_needs_them(tmp_path):
    write_capture(tmp_path / "place", 4)
    file = tmp_path / "place" / "transforms.json"
    content = json.loads(file.read_text())
    content["depth_unit_scale_factor"] = 1
    for frame in content["frames"]:
        frame["depth_file_path"] = "depth.npy"
    file.write_text(json.dumps(content))
    np.save(tmp_path / "place" / "depth.npy", np.full((12, 16), 2.5, dtype=np.float32))
    for weight in (0.0, 0.1):
        settings = preset(
            "scene.name=place", "scene.aabb=null", f"trainer.loss.depth={weight}", f"data.root={tmp_path}"
        )
        extras = load_configured_scene(settings, tmp_path).train.extras
        assert list(extras) == (["depth"] if weight > 0 else [])
    assert (extras["depth"] == 2.5).all()
