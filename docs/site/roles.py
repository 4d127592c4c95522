"""Extension of griffe, which reads docstrings for mkdocs: roles and formulas as Sphinx writes them, for Markdown.

``:func:`voxelfield.load``` becomes a link where the site has that object. Formulas are in LaTeX in the docstrings. The
part of it that they use is written in Unicode, because a typesetter would have to be fetched from elsewhere.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(~?)([\w.]+)(?:\(\))?`")
_MATH = re.compile(r":math:`([^`]+)`")
_SIGNS = {
    r"\alpha": "α",
    r"\arctan": "arctan ",
    r"\beta": "β",
    r"\bmod": "mod",
    r"\cdot": "·",
    r"\cos": "cos ",
    r"\delta": "δ",
    r"\epsilon": "ε",
    r"\exp": "exp",
    r"\in": "∈",
    r"\int": "∫",
    r"\langle": "⟨",
    r"\le": "≤",
    r"\leftarrow": "←",
    r"\lfloor": "⌊",
    r"\log": "log",
    r"\max": "max",
    r"\nabla": "∇",
    r"\omega": "ω",
    r"\partial": "∂",
    r"\prod": "∏",
    r"\rangle": "⟩",
    r"\rfloor": "⌋",
    r"\sigma": "σ",
    r"\sin": "sin ",
    r"\sum": "Σ",
    r"\tan": "tan ",
    r"\theta": "θ",
    r"\times": "×",
    r"\xi": "ξ",
    r"\{": "{",
    r"\}": "}",
    r"\,": " ",
    r"\;": " ",
}
_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
_SUBSCRIPTS = str.maketrans("0123456789aijkrtv", "₀₁₂₃₄₅₆₇₈₉ₐᵢⱼₖᵣₜᵥ")


def as_markdown(docstring: str) -> str:
    """Returns a docstring with links and formulas as Markdown has them."""
    return _MATH.sub(lambda match: f"`{formula(match[1])}`", _ROLE.sub(_reference, docstring))


def formula(latex: str) -> str:
    """Returns a formula in Unicode; a command that is not known is an error.

    Args:
        latex: The formula, of the commands that docstrings use.

    Raises:
        KeyError: It has another command.
    """
    text = " ".join(latex.split())
    text = re.sub(r"\\(?:mathrm|text|bar)\{((?:[^{}]|\\_)*)\}", lambda match: match[1].replace(r"\_", "_"), text)
    text = re.sub(r"\\frac(\d)(\d)", r"\1/\2", text)
    text = re.sub(r"\\sqrt ?(\d|\{[^{}]*\})", lambda match: f"√({match[1].strip('{}')})", text)
    text = re.sub(r"\\frac\{((?:[^{}]|\{[^{}]*\})*)\}\{((?:[^{}]|\{[^{}]*\})*)\}", r"(\1) / (\2)", text)
    text = re.sub(r"\\(?:[A-Za-z]+|[{},;])", lambda match: _SIGNS[match[0]], text)
    text = re.sub(r"_([\daijkrtv])(?![\w{])", lambda match: match[1].translate(_SUBSCRIPTS), text)
    text = re.sub(r"\^(\d+|\{-?\d+\})", lambda match: match[1].strip("{}").translate(_SUPERSCRIPTS), text)
    return re.sub(r"([_^])\{([^{}]*)\}", lambda match: f"{match[1]}({match[2]})", text)


def _reference(role: re.Match[str]) -> str:
    path = role[2]
    shown = path.rpartition(".")[2] if role[1] else path.removeprefix("voxelfield.")
    code = f"<code>{shown}</code>"
    return f'<autoref optional identifier="{path}">{code}</autoref>' if path.startswith("voxelfield.") else f"`{path}`"


class Roles(griffe.Extension):
    """Converts every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Converts the docstring of an object that has one."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
