"""Kernels of the backend interface: the set in its three parts, its metadata, the torch references and their operators."""

from outrider.device.kernels.bookkeeping_kernels import BookkeepingKernels
from outrider.device.kernels.formats import CACHE_FORMATS, QUANTIZED_FORMATS
from outrider.device.kernels.kernelset import KernelSet, declared_below, kernel_names
from outrider.device.kernels.metadata import (
    AttentionMetadata,
    AttentionShape,
    HeadNorms,
    Product,
    RequestInputs,
    RequestRows,
    RotaryArgs,
)
from outrider.device.kernels.model_kernels import ModelKernels
from outrider.device.kernels.ops import ROW_ACCESS, RowResolver
from outrider.device.kernels.quantized import QuantizedProduct, QuantizedWeight
from outrider.device.kernels.recurrent_kernels import DeltaRuleWeights, RecurrentBatch, RecurrentKernels
from outrider.device.kernels.reference import LANE_ACCEPT, LANE_DRAFT, LANE_RESIDUAL, LANE_SAMPLE
from outrider.device.kernels.sampling_kernels import SamplingKernels
from outrider.device.kernels.tuning import DecoderShape, TuningProgress, TuningResult
from outrider.device.kernels.wrapping import WrappedKernels

__all__ = [
    "CACHE_FORMATS",
    "LANE_ACCEPT",
    "LANE_DRAFT",
    "LANE_RESIDUAL",
    "LANE_SAMPLE",
    "QUANTIZED_FORMATS",
    "ROW_ACCESS",
    "AttentionMetadata",
    "AttentionShape",
    "BookkeepingKernels",
    "DecoderShape",
    "DeltaRuleWeights",
    "HeadNorms",
    "KernelSet",
    "ModelKernels",
    "Product",
    "QuantizedProduct",
    "QuantizedWeight",
    "RecurrentBatch",
    "RecurrentKernels",
    "RequestInputs",
    "RequestRows",
    "RotaryArgs",
    "RowResolver",
    "SamplingKernels",
    "TuningProgress",
    "TuningResult",
    "WrappedKernels",
    "declared_below",
    "kernel_names",
]
