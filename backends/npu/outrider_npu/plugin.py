"""Entry point of the backend ``npu``, and facts about the host: packages, versions, device files, import of torch_npu.

The module imports neither torch nor torch_npu, whose import fails without CANN. Each failure has an error of its own.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from outrider.device.errors import BackendLoadError
from outrider.device.plugin import BackendInfo, CiDeclaration, check_options, hookimpl

if TYPE_CHECKING:
    from outrider.device.backend import Backend

DESCRIPTION = "Ascend NPUs through torch_npu"
CI = CiDeclaration(
    runner_labels=("self-hosted", "npu"), markers=("asynchronous", "graphs", "graph parameters", "flags"), device_count=2
)
PACKAGE = "torch_npu"
_DEVICES = Path("/dev")
_NUMBERED = re.compile(r"davinci\d+")


# -- facts about the host ----------------------------------------------------------------------------------------------


def find_obstacle(devices: Path = _DEVICES) -> tuple[str, str] | None:
    """Return reason and advice of the first obstacle to running the backend on this host, or None."""
    version = _version(PACKAGE)
    if version is None:
        return ("torch_npu isn't installed", "install it with its CANN: pip install 'outrider[npu]'")
    mismatch = version_mismatch(_version("torch"), version)
    if mismatch is not None:
        return mismatch
    if not device_count(devices):
        return (
            f"the driver shows no NPU (there is no {devices}/davinci0)",
            "check npu-smi info, and that the container was given the device files",
        )
    return None


def device_count(devices: Path = _DEVICES) -> int:
    """Return the number of the Ascend driver's device files. ASCEND_RT_VISIBLE_DEVICES isn't considered."""
    return sum(1 for path in devices.glob("davinci*") if _NUMBERED.fullmatch(path.name)) if devices.is_dir() else 0


def version_mismatch(torch: str | None, extension: str) -> tuple[str, str] | None:
    """Return the mismatch of torch and torch_npu with advice, or None. torch_npu X.Y crashes with another torch than X.Y."""
    if torch is None or _release(torch) == _release(extension):
        return None  # a torch without a distribution: the import will tell
    built_for = ".".join(_release(extension))
    return (
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


# Operators of torch_npu that the kernels call. A test compares the list with the kernels' code.
OPERATORS = ("npu_fused_infer_attention_score", "_npu_fused_infer_attention_score_get_max_workspace", "npu_rotary_mul")

_FAILURES = (
    (
        re.compile(r"Two accelerators cannot be used"),
        "torch was built for another accelerator, and torch allows one in a process",
        "install the CPU build of torch beside torch_npu, or use the other device with TORCH_DEVICE_BACKEND_AUTOLOAD=0",
    ),
    (
        re.compile(r"lib(hccl|ascendcl|acl_op_compiler|ge_runner|runtime)\S*\.so|ASCEND_\w+_PATH"),
        "the CANN runtime isn't loaded in this shell",
        "source set_env.sh of the installed CANN toolkit, then start again",
    ),
    (
        re.compile(r"undefined symbol"),
        "torch_npu and torch, or torch_npu and CANN, don't belong together",
        "install a torch_npu of this torch's version, and the CANN that its release notes name",
    ),
)


def load_torch_npu() -> ModuleType:
    """Import torch_npu and return the module. Raises :class:`BackendLoadError` if the import fails, or if an operator that
    the backend needs is missing.
    """
    try:
        torch_npu = importlib.import_module("torch_npu")
    except (ImportError, RuntimeError, OSError) as error:
        raise BackendLoadError(explain(error)) from error
    check_operators(torch_npu)
    return torch_npu


def explain(error: BaseException) -> str:
    """Return the message of a failed import, with advice for a known cause."""
    text = f"{type(error).__name__}: {error}"
    for pattern, says, advice in _FAILURES:
        if pattern.search(text):
            return f"backend 'npu': {says}; {advice} (torch_npu said {text!r})"
    return f"backend 'npu': torch_npu can't be imported ({text}); `outrider doctor` says more"


def check_operators(torch_npu: Any) -> None:
    """Raise :class:`BackendLoadError` for the operators that this torch_npu doesn't have."""
    missing = [name for name in OPERATORS if not hasattr(torch_npu, name)]
    if missing:
        version = getattr(torch_npu, "__version__", "of unknown version")
        raise BackendLoadError(
            f"backend 'npu': torch_npu {version} has no operator {', '.join(missing)}; the plugin is written for torch_npu "
            "2.13: install that, or a CANN whose operators are complete"
        )


# -- hooks -------------------------------------------------------------------------------------------------------------


@hookimpl
def backend_info() -> BackendInfo:
    """Describe the backend: usable if a matching torch_npu is installed and the driver lists a device. Imports neither."""
    reason, advice = find_obstacle() or ("", "")
    return BackendInfo(
        name="npu",
        description=DESCRIPTION,
        priority=100,
        usable=not reason,
        reason=reason,
        advice=advice,
        device_count=device_count() or None,
        ci=CI,
    )


@hookimpl
def create_backend(ordinal: int, options: Mapping[str, str]) -> Backend:
    """Create the backend of NPU ``ordinal``, which has no options. Imports torch_npu; its errors contain advice."""
    check_options("npu", options, {})
    load_torch_npu()
    from outrider_npu.backend import NpuBackend

    return NpuBackend(ordinal)
