"""vLLM #31841: the host writes the mask of multimodal positions of a step while the step before may still copy it.

Unmodified, of vLLM 0.33: the first runner's `_gather_mm_embeddings`, as its drafter calls it (outside the part of a step that
waits for the inputs of the one before), and `SupportsMultiModal.embed_input_ids`, which copies the mask. Stand-ins: requests,
an encoder's output, the table of embeddings. Taken out: each step's mask in its own memory; before the fix it was one buffer.
"""

from types import SimpleNamespace

import absent
import running
import torch

backend = running.on_sim()
absent.stand_in("torchvision")

from vllm.model_executor.models.interfaces import SupportsMultiModal  # noqa: E402
from vllm.multimodal.inputs import PlaceholderRange  # noqa: E402
from vllm.v1.worker import gpu_model_runner  # noqa: E402

gpu_model_runner.PIN_MEMORY = True
VOCABULARY, WIDTH, TOKENS, STEPS = 32, 8, 12, 4


class Model(SupportsMultiModal):
    _has_oov_mm_tokens = True

    def __init__(self):
        self.table = torch.randn(VOCABULARY, WIDTH).to("sim")

    def get_language_model(self):
        return SimpleNamespace(embed_input_ids=lambda ids: self.table.index_select(0, ids))


def one_buffer(before):
    """`torch.zeros` as it is, but for masks: those are parts of one pinned buffer."""
    buffer = torch.empty(64, dtype=torch.bool, pin_memory=True)

    def zeros(*size, dtype=None, pin_memory=False, **more):
        if dtype is torch.bool and pin_memory:
            buffer[: size[0]] = False
            return buffer[: size[0]]
        return before(*size, dtype=dtype, pin_memory=pin_memory, **more)

    return zeros


def steps(revert):
    model = Model()
    ids = torch.full((TOKENS,), 3).to("sim")
    image = SimpleNamespace(mm_position=PlaceholderRange(offset=2, length=5), identifier="image", modality="image")
    runner = object.__new__(gpu_model_runner.GPUModelRunner)
    runner.encoder_cache = {"image": torch.randn(5, WIDTH).to("sim")}
    runner.is_multimodal_pruning_enabled = runner.uses_mrope = False
    runner.input_batch = SimpleNamespace(req_ids=["one"])
    backend.synchronize()
    if revert:
        torch.zeros = one_buffer(torch.zeros)
    for step in range(STEPS):
        # Steps without an image and with one take turns, as decoding and new requests do.
        features = [image] if step % 2 else []
        runner.requests = {"one": SimpleNamespace(num_computed_tokens=0, mm_features=features)}
        plan = SimpleNamespace(total_num_scheduled_tokens=TOKENS, num_scheduled_tokens={"one": TOKENS})
        embeddings, mask = runner._gather_mm_embeddings(plan, shift_computed_tokens=1)
        model.embed_input_ids(ids, embeddings, is_multimodal=mask)
    return STEPS


running.watched(backend, steps)
