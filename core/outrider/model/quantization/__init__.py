"""Quantised checkpoints: what their config says, how their tensors are stored, and the weights that are made of them."""

from outrider.model.quantization.config import read_quantization
from outrider.model.quantization.loading import Quantization, QuantizedMode

__all__ = ["Quantization", "QuantizedMode", "read_quantization"]
