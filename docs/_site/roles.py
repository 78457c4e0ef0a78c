"""Docstrings name things as ``:class:`~outrider.device.Stream``` does; on the site that is code, by its last name."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|data|attr|exc|mod):`(~?)([\w.]+)`")


class Roles(griffe.Extension):
    """Rewrites every docstring that is loaded."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """One module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(lambda m: f"`{m[2].rsplit('.', 1)[-1] if m[1] else m[2]}`", obj.docstring.value)
