"""Old names of what a plugin may use or override, for one version: each works, and warns of the new one.

Modules that moved are in ``outrider._moved``. All of this goes away with version 0.3.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from inspect import getattr_static
from typing import Any, TypeVar

T = TypeVar("T")


def warn_renamed(old: str, new: str, *, stacklevel: int = 2) -> None:
    """Say that ``old`` is now ``new``; ``stacklevel`` as seen by the caller of this function."""
    warnings.warn(
        f"{old} is now {new}; the old name goes away with outrider 0.3", DeprecationWarning, stacklevel=stacklevel + 1
    )


class Renamed:
    """The old name of an attribute or method: ``mark_over = Renamed("mark_stale")`` in the body of a class.

    Reading it of an object warns and gives the attribute ``new``; so does a call by the class. A subclass that overrides
    the old name is :func:`adopt_overrides`'s.
    """

    def __init__(self, new: str) -> None:
        self.new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner, self.name = owner, name

    def __get__(self, obj: Any, kind: type | None = None) -> Any:
        if obj is None:  # who lists the members of a class uses none of them
            return self
        found = type(obj)
        warn_renamed(f"{self.owner.__name__}.{self.name}", self.new)
        if getattr_static(found, self.name) is self:
            return getattr(obj, self.new)
        # A subclass overrides the old name and reached this one by super(): what lies behind that subclass is meant.
        above = found.__mro__[: found.__mro__.index(self.owner)]
        overriding = next(cls for cls in reversed(above) if self.name in cls.__dict__)
        return getattr(super(overriding, obj), self.new)

    def __call__(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """``Backend.mark_over(backend, …)``."""
        warn_renamed(f"{self.owner.__name__}.{self.name}", self.new)
        return getattr(self.owner, self.new)(obj, *args, **kwargs)


def adopt_overrides(cls: type, stacklevel: int = 3) -> None:
    """Let what ``cls`` overrides by an old name be called by the new one, with a warning. For ``__init_subclass__``."""
    for name in list(cls.__dict__):
        for base in cls.__mro__[1:]:
            old = base.__dict__.get(name)
            if isinstance(old, Renamed):
                if old.new not in cls.__dict__:
                    warn_renamed(f"{base.__name__}.{name}, which {cls.__name__} overrides,", old.new, stacklevel=stacklevel)
                    setattr(cls, old.new, cls.__dict__[name])
                break


def renamed_arguments(**names: str) -> Callable[[type[T]], type[T]]:
    """Let a class be made with old names of keywords (``old="new"``), also by ``dataclasses.replace``."""

    def decorate(cls: type[T]) -> type[T]:
        init: Callable[..., None] = cls.__init__

        @wraps(init)
        def accept(self: object, *args: Any, **kwargs: Any) -> None:
            for old in names.keys() & kwargs.keys():
                warn_renamed(f"{cls.__name__}({old}=…)", names[old])
                kwargs[names[old]] = kwargs.pop(old)
            init(self, *args, **kwargs)

        setattr(cls, "__init__", accept)  # noqa: B010  (mypy: a method isn't assigned to)
        return cls

    return decorate


def renamed_in(module: str, names: Mapping[str, str], *, stacklevel: int = 2) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``module``: ``names`` gives where each old one is now."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new = names[name].rpartition(".")
        warn_renamed(f"{module}.{name}", names[name], stacklevel=stacklevel)
        return getattr(import_module(home), new)

    return find
