"""The verbs that take a trained run, but ``render``: ``eval``, ``report``, ``view``, ``export`` and ``push``."""

from __future__ import annotations

import argparse
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import voxelfield
from voxelfield.config import Range
from voxelfield.datasets.scene import Split
from voxelfield.evaluation.evaluation import write_table
from voxelfield.evaluation.metrics import check_lpips
from voxelfield.export.registry import check_files, export, formats
from voxelfield.export.registry import options as options_of_formats
from voxelfield.files import write_json
from voxelfield.hub import push
from voxelfield.installed import MissingPackageError
from voxelfield.messages import clipped, reason_of
from voxelfield.progress import size_in_words
from voxelfield.report.page import write_report
from voxelfield.report.thumbnails import Thumbnails
from voxelfield.run_directory import METRICS, read_metrics, run_path
from voxelfield.trained.trained_model import TrainedModel
from voxelfield.viewer.address import Address
from voxelfield.viewer.page import Photographs, ViewerPage, photographs_of

logger = logging.getLogger(__name__)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds RUN and where its scene is."""
    run = "a run directory, a checkpoint, a model file or hf://REPO (default: latest, the last finished run of `runs`)"
    parser.add_argument("run", nargs="?", type=run_path, default="latest", metavar="RUN", help=run)
    parser.add_argument("--data-root", type=Path, help="folder of scenes (default: data.root of the run)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:<index> (default: auto)")
    parser.add_argument(
        "--missing-images", choices=("error", "skip"), help="how to handle missing images (default: as in the run)"
    )


def number(kind: type[int] | type[float], allowed: Range) -> Callable[[str], float]:
    """Returns an argument type: a number in a range."""

    def convert(text: str) -> float:
        value = kind(text)
        if not allowed.contains(value):
            raise argparse.ArgumentTypeError(f"must {allowed}, got {clipped(text)}")
        return value

    convert.__name__ = kind.__name__  # argparse names it for text that is no number
    return convert


def scene_options(options: argparse.Namespace) -> dict[str, Any]:
    """Returns how to load the scene of a run (:meth:`voxelfield.trained.trained_model.TrainedModel.load_scene`)."""
    return {"root": options.data_root, "missing_images": options.missing_images}


def load_run_and_split(options: argparse.Namespace, split: str, **changes: Any) -> tuple[TrainedModel, Split]:
    """Loads the run, and a split of its scene, with changed options unless they are None."""
    run = voxelfield.load(options.run, options.device)
    scene = run.load_scene((split,), **scene_options(options), **changes)
    if split not in scene.splits:
        raise ValueError(f"the split must be train for a scene of which no views are held out, got {split}")
    return run, scene.split(split)


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add_run_arguments(parser)
    add("--split", default="test", help="split to evaluate: train, val or test (default: test)")
    add("--downscale", type=int, help="shrink images by this factor (default: to the run's image size)")
    add("--holdout", type=int, metavar="N", help="hold out every N-th view (default: as in the run)")
    add("--views", type=number(int, Range(1)), help="number of views to evaluate, evenly spread (default: all)")
    add("--lpips", action=argparse.BooleanOptionalAction, help="also compute LPIPS (default: as in the run)")
    add("--backend", metavar="NAME", help="render_view, or the fastest of the field (default)")
    add("--images", type=Path, metavar="DIR", help="write the rendered views to this folder")
    add("--json", type=Path, metavar="FILE", help="write the metrics, also of each view, to this file")
    add("--csv", type=Path, metavar="FILE", help="write a table of the views to this file")


def run_eval(options: argparse.Namespace) -> None:
    """Compare a trained field with views of its scene: PSNR, SSIM, LPIPS."""
    if options.lpips:
        check_lpips()
    trained, split = load_run_and_split(options, options.split, downscale=options.downscale, holdout=options.holdout)
    evaluation = trained.evaluate(
        split, views=options.views, images=options.images, lpips=options.lpips, backend=options.backend
    )
    logger.info("%s over %d %s views of %s", evaluation, len(evaluation.names), options.split, split.size_in_words)
    drawn_by = trained.backend_for(split.cameras, options.backend)
    stored = drawn_by == trained.backend_for(split.cameras)
    cost = trained.baking_cost(split, evaluation) if stored else None
    if options.csv is not None:
        write_table(options.csv, evaluation)
    if options.json is not None:
        figures = evaluation.means() | {"split": options.split, "views": len(evaluation.names), "drawn_by": drawn_by}
        if cost is not None:
            figures["baking_cost"] = cost
        write_json(options.json, figures | {"per_view": evaluation.per_view()})


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_run_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: RUN/report.html)")


def run_report(options: argparse.Namespace) -> None:
    """Rewrite the report of a finished run: one HTML file with its metrics, curves, views, timing and settings.

    The views are rendered again; the metrics are read from metrics.json.
    """
    try:
        metrics = read_metrics(options.run)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"RUN must be the directory of a finished run, got {options.run}, which has no valid {METRICS}: "
            f"{reason_of(error)}"
        ) from error
    trained, split = load_run_and_split(options, metrics["split"])
    views = trained.trainer.evaluation.views
    thumbnails = Thumbnails(len(split) if views is None else min(views, len(split)))
    evaluation = trained.evaluate(split, views=views, lpips=False, on_view=thumbnails.add)
    thumbnails.enlarge(trained, split, evaluation)
    report = write_report(options.run, metrics, trained.config, thumbnails, path=options.out)
    logger.info("wrote %s (%s, opens in a browser)", report, size_in_words(report))


def add_view_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_run_arguments(parser)
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (default: 8080)")
    host = "address to listen on; 0.0.0.0 admits anyone who has the printed address with its token (default: 127.0.0.1)"
    parser.add_argument("--host", default="127.0.0.1", help=host)


def run_view(
    options: argparse.Namespace, wait: Callable[[ViewerPage], object] = lambda _: threading.Event().wait()
) -> None:
    """Explore a trained field in a browser. Ctrl-C stops the viewer."""
    address = Address(options.host, options.port)
    address.check()
    trained = voxelfield.load(options.run, options.device)
    page = ViewerPage(address, trained, options.run, _photographs(trained, options))
    address.log_urls()
    try:
        wait(page)
    finally:
        page.close()


def _photographs(run: TrainedModel, options: argparse.Namespace) -> Photographs:
    """Returns the photographs of the scene; if its files are not there, warns and returns none."""
    try:
        scene = run.load_scene(**scene_options(options))
    except (OSError, ValueError, MissingPackageError) as error:
        logger.warning("the scene's cameras and photographs are not shown: %s", error)
        return {}
    return photographs_of(scene, ("train", "val", "test"), run.cameras)


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add_run_arguments(parser)
    files = parser.add_argument_group("formats")
    for name, each in formats().items():
        metavar = "FILE" if each.suffixes else "FOLDER"
        # argparse shows %% as %, here and below.
        files.add_argument(f"--{name}", type=Path, metavar=metavar, help=each.help.replace("%", "%%"))
    group = parser.add_argument_group("options of formats")
    for users in options_of_formats().values():
        option, texts = next(iter(users.values())), dict[str, list[str]]()
        for user, its in users.items():
            texts.setdefault(its.help, []).append(f"--{user}")
        if option.kind is bool:
            settings: dict[str, Any] = {"action": "store_true"}
        elif get_origin(option.kind) is Literal:
            settings = {"choices": get_args(option.kind)}
        else:
            kind, *limits = get_args(option.kind) or (option.kind,)
            settings = {"type": number(kind, limits[0]) if limits else kind, "metavar": option.metavar}
        text = "; ".join(f"{', '.join(flags)}: {text}" for text, flags in texts.items())
        group.add_argument(option.flag, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **settings)


def run_export(options: argparse.Namespace) -> None:
    """Write a trained field as a mesh, points, splats, a web page or a volume, its environment and its scene's cameras.

    At least one of the formats is needed. Files have the units and axes of the poses, but a GLB has y up.
    """
    values = vars(options)
    files = {name: values[name] for name in formats() if values[name] is not None}
    chosen = {name: value for name, value in values.items() if name in options_of_formats()}
    check_files(files, chosen)  # before the run is loaded
    trained = voxelfield.load(options.run, options.device)
    export(trained, files, **scene_options(options), **chosen)


def add_push_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add("run", type=run_path, metavar="RUN", help="directory of a finished run, or latest")
    add("repository", metavar="REPO", help="USER/NAME, which is created if needed")
    add("--licence", metavar="ID", help="licence that the model card states, such as cc-by-4.0 (default: none)")
    add("--private", action="store_true", default=None, help="make a new repository private")


def run_push(options: argparse.Namespace) -> None:
    """Upload the model file of a finished run to the Hugging Face Hub, with a model card and a picture.

    Others load it as hf://REPO. The account is that of `hf auth login`, or of the variable HF_TOKEN.
    """
    page = push(options.run, options.repository, licence=options.licence, private=options.private)
    logger.info("uploaded to %s: voxelfield.load(%r) reads it", page, f"hf://{options.repository}")
