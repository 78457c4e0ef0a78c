"""The model layer: decoders and EAGLE heads on a backend's kernels, checkpoint loading, the tokenizer.

Nothing here names a device: tensors live where the backend says, and every computation that a device may do faster goes
through its KernelSet.
"""

from outrider.model.cache import KVCache
from outrider.model.checkpoint_config import supported_families
from outrider.model.config import ModelConfig, VisionConfig
from outrider.model.decoder import Decoder, DecoderWeights
from outrider.model.eagle import EagleHead, EagleWeights
from outrider.model.inputs import ForwardInput
from outrider.model.layer import LayerWeights
from outrider.model.loading import Progress, load_decoder, load_eagle
from outrider.model.media import Media, MediaProcessor, expand_placeholders
from outrider.model.mrope import MediaGrid, prompt_positions, speculative_positions
from outrider.model.rope import RopeConfig
from outrider.model.stream_decoder import StreamDecoder
from outrider.model.tokenizer import Tokenizer
from outrider.model.vision import VisionTower, load_vision

__all__ = [
    "Decoder",
    "DecoderWeights",
    "EagleHead",
    "EagleWeights",
    "ForwardInput",
    "KVCache",
    "LayerWeights",
    "Media",
    "MediaGrid",
    "MediaProcessor",
    "ModelConfig",
    "Progress",
    "RopeConfig",
    "StreamDecoder",
    "Tokenizer",
    "VisionConfig",
    "VisionTower",
    "expand_placeholders",
    "load_decoder",
    "load_eagle",
    "load_vision",
    "prompt_positions",
    "speculative_positions",
    "supported_families",
]
