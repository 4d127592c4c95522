"""Trained fields on the Hugging Face Hub: their upload with a model card, and their download."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from voxelfield.installed import VERSION, import_optional
from voxelfield.messages import error_in_words
from voxelfield.run_directory import METRICS, MODEL_FILE, read_metrics

# Of a repository, also as a path, which has one slash; and of a revision.
_ADDRESS = re.compile(r"hf:/+([^@]+)(?:@(.+))?")

_PICTURE = "view.png"
_TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"


def fetch(path: Path | str) -> Path:
    """Returns the path of the model file that an address names, downloaded to the Hub's cache; other paths as they are.

    Args:
        path: ``hf://USER/NAME``, with ``@REVISION`` for a branch, a tag or a commit; or a path.

    Raises:
        FileNotFoundError: The repository or its model file does not exist, or may not be read.
        ValueError: The address is not valid.
        OSError: The Hub cannot be reached, and the file is not in the cache.
        MissingPackageError: huggingface_hub is not installed.
    """
    found = _ADDRESS.fullmatch(Path(path).as_posix())
    if found is None:
        return Path(path)
    with _hub(found[1]) as hub:
        return Path(hub.hf_hub_download(found[1], MODEL_FILE, revision=found[2]))


def push(run: Path, repository: str, *, licence: str | None = None, private: bool | None = None) -> str:
    """Uploads the model file of a finished run with a model card and a picture, which replace earlier ones.

    Args:
        run: Directory of the run.
        repository: ``USER/NAME``; created if needed.
        licence: Identifier of the licence, such as ``cc-by-4.0``; None if none is stated.
        private: Whether a new repository is private; None for the default of the account.

    Returns:
        The address of the repository's page.

    Raises:
        ValueError: The run is not finished or has no model file, or the name of the repository is not valid.
        FileNotFoundError: The repository does not exist and may not be created.
        OSError: The Hub cannot be reached, or refuses the upload.
        MissingPackageError: huggingface_hub is not installed.
    """
    try:
        metrics = read_metrics(run)
    except OSError as error:
        raise ValueError(f"RUN must be the directory of a finished run, got {run}, which has no {METRICS}") from error
    if not (run / MODEL_FILE).is_file():
        raise ValueError(f"RUN must have a {MODEL_FILE}, got {run}: trainer.model_file=standard writes one")
    scene, pictures = metrics["scene"], sorted((run / metrics["split"]).rglob("*.png"))
    with _hub(repository) as hub:
        scores = {name: float(metrics[name]) for name in ("psnr", "ssim", "lpips") if name in metrics}
        stated = hub.ModelCardData(
            license=licence,
            library_name="voxelfield",
            tags=["voxelfield", "nerf", "radiance-field", "novel-view-synthesis"],
            model_name=scene,
            eval_results=[hub.EvalResult("novel-view-synthesis", scene, scene, *score) for score in scores.items()],
        )
        shown = {"metrics": metrics, "repository": repository, "licence": licence, "picture": pictures and _PICTURE}
        card = hub.ModelCard.from_template(stated, template_path=str(_TEMPLATE), **shown)
        contents = {"README.md": str(card).encode(), MODEL_FILE: run / MODEL_FILE}
        if pictures:
            contents[_PICTURE] = pictures[0]
        added = [hub.CommitOperationAdd(name, content) for name, content in contents.items()]
        api = hub.HfApi(library_name="voxelfield", library_version=VERSION)
        page = api.create_repo(repository, private=private, exist_ok=True)
        api.create_commit(repository, added, commit_message=f"{scene}, trained for {metrics['steps']} steps")
        return str(page)


@contextlib.contextmanager
def _hub(repository: str) -> Iterator[Any]:
    """Yields the library, and raises what fails in the block in one line that begins with the address."""
    address = f"hf://{repository}"
    hub = import_optional("huggingface_hub", f"use {address}", "hub")
    errors = import_optional("huggingface_hub.errors", f"use {address}", "hub")
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.WARNING)  # each request would be a line on the terminal
    try:
        yield hub
    except errors.RepositoryNotFoundError as error:
        reason = "this one does not exist, or your account may not use it: run `hf auth login`, or set HF_TOKEN"
        raise FileNotFoundError(f"{address} must be a repository of the Hugging Face Hub; {reason}") from error
    except errors.EntryNotFoundError as error:
        if isinstance(error, FileNotFoundError):  # in the cache, and the Hub cannot be reached
            raise OSError(f"{address} cannot be reached, and is not in the cache of this machine") from error
        raise FileNotFoundError(f"{address} must have a {MODEL_FILE}, as `voxelfield push` uploads it") from error
    except Exception as error:  # also of the libraries on which it builds
        kind = ValueError if isinstance(error, ValueError) else OSError
        raise kind(f"{address}: {error_in_words(error)}") from error
