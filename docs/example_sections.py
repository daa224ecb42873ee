"""A griffe extension: our docstrings have one ``Example:``, griffe shows code for ``Examples:``."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class ExampleSections(Extension):
    """Reads ``Example:`` as ``Examples:``, so that examples are shown as code and not as text."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for every object that was found."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
