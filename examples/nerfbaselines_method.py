"""Training step by step in nerfbaselines' terms, on the bundled scene.

    pip install "voxelfield[nerfbaselines]"
    python examples/nerfbaselines_method.py            # CUDA if there is a GPU, else the CPU

`nerfbaselines train --method voxelfield --data DATA --backend python` does the same for any of its datasets.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import numpy as np
from nerfbaselines import new_cameras, new_dataset

from voxelfield import Scene, load_scene
from voxelfield.compat.nerfbaselines import VoxelfieldMethod


def dataset_of(scene: Scene, split: str) -> dict[str, Any]:
    """Returns a split as a dataset of nerfbaselines, whose cameras have OpenCV's axes."""
    views = scene.split(split)
    cameras, count = views.cameras, len(views)
    poses = cameras.c2w[:, :3].numpy() * np.array([1, -1, -1, 1], np.float32)
    dataset = new_dataset(
        cameras=new_cameras(
            poses=poses,
            intrinsics=cameras.intrinsics.numpy(),
            camera_models=np.zeros(count, np.int32),
            image_sizes=np.tile(np.array([[cameras.width, cameras.height]]), (count, 1)),
        ),
        images=[views.image(index).numpy() for index in range(count)],
        image_paths=[f"/{split}/{name}.png" for name in views.names],
        metadata={"scene": scene.name, "color_space": "srgb", "background_color": np.full(3, 255, np.uint8)},
    )
    return dict(dataset)


def main(arguments: list[str] | None = None) -> float:
    """Trains, saves and loads; returns the PSNR of one test view in decibels."""
    parser = argparse.ArgumentParser(description="Train through nerfbaselines' protocol.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--image-size", type=int, default=100)
    options = parser.parse_args(arguments)

    scene = load_scene("bricks", image_size=options.image_size)
    settings = {"model": "dense", "trainer": "smoke", "trainer.steps": options.steps}
    method = VoxelfieldMethod(train_dataset=dataset_of(scene, "train"), config_overrides=settings)
    for step in range(method.get_info()["num_iterations"]):
        method.train_iteration(step)

    test = dataset_of(scene, "test")
    with tempfile.TemporaryDirectory() as folder:
        method.save(folder)
        loaded = VoxelfieldMethod(checkpoint=folder)
    image = loaded.render(test["cameras"][0])["color"]
    rgba = test["images"][0] / 255.0
    truth = rgba[..., :3] * rgba[..., 3:] + 1 - rgba[..., 3:]
    psnr = float(-10 * np.log10(np.mean((image / 255.0 - truth) ** 2)))
    print(f"step {loaded.get_info()['loaded_step']}: PSNR {psnr:.2f} dB")
    return psnr


if __name__ == "__main__":
    main()
