"""The model layer: decoders, draft heads, checkpoint loading and the tokenizer.

No module of this package names a device. The backend places the tensors, and its KernelSet does every computation that a
device may accelerate. The package needs the extra ``models``; without it the import raises
:class:`~outrider.device.ConfigError`.
"""

from outrider.errors import require_packages

require_packages("a model", ("transformers", "tokenizers", "safetensors", "PIL"), "models")

from outrider.model.checkpoint.loading import DecoderPlan, Progress, header_bytes, load_decoder, plan_decoder
from outrider.model.checkpoint.location import find_checkpoint
from outrider.model.checkpoint.transformers_loading import load_through_transformers
from outrider.model.config.checkpoint_config import checkpoint_dtype, supported_families
from outrider.model.config.model_config import ExpertsConfig, ModelConfig, RecurrentConfig, VisionConfig
from outrider.model.config.rope import RopeConfig
from outrider.model.heads.dflash import DFlashHead, load_dflash
from outrider.model.heads.draft_head import (
    BaseDraftHead,
    HeadCheckpoint,
    HeadWeights,
    check_draft_kind,
    find_mtp_format,
    open_head,
)
from outrider.model.heads.draft_output import (
    DRAFT_FORMATS,
    DraftFormat,
    DraftVocabulary,
    check_draft_format,
    with_output_head,
    with_vocabulary_size,
)
from outrider.model.heads.eagle import (
    Eagle3Head,
    EagleHead,
    load_eagle,
    load_eagle3,
    load_peagle,
)
from outrider.model.heads.mtp import MtpHead, load_chained_mtp, load_mtp
from outrider.model.layers.cache import KVCache, LayerState
from outrider.model.layers.decoder import Decoder, DecoderWeights
from outrider.model.layers.inputs import ForwardInput, KeptRows, StateInput
from outrider.model.layers.language_model import LanguageModel, SideBySide, side_by_side
from outrider.model.layers.layer_weights import LayerWeights
from outrider.model.layers.ranks import ModelRanks, Shard, Shards, or_single_rank
from outrider.model.layers.transformers_decoder import TransformersDecoder
from outrider.model.media.mrope import MediaGrid, prompt_positions, speculative_positions
from outrider.model.media.tokenizer import StreamDecoder, Tokenizer, check_same_tokens, has_tokenizer
from outrider.model.media.vision import Media, MediaProcessor, VisionTower, expand_placeholders, has_vision_tower, load_vision
from outrider.model.quantization import QuantizedMode, check_quantized_mode

__all__ = [
    "DRAFT_FORMATS",
    "BaseDraftHead",
    "DFlashHead",
    "Decoder",
    "DecoderPlan",
    "DecoderWeights",
    "DraftFormat",
    "DraftVocabulary",
    "Eagle3Head",
    "EagleHead",
    "ExpertsConfig",
    "ForwardInput",
    "HeadCheckpoint",
    "HeadWeights",
    "KVCache",
    "KeptRows",
    "LanguageModel",
    "LayerState",
    "LayerWeights",
    "Media",
    "MediaGrid",
    "MediaProcessor",
    "ModelConfig",
    "ModelRanks",
    "MtpHead",
    "Progress",
    "QuantizedMode",
    "RecurrentConfig",
    "RopeConfig",
    "Shard",
    "Shards",
    "SideBySide",
    "StateInput",
    "StreamDecoder",
    "Tokenizer",
    "TransformersDecoder",
    "VisionConfig",
    "VisionTower",
    "check_draft_format",
    "check_draft_kind",
    "check_quantized_mode",
    "check_same_tokens",
    "checkpoint_dtype",
    "expand_placeholders",
    "find_checkpoint",
    "find_mtp_format",
    "has_tokenizer",
    "has_vision_tower",
    "header_bytes",
    "load_chained_mtp",
    "load_decoder",
    "load_dflash",
    "load_eagle",
    "load_eagle3",
    "load_mtp",
    "load_peagle",
    "load_through_transformers",
    "load_vision",
    "open_head",
    "or_single_rank",
    "plan_decoder",
    "prompt_positions",
    "side_by_side",
    "speculative_positions",
    "supported_families",
    "with_output_head",
    "with_vocabulary_size",
]
