"""What is installed is pinned: each package that we name, and all that the runtime ones bring along."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins(text):
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    found = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines if line]
    assert all(found), "a constraint is one version"
    return {canonicalize_name(each[1]): each[2] for each in found}


PINS = pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))


RUNTIME = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["models"]]


def brought(name, seen):
    """``name`` and what it requires here, and so on."""
    name = canonicalize_name(name)
    if name in seen:
        return seen
    seen.add(name)
    for text in importlib.metadata.requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            brought(requirement.name, seen)
    return seen


@pytest.mark.parametrize("group", ["runtime", "dev", "docs"])
def test_what_we_name_is_pinned_within_its_range(group):
    for requirement in map(Requirement, RUNTIME if group == "runtime" else PROJECT["dependency-groups"][group]):
        name = canonicalize_name(requirement.name)
        assert name in PINS, f"{name} has no version in constraints.txt"
        assert requirement.specifier.contains(PINS[name]), f"{name}: {PINS[name]} isn't within {requirement.specifier}"


def test_what_comes_along_at_run_time_is_pinned():
    seen = set()
    for requirement in map(Requirement, RUNTIME):
        brought(requirement.name, seen)
    accelerator = {name for name in seen if name.startswith(("nvidia-", "cuda-"))}  # torch pins what its builds need
    assert "pillow" in seen
    # setuptools: each version of torch has a range of its own, and a backend may bring another torch.
    assert sorted(seen - accelerator - {"setuptools"} - set(PINS)) == []
