"""The output head that drafts are drawn with: the target's, or a copy of it in few bits.

What is verified takes the target's own head, so tokens are the same; what changes is which drafts are accepted. A draft of
three tokens reads the head three times: as many bytes as seven layers of an 8B model have. A copy in 8 bits has half of them.
"""

from __future__ import annotations

from torch import Tensor

from outrider.device import Backend, CapabilityError, ConfigError
from outrider.model.decoder import Decoder
from outrider.model.language_model import LanguageModel
from outrider.model.products import label
from outrider.model.quantization.rounding import ROUND, rounded
from outrider.model.tensors import placed

OUTPUT_FORMATS = tuple(ROUND)
"""What the copy can be kept in."""


def with_output_head(target: LanguageModel, format: str, *, backend: Backend) -> Decoder:
    """``target`` for drafting, all of it shared but its output head: a copy in ``format``, one of OUTPUT_FORMATS.

    Raises :class:`ConfigError` for a target whose head isn't known or is quantised already, and :class:`CapabilityError`
    where the backend has no kernels for that format.
    """
    if not isinstance(target, Decoder):
        raise ConfigError(
            f"draft_output_head is {format}, and the target runs by transformers' own code, whose output head stays as it "
            "is; leave one of them out"
        )
    head = target.weights.head
    if not isinstance(head, Tensor):
        raise ConfigError(
            f"draft_output_head is {format}, and the target's output head is {label(head)} already; leave "
            "draft_output_head out"
        )
    if format not in backend.capabilities.quantized_formats:
        has = ", ".join(sorted(backend.capabilities.quantized_formats)) or "none"
        raise CapabilityError(
            f"draft_output_head is {format}, and {backend.label} has no kernels for that (it declares {has}); leave it out"
        )
    with placed(backend, target.dtype):
        return target.with_head(rounded(head, format))
