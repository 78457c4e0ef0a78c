"""Candidates as rows, for ``backends`` and ``doctor``."""

from __future__ import annotations

from outrider.device.errors import OutriderError
from outrider.registry import Candidate, Registry


def row(candidate: Candidate) -> dict[str, object]:
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
