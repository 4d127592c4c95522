"""One of two processes that evaluate together: ``python two_evaluators.py RANK STORE FOLDER``.

``FOLDER/run`` is a trained run of the scene in tests/fixtures. Each process writes what it finds to ``FOLDER/<RANK>``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import voxelfield
from voxelfield.evaluation.evaluation import Evaluation
from voxelfield.runs.results import Timing, finish
from voxelfield.settings import RunConfig, parse
from voxelfield.trained.checkpoint_file import load_checkpoint
from voxelfield.trained.trained_model import TrainedModel
from voxelfield.training.session import Session

FIXTURES = Path(__file__).parent / "fixtures"


def evaluate(run: TrainedModel, folder: Path) -> Evaluation:
    """Evaluates three views of four, which two processes cannot share evenly."""
    scene = voxelfield.load_scene("lego", image_size=25, root=FIXTURES)
    return run.evaluate(scene.test, views=3, images=folder, progress=False)


def finish_run(run: Path, folder: Path) -> dict[str, Any]:
    """Writes the results of a run to another folder; returns the metrics."""
    checkpoint = load_checkpoint(run)
    settings = parse(RunConfig, checkpoint["config"])
    session = Session(voxelfield.load_scene("lego", image_size=25, root=FIXTURES), settings)
    session.restore(checkpoint)
    return finish(session, settings, folder, Timing())


def main(rank: int, store: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    run = voxelfield.load(folder / "run", "cpu")
    found = {"evaluation": evaluate(run, folder / "views").per_view()}
    found["metrics"] = finish_run(folder / "run", folder / "results")["psnr_per_view"]
    if rank == 1:
        next(run.field.parameters()).fill_(torch.nan)
    try:
        run.evaluate(voxelfield.load_scene("lego", image_size=25, root=FIXTURES).test, progress=False)
    except FloatingPointError as error:
        found["nan"] = str(error)
    (folder / str(rank)).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
