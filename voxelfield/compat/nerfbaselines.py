"""voxelfield as a method of nerfbaselines, which trains and evaluates methods by one protocol.

With ``pip install "voxelfield[nerfbaselines]"``, ``nerfbaselines train --method voxelfield`` finds it. Written for
nerfbaselines 1.2 (https://github.com/nerfbaselines/nerfbaselines).
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import voxelfield
from voxelfield.datasets.arrays import scene_from_arrays
from voxelfield.datasets.lenses import CAMERA_MODELS, photo_lens
from voxelfield.datasets.scene import Scene
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.lens import join_lenses
from voxelfield.rendering.pixels import to_uint8
from voxelfield.settings import RunConfig, compose, parse
from voxelfield.settings.resolve import AutoTrainer
from voxelfield.trained.checkpoint_file import load_checkpoint, resolve_checkpoint
from voxelfield.trained.trained_model import TrainedModel
from voxelfield.training.session import Session
from voxelfield.warps.warp import Warp

# nerfbaselines' camera models in the order of their numbers, which COLMAP has in capitals, and their coefficients.
_MODELS = ("pinhole", "opencv", "opencv_fisheye", "full_opencv")
_TERMS = ("k1", "k2", "p1", "p2", "k3", "k4", "k5", "k6")


class VoxelfieldMethod:
    """Trains and renders a field; implements ``nerfbaselines.Method``.

    Args:
        checkpoint: Folder that :meth:`save` wrote, to render from or, with a dataset, to continue from.
        train_dataset: Images and cameras to train on.
        config_overrides: Settings as on the command line of ``train.py``, such as ``{"trainer.steps": 3000}``. A run
            that continues has the settings of its checkpoint.

    Raises:
        ValueError: There is neither a checkpoint nor a dataset, or a setting or the data are invalid.
    """

    def __init__(
        self,
        *,
        checkpoint: str | None = None,
        train_dataset: Mapping[str, Any] | None = None,
        config_overrides: Mapping[str, Any] | None = None,
    ) -> None:
        if checkpoint is None and train_dataset is None:
            raise ValueError("train_dataset must be given if there is no checkpoint, got None")
        self._checkpoint, self._overrides = checkpoint, dict(config_overrides or {})
        self._session: Session | None = None
        self._model: TrainedModel | None = None if checkpoint is None else voxelfield.load(checkpoint)
        self._loaded_step = None if self._model is None else self._model.steps
        if train_dataset is not None:
            scene, background = _scene(train_dataset), train_dataset["metadata"].get("background_color")
            if self._model is None:
                config, warp = _config(scene, self._overrides, background)
            else:
                config, warp = self._model.config, self._model.config.recorded_warp
            self._folder = tempfile.TemporaryDirectory(prefix="voxelfield")
            self._session = Session(scene, config, warp=warp, output=self._folder.name)
            if checkpoint is not None:
                self._session.restore(load_checkpoint(Path(checkpoint)))
            self._model = None

    @classmethod
    def get_method_info(cls) -> dict[str, Any]:
        """Returns which data the method needs and what it renders."""
        return {
            "method_id": "voxelfield",
            "required_features": frozenset(("color", "points3D_xyz")),
            "supported_camera_models": frozenset(_MODELS),
            "supported_outputs": ("color", "accumulation", "depth"),
            "can_resume_training": True,
        }

    def get_info(self) -> dict[str, Any]:
        """Returns the settings of this run, and the step from which it continues."""
        return self.get_method_info() | {
            "num_iterations": self._current().config.trainer.steps,
            "loaded_step": self._loaded_step,
            "loaded_checkpoint": self._checkpoint,
            "hparams": self._overrides,
        }

    def train_iteration(self, step: int) -> dict[str, float]:
        """Takes one training step, and returns the number of its rays; does not wait for the device."""
        if self._session is None:
            raise RuntimeError("train_dataset must be given to train, got None")
        self._model = None
        return {"num_rays": float(len(self._session.train_step().rays))}

    def render(self, camera: Any, *, options: Mapping[str, Any] | None = None) -> dict[str, NDArray[Any]]:
        """Renders one ``nerfbaselines.Cameras``.

        Returns:
            ``color`` (H, W, 3), ``accumulation`` and ``depth`` (H, W) float32. Colours are rounded to uint8, because
            nerfbaselines truncates; ``options["output_type_dtypes"]["color"] = "float32"`` returns them in [0, 1].
        """
        view = self._current().render(_cameras(camera))
        color = view.rgb.clamp(0, 1)
        if ((options or {}).get("output_type_dtypes") or {}).get("color", "uint8") == "uint8":
            color = to_uint8(color)
        images = {"color": color, "accumulation": view.opacity, "depth": view.depth}
        return {name: image.cpu().numpy() for name, image in images.items()}

    def save(self, path: str) -> None:
        """Writes a checkpoint into a folder, which is created if needed."""
        source = resolve_checkpoint(Path(self._checkpoint or "")) if self._session is None else self._session.save()
        Path(path).mkdir(parents=True, exist_ok=True)
        shutil.copy(str(source), path)

    def get_train_embedding(self, index: int) -> None:
        """Returns None: images have no embeddings."""

    def optimize_embedding(self, dataset: Any, *, embedding: Any = None) -> Any:
        """Raises NotImplementedError: images have no embeddings."""
        raise NotImplementedError("voxelfield has no embeddings of images")

    def _current(self) -> TrainedModel:
        if self._model is None and self._session is not None:
            self._model = self._session.result()
        assert self._model is not None
        return self._model


def _config(scene: Scene, overrides: dict[str, Any], background: NDArray[Any] | None) -> tuple[RunConfig, Warp | None]:
    """Composes settings, and chooses the warp. Behind transparent pixels is the dataset's background, or black."""
    white = background is not None and background[0] > 127
    values = {"trainer.evaluation_background": "white" if white else "black"} | overrides
    texts = [f"{key}={value}" for key, value in values.items()]
    composed = compose(*texts)
    config = parse(RunConfig, composed)
    warp = config.model.choose_warp(scene, config.warp)
    if "trainer" in overrides or not torch.cuda.is_available():
        return config, warp
    return AutoTrainer(composed, texts, config.model.kind).choose(config, scene, warp), warp


