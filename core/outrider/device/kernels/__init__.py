"""Kernels behind the seam: the set, its metadata, the torch references and their operators."""

from outrider.device.kernels.kernelset import KernelSet
from outrider.device.kernels.metadata import AttentionMetadata
from outrider.device.kernels.ops import ROW_ACCESS, RowResolver

__all__ = ["ROW_ACCESS", "AttentionMetadata", "KernelSet", "RowResolver"]
