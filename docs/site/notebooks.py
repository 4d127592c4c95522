"""Hook of mkdocs: the notebooks as pages, with the outputs that are stored in them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds a page for each notebook."""
    from mkdocs.structure.files import File

    for path in sorted((Path(config.docs_dir) / "notebooks").glob("*.ipynb")):
        content = as_markdown(json.loads(path.read_text(encoding="utf-8")))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=content))


def as_markdown(notebook: Mapping[str, Any]) -> str:
    """Returns a notebook as Markdown; pictures are part of the text."""
    return "\n\n".join(part for cell in notebook["cells"] for part in _cell(cell))


def _cell(cell: Mapping[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    yield source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```"
    for output in cell.get("outputs", ()):
        data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
        if "image/png" in data:
            yield f"![What the cell displays](data:image/png;base64,{''.join(data['image/png'].split())})"
        elif "text/html" in data:
            yield data["text/html"]
        else:
            yield f"```text\n{(data.get('text/plain') or ''.join(output['text'])).rstrip()}\n```"
