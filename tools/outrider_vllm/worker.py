"""vLLM's worker for the simulated device. As in vendors' plugins, it differs from vLLM's own only in the name of
its device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import vllm.utils.torch_utils as torch_utils

from outrider_sim.torch_device.launches import mapped

# vLLM's compiled code creates the device view of pinned memory on other devices. buffer_utils imports this function by name,
# so it is replaced before the import of buffer_utils.
torch_utils.get_accelerator_view_from_cpu_tensor = mapped

import torch  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.utils.mem_utils import MemorySnapshot  # noqa: E402
from vllm.utils.torch_utils import set_random_seed  # noqa: E402
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment  # noqa: E402
from vllm.v1.worker.utils import request_memory  # noqa: E402
from vllm.v1.worker.worker_base import CompilationTimes  # noqa: E402

from outrider.device import ConfigError  # noqa: E402


class SimWorker(Worker):
    """vLLM's GPU worker on the device `sim:0`."""

    def init_device(self) -> None:
        """Set the device, create process groups of one rank, and initialise the model runner as vLLM's worker does."""
        self.device = torch.device("sim", 0)
        current_platform.check_if_supports_dtype(self.model_config.dtype)
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, current_platform.dist_backend
        )
        set_random_seed(self.model_config.seed)
        self.init_snapshot = MemorySnapshot(device=self.device)
        self.requested_memory = request_memory(self.init_snapshot, self.cache_config)
        self._init_workspace_and_model_runner()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the model and a draft model on the host, then move them to the device. With ``load_dummy_weights``, vLLM makes
        random weights.
        """
        super().load_model(load_dummy_weights=load_dummy_weights)
        self.model_runner.model.to(self.device)
        draft = self.get_draft_model()
        if draft is not None:
            draft.to(self.device)

    def determine_available_memory(self) -> int:
        """Return `kv_cache_memory_bytes`. Raises `ConfigError` if it is None.

        vLLM's measuring run would take a minute, and the memory of a simulated device is arbitrary.
        """
        kv_cache_bytes = self.cache_config.kv_cache_memory_bytes
        if kv_cache_bytes is None:
            raise ConfigError("the KV cache's size isn't given; pass kv_cache_memory_bytes, which no run measures here")
        return int(kv_cache_bytes)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Skip vLLM's warm-up, because nothing is compiled, and return its times as zero."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        # Memory pools serve the sleep mode, which no out-of-tree platform has.
        del tag
        return nullcontext()
