"""Import of torch_npu, with each known failure as an error that says what to do."""

from __future__ import annotations

import importlib
import re
from types import ModuleType
from typing import Any

from outrider.device.errors import BackendLoadError

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


def load() -> ModuleType:
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
