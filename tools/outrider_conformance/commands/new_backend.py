"""``outrider new-backend``: a plugin package to start from."""

from __future__ import annotations

import keyword
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer
from rich.console import Console

from outrider.cli.options.option_values import UsageError, one_of, option
from outrider.cli.terminal.report import CommandReport
from outrider.device.errors import OutriderError
from outrider.device.plugin import INTERFACE_VERSION
from outrider.registry import AUTO, Registry

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_LONGEST = 40
_FILES: Mapping[str, str | None] = MappingProxyType(
    {
        "pyproject.toml": "pyproject.toml.in",
        "README.md": "README.md.in",
        ".gitignore": "gitignore.in",
        ".github/workflows/conformance.yml": "ci.yml.in",
        "src/@package@/__init__.py": "init.py.in",
        "src/@package@/plugin.py": "plugin.py.in",
        "src/@package@/backend.py": "backend.py.in",
        "src/@package@/py.typed": None,
        "tests/test_conformance.py": "test_conformance.py.in",
    }
)


@dataclass(frozen=True, slots=True)
class _Template:
    """The parts of a package that depend on the kind of the device."""

    files: Mapping[str, str]
    """Template texts by path, in addition to the common files or replacing them."""
    level: str
    """The conformance level that the generated package passes before it is changed."""
    adapted: str
    """The condition under which the generated package drives the vendor's device, for the printed advice."""
    edit: str
    """The first edits that the vendor makes, for the printed advice."""


_TEMPLATES: Mapping[str, _Template] = MappingProxyType(
    {
        "torch": _Template(
            files=MappingProxyType({"src/@package@/stand_in.py": "stand_in.py.in"}),
            level="L0",
            adapted="DEVICE_TYPE is it",
            edit="backend.py: DEVICE_TYPE, then CAPABILITIES, then what L1 says",
        ),
        "own-queue": _Template(
            files=MappingProxyType(
                {
                    "README.md": "own_queue/README.md.in",
                    "src/@package@/backend.py": "own_queue/backend.py.in",
                    "src/@package@/driver.py": "own_queue/driver.py.in",
                    "src/@package@/queueing.py": "own_queue/queueing.py.in",
                }
            ),
            level="L2",
            adapted="driver.py calls your driver",
            edit="driver.py: what is marked GAP, then what L1 says",
        ),
    }
)
"""The templates by the way in which torch reaches the device: by a device type with a module of its own
(``torch.get_device_module``), or by no device type, so that torch calls become tasks of the device's own queues.
"""


def new_backend(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the backend, as in --backend NAME.")],
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Where to write; ./outrider-NAME without it.", show_default=False)
    ] = None,
    kind: Annotated[
        str,
        option(
            "--kind",
            value=one_of("torch", "own-queue"),
            help="torch: torch has a module for the device; own-queue: it has none.",
        ),
    ] = "torch",
) -> CommandReport:
    """Write an installable plugin package for a new backend. Unchanged, it passes `outrider conform` up to L0 with --kind
    torch and up to L2 with own-queue.
    """
    check_name(name)
    place = directory if directory is not None else Path(f"outrider-{name.replace('_', '-')}")
    contents = skeleton(name, kind)
    _write(place, contents)
    template = _TEMPLATES[kind]
    following = [
        f"pip install -e {place}",
        f"outrider conform --backend {name} --level {template.level}    # passes unchanged",
        f"edit {place}/src/outrider_{name}/{template.edit}",
    ]

    def render(console: Console) -> None:
        console.print(f"wrote {len(contents)} files to {place}:")
        for path in contents:
            console.print(f"  {path}")
        console.print("\nnext:")
        for line in following:
            console.print(f"  {line}")
        console.print(f"\n{place}/README.md goes on from there, level by level")

    data = {"name": name, "kind": kind, "directory": str(place), "files": list(contents), "next": following}
    return CommandReport(data=data, render=render)


def check_name(name: str) -> None:
    """Raise :class:`UsageError` for a name that can't be a backend's, or that is taken."""
    if not _NAME.fullmatch(name) or keyword.iskeyword(name) or len(name) > _LONGEST:
        raise UsageError(
            f"{name!r} can't be a backend's name: expected a Python identifier in lower case, no longer than "
            f"{_LONGEST} characters, such as 'acme' or 'acme_x2'"
        )
    if name == AUTO:
        raise UsageError(f"{name!r} selects any backend; choose another name")
    if name in (taken := Registry().backends.names):
        raise UsageError(
            f"a backend {name!r} is installed already; the installed backends are {', '.join(taken)}; choose another name"
        )


def skeleton(name: str, kind: str = "torch") -> dict[str, str]:
    """Return the files of a new package: contents by path, relative to its directory."""
    chosen = _TEMPLATES[kind]
    words = {
        "name": name,
        "package": f"outrider_{name}",
        "distribution": f"outrider-{name.replace('_', '-')}",
        "Class": "".join(part.capitalize() for part in name.split("_")),
        "interface_version": str(INTERFACE_VERSION),
        "level": chosen.level,
        "adapted": chosen.adapted,
    }
    source = files("outrider_conformance.commands") / "skeleton"
    return {
        _filled(path, words): "" if template is None else _filled((source / template).read_text(encoding="utf-8"), words)
        for path, template in {**_FILES, **chosen.files}.items()
    }


def _filled(text: str, words: Mapping[str, str]) -> str:
    for key, value in words.items():
        text = text.replace(f"@{key}@", value)
    return text


def _write(place: Path, contents: Mapping[str, str]) -> None:
    """Write the package to a scratch directory next to ``place``, and rename it: an error leaves no partial package."""
    if place.exists() and not place.is_dir():
        raise OutriderError(f"{place} is a file; name a directory that is empty or doesn't exist")
    if place.exists() and any(place.iterdir()):
        raise OutriderError(f"{place} isn't empty and nothing in it is touched; name another directory, or empty it")
    place = place.absolute()
    missing = [place.parent, *place.parent.parents]
    missing = [parent for parent in missing if not parent.exists()]
    scratch: Path | None = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
        for path, text in contents.items():
            (scratch / path).parent.mkdir(parents=True, exist_ok=True)
            (scratch / path).write_text(text, encoding="utf-8")
        scratch.chmod(0o777 & ~_umask())
        if place.exists():
            place.rmdir()
        scratch.rename(place)
    except BaseException as error:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        for parent in missing:
            if parent.exists() and not any(parent.iterdir()):
                parent.rmdir()
        if (
            isinstance(error, OSError) and scratch is not None
        ):  # a full-disk error names no file, other errors name a file of the scratch directory
            raise type(error)(error.errno, error.strerror, str(place)) from None
        raise


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
