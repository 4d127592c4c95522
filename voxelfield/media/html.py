"""HTML pages that need no other file."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template


def page_template(package: str, name: str) -> Template:
    """Returns a template in the folder ``templates`` of a package, in which all text is escaped.

    Its filter ``data_uri`` embeds a file of a type, such as ``image/png``.
    """
    # Imported here, because it takes long and few programs write pages.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(package), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["data_uri"] = lambda file, kind: f"data:{kind};base64,{base64.b64encode(file).decode()}"
    return environment.get_template(name)