def _scene(dataset: Mapping[str, Any]) -> Scene:
    """Converts a dataset; images of different sizes are padded to the largest."""
    points, masks = dataset.get("points3D_xyz"), dataset.get("masks")
    return scene_from_arrays(
        torch.from_numpy(_padded(dataset["images"])),
        _cameras(dataset["cameras"]),
        masks=None if masks is None else torch.from_numpy(_padded(masks) > 0),
        points=None if points is None else torch.from_numpy(np.asarray(points, np.float32)),
        names=dataset["image_paths"],
        holdout=0,
        name=str(dataset["metadata"].get("scene") or "nerfbaselines"),
    )


def _padded(images: Sequence[NDArray[Any]]) -> NDArray[Any]:
    height, width = np.max([image.shape[:2] for image in images], axis=0)
    margins = [((0, height - image.shape[0]), (0, width - image.shape[1])) for image in images]
    return np.stack([np.pad(x, (*margin, *[(0, 0)] * (x.ndim - 2))) for x, margin in zip(images, margins, strict=True)])


def _cameras(cameras: Any) -> Cameras:
    """Converts one or several cameras: OpenCV's axes to OpenGL's, and the parameters of the lenses."""
    models = [CAMERA_MODELS[_MODELS[number].upper()] for number in np.reshape(cameras.camera_models, -1).tolist()]
    poses = np.tile(np.eye(4, dtype=np.float32), (len(models), 1, 1))
    poses[:, :3] = cameras.poses.reshape(-1, 3, 4) * np.array([1, -1, -1, 1])
    sizes = torch.from_numpy(np.asarray(cameras.image_sizes, np.int64).reshape(-1, 2))
    given = np.asarray(cameras.distortion_parameters, np.float32).reshape(len(models), -1).tolist()
    lenses = []
    for (model, terms), parameters in zip(models, given, strict=True):
        values = dict(zip(_TERMS, parameters, strict=False))
        lenses.append(photo_lens("cameras", model, {term: values[term] for term in terms}))
    intrinsics = torch.from_numpy(np.asarray(cameras.intrinsics, np.float32).reshape(-1, 4))
    return Cameras.of_sizes(torch.from_numpy(poses), intrinsics, sizes, join_lenses(lenses))


with contextlib.suppress(ModuleNotFoundError):
    from nerfbaselines import register

    register({"id": "voxelfield", "method_class": "voxelfield.compat.nerfbaselines:VoxelfieldMethod", "metadata": {}})
