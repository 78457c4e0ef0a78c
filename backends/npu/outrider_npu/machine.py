"""Facts about the host that need no import of torch_npu: packages, their versions, device files."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "torch_npu"
COLLECTIVES = "hccl"
"""Name of the Ascend collectives library in torch.distributed. The backend has no collectives yet."""
_DEVICES = Path("/dev")
_NUMBERED = re.compile(r"davinci\d+")


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The reason why the backend can't run on this host, with advice."""

    reason: str
    advice: str


def find_obstacle(devices: Path = _DEVICES) -> Obstacle | None:
    """Return the first obstacle to running the backend on this host, or None."""
    version = _version(PACKAGE)
    if version is None:
        return Obstacle("torch_npu isn't installed", "install it with its CANN: pip install 'outrider[npu]'")
    mismatch = version_mismatch(_version("torch"), version)
    if mismatch is not None:
        return mismatch
    if not device_count(devices):
        return Obstacle(
            f"the driver shows no NPU (there is no {devices}/davinci0)",
            "check npu-smi info, and that the container was given the device files",
        )
    return None


def device_count(devices: Path = _DEVICES) -> int:
    """Return the number of the Ascend driver's device files. ASCEND_RT_VISIBLE_DEVICES isn't considered."""
    return sum(1 for path in devices.glob("davinci*") if _NUMBERED.fullmatch(path.name)) if devices.is_dir() else 0


def version_mismatch(torch: str | None, extension: str) -> Obstacle | None:
    """Return the mismatch of torch and torch_npu, or None. torch_npu X.Y requires torch X.Y and crashes with others."""
    if torch is None or _release(torch) == _release(extension):
        return None  # a torch without a distribution: the import will tell
    built_for = ".".join(_release(extension))
    return Obstacle(
        f"torch_npu {extension} was built for torch {built_for}, and this is torch {torch}",
        f"install the pair that belongs together: pip install torch=={built_for}.*, or another torch_npu",
    )


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
