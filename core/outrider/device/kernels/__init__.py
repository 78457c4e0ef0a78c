"""Kernels behind the seam: the set, its metadata, the torch references and their operators."""

from outrider.device.kernels.kernelset import KernelSet
from outrider.device.kernels.metadata import AttentionMetadata, AttentionShape, Product, Turn
from outrider.device.kernels.ops import ROW_ACCESS, RowResolver
from outrider.device.kernels.reference import LANE_ACCEPT, LANE_DRAFT, LANE_RESIDUAL, LANE_SAMPLE

__all__ = [
    "LANE_ACCEPT",
    "LANE_DRAFT",
    "LANE_RESIDUAL",
    "LANE_SAMPLE",
    "ROW_ACCESS",
    "AttentionMetadata",
    "AttentionShape",
    "KernelSet",
    "Product",
    "RowResolver",
    "Turn",
]
