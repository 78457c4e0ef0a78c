"""Old names of attributes, for one version: reading one warns, and gives the value of the new name."""

from __future__ import annotations

import warnings
from operator import attrgetter
from typing import Any


class Renamed:
    """Stands in a class under an attribute's old name: ``old = Renamed("new", since="0.2")``.

    A non-data descriptor: an instance, or a subclass, that sets the old name itself shadows it.
    """

    def __init__(self, new: str, since: str) -> None:
        self.new = new
        self.since = since
        self.old = new

    def __set_name__(self, owner: type, name: str) -> None:
        self.old = name

    def __get__(self, obj: object, owner: type | None = None) -> Any:
        if obj is None:
            return self
        self.warn(type(obj), stacklevel=3)
        return getattr(obj, self.new)

    def warn(self, owner: type, *, stacklevel: int) -> None:
        """Tell of the new name."""
        warnings.warn(
            f"{owner.__name__}.{self.old} is called {self.new} since outrider {self.since}; the old name goes away one "
            "version later",
            DeprecationWarning,
            stacklevel=stacklevel,
        )


def honour_old_names(cls: type, base: type) -> None:
    """Where the subclass ``cls`` of ``base`` defines an attribute by its old name alone, the new name gives that; it warns.

    For ``__init_subclass__`` of a ``base`` whose old names are :class:`Renamed`.
    """
    for old, renamed in vars(base).items():
        if not isinstance(renamed, Renamed) or old not in vars(cls) or renamed.new in vars(cls):
            continue
        setattr(cls, renamed.new, property(attrgetter(old)))
        renamed.warn(cls, stacklevel=5)  # past abc, to the class statement
