"""Quantized checkpoints: parsing of their configs, the storage of their tensors, and the loaded weights."""

from outrider.model.quantization.config import read_quantization
from outrider.model.quantization.loading import Quantization, QuantizedMode, check_quantized_mode

__all__ = ["Quantization", "QuantizedMode", "check_quantized_mode", "read_quantization"]
