"""Extension of the documentation site: docstrings are written for Python's readers, the site reads them as Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe


class PlainReferences(griffe.Extension):
    """Show references such as :func:`robust_loss` as code, and the star of τ* as a star rather than as emphasis."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of a module, class, function or attribute that was read."""
        if obj.docstring is not None:
            text = re.sub(r":(?:func|meth|class|mod|data|attr):(?=`)", "", obj.docstring.value)
            obj.docstring.value = text.replace("τ*", "τ∗")
