"""Kernels of the backend interface: the set in its three parts, its metadata, the torch references and their operators."""

from outrider.device.kernels.blocks import (
    AttentionBlock,
    AttentionTokens,
    BlockKernels,
    ExpertsBlock,
    LayerRows,
    MlpBlock,
    RecurrentBlock,
    RecurrentTokens,
    RecurrentWindow,
)
from outrider.device.kernels.bookkeeping_kernels import BookkeepingKernels
from outrider.device.kernels.formats import CACHE_FORMATS, QUANTIZED_FORMATS
from outrider.device.kernels.kernelset import KernelSet, WrappedKernels, kernel_names
from outrider.device.kernels.metadata import (
    AttentionMetadata,
    AttentionShape,
    DecoderShape,
    HeadNorms,
    RequestInputs,
    RequestRows,
    RotaryArgs,
    TuningProgress,
    TuningResult,
)
from outrider.device.kernels.model_kernels import ModelKernels
from outrider.device.kernels.recurrent_kernels import DeltaRuleWeights, RecurrentBatch, RecurrentKernels
from outrider.device.kernels.reference.model import LANE_ACCEPT, LANE_DRAFT, LANE_RESIDUAL, LANE_SAMPLE
from outrider.device.kernels.reference.ops import ROW_ACCESS, RowResolver
from outrider.device.kernels.residual import SINGLE_RANK, Contribution, RankBoundary, ResidualStream, SeparateInput
from outrider.device.kernels.sampling_kernels import SamplingKernels
from outrider.device.kernels.weights import QuantizedWeight, SplitWeight, Weight

__all__ = [
    "CACHE_FORMATS",
    "LANE_ACCEPT",
    "LANE_DRAFT",
    "LANE_RESIDUAL",
    "LANE_SAMPLE",
    "QUANTIZED_FORMATS",
    "ROW_ACCESS",
    "SINGLE_RANK",
    "AttentionBlock",
    "AttentionMetadata",
    "AttentionShape",
    "AttentionTokens",
    "BlockKernels",
    "BookkeepingKernels",
    "Contribution",
    "DecoderShape",
    "DeltaRuleWeights",
    "ExpertsBlock",
    "HeadNorms",
    "KernelSet",
    "LayerRows",
    "MlpBlock",
    "ModelKernels",
    "QuantizedWeight",
    "RankBoundary",
    "RecurrentBatch",
    "RecurrentBlock",
    "RecurrentKernels",
    "RecurrentTokens",
    "RecurrentWindow",
    "RequestInputs",
    "RequestRows",
    "ResidualStream",
    "RotaryArgs",
    "RowResolver",
    "SamplingKernels",
    "SeparateInput",
    "SplitWeight",
    "TuningProgress",
    "TuningResult",
    "Weight",
    "WrappedKernels",
    "kernel_names",
]
