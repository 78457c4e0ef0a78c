"""Candidates as rows, for ``backends`` and ``doctor``."""

from __future__ import annotations

from typing import Any

from outrider.device.errors import OutriderError
from outrider.device.plugin import BackendInfo
from outrider.registry import Candidate, Registry


def row(candidate: Candidate[BackendInfo]) -> dict[str, object]:
    """One candidate as JSON data."""
    info = candidate.info
    return {
        "name": candidate.name,
        "status": candidate.status,
        "can_run": candidate.status == "usable",
        "reason": candidate.reason,
        "advice": candidate.advice,
        "distribution": candidate.distribution,
        "entry_point": candidate.entry_point,
        "description": info.description if info else "",
        "priority": info.priority if info else None,
        "device_count": info.device_count if info else None,
        "seam": [info.seam_min, info.seam_max] if info else None,
    }


def extra_row(candidate: Candidate[Any], kind: str, detail: str) -> dict[str, object]:
    """A plugin that is no backend, as JSON data. ``detail``: what it's for, or what it needs."""
    return {
        "kind": kind,
        "name": candidate.name,
        "status": candidate.status,
        "can_run": candidate.status == "usable",
        "reason": candidate.reason,
        "advice": candidate.advice,
        "distribution": candidate.distribution,
        "entry_point": candidate.entry_point,
        "description": candidate.info.description if candidate.info else "",
        "detail": detail if candidate.info else "",
    }


def extra_rows(registry: Registry, *, load: bool = True) -> list[dict[str, object]]:
    """The installed kernel sets and proposers."""
    from outrider.registry import Plugins
    from outrider.registry.proposers import PROPOSERS, shadowed

    rows = []
    for kernels in registry.kernels.candidates(load=load):
        names = kernels.info.backends if kernels.info else ()
        rows.append(extra_row(kernels, "kernels", f"for {', '.join(names) or 'any backend'}: NAME:kernels={kernels.name}"))
    for proposer in Plugins(PROPOSERS).candidates(load=load):
        needs = proposer.info.needs if proposer.info else ""
        rows.append(extra_row(shadowed(proposer), "proposer", f"--speculate {proposer.name}, needs {needs}"))
    return rows


def open_row(registry: Registry, values: dict[str, object]) -> None:
    """Open the device of a usable row and add what it declares; what keeps it from opening becomes the reason."""
    if not values["can_run"]:
        return
    try:
        backend = registry.create(str(values["name"]))
    except OutriderError as error:
        values.update(can_run=False, status="unusable", reason=str(error), advice="see the reason")
        return
    values.update(device=str(backend.device), capabilities=backend.capabilities.as_dict(), versions=dict(backend.versions()))
