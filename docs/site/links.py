"""Hook of mkdocs: pages that lie outside of docs/, and links as the repository has them.

Each page exists once, where a reader of the repository looks for it. In the site, links between pages lead to pages,
and links to files that are no pages, such as sources, become plain text. A link to a file that does not exist is an
error.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from xml.etree.ElementTree import Element

from markdown import Markdown
from markdown.extensions import Extension
from markdown.treeprocessors import Treeprocessor
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "data/README.md": "scenes.md",
}
"""Pages outside of docs/: their path in the repository, and the one in the site."""

_HOMES = {there: here for here, there in PAGES.items()}


class RepositoryLinks(Extension):
    """Markdown whose links are those of the repository.

    Attributes:
        page: Path in the site of the page that is being converted.
    """

    page = ""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Registers the treatment of links, ahead of that of mkdocs."""
        md.treeprocessors.register(_Links(md, self), "repository_links", 5)


class _Links(Treeprocessor):
    def __init__(self, md: Markdown, owner: RepositoryLinks) -> None:
        super().__init__(md)
        self._owner = owner

    def run(self, root: Element) -> None:
        for element in root.iter():
            for name in {"a": ["href"], "img": ["src"]}.get(element.tag, []):
                target = in_site(element.get(name, ""), self._owner.page)
                if target is not None:
                    element.set(name, target)
                else:
                    element.tag = "span"
                    element.attrib.clear()


def in_site(link: str, page: str) -> str | None:
    """Returns where a link leads in the site, or None if it leads to a file that is no page there.

    Args:
        link: As the page has it.
        page: Path of the page in the site.

    Raises:
        PluginError: There is no such file.
    """
    parts = urlsplit(link)
    if parts.scheme or parts.netloc or not parts.path:
        return link
    home = _HOMES.get(page, f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(home), parts.path))
    if not (ROOT / path).exists():
        raise PluginError(f"{home} links to {link}, but there is no {path}")
    there = PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
    if there is None or (ROOT / path).is_dir():
        return None
    there = re.sub(r"\.ipynb$", ".md", there)  # notebooks.py makes pages of notebooks
    relative = posixpath.relpath(there, posixpath.dirname(page) or ".")
    return relative if not parts.fragment else f"{relative}#{parts.fragment}"


_links = RepositoryLinks()


def on_config(config: MkDocsConfig) -> None:
    """Adds the treatment of links to the site's Markdown."""
    config.markdown_extensions.append(_links)  # type: ignore[arg-type]  # Markdown takes instances as well as names


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages outside of docs/."""
    for path, there in PAGES.items():
        files.append(File.generated(config, there, abs_src_path=str(ROOT / path)))


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Notes which page comes next."""
    _links.page = page.file.src_uri
