"""The platform class: what vLLM asks of a device from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.interface import Platform, PlatformEnum

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class SimPlatform(Platform):
    """A simulated device, as a vendor's plugin would describe its own."""

    _enum = PlatformEnum.OOT
    device_name = "sim"
    device_type = "sim"
    dispatch_key = "PrivateUse1"
    ray_device_key = "sim"
    dist_backend = "gloo"  # one process: groups of one rank
    device_control_env_var = "SIM_VISIBLE_DEVICES"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """What the host computes in."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def import_kernels(cls) -> None:
        """There are no compiled ones."""

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """All that the host has kernels for."""
        del dtype

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """Bytes."""
        del device
        return float(torch.sim.memory_allocated())  # type: ignore[attr-defined]

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """A name for logs."""
        del device_id
        return "sim"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes."""
        del device_id
        return int(torch.sim.mem_get_info()[1])  # type: ignore[attr-defined]

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> None:
        """None: it has no such number."""
        del device_id

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """One device."""
        del device

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seed the device's random numbers."""
        torch.sim.manual_seed_all(seed)  # type: ignore[attr-defined]

    @classmethod
    def inference_mode(cls) -> Any:
        """As on other devices."""
        return torch.no_grad()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """It is, and copies from it are asynchronous."""
        return True

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """A number that kernels choose their grids by."""
        del device_id
        return 1

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        """VLLM's attention in Triton, for every model that it can run."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        del selected_backend, attn_selector_config, num_heads
        return str(AttentionBackendEnum.TRITON_ATTN.get_path())

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Eager mode, and our worker, which differs in how it names its device."""
        from vllm.config import CompilationMode, CUDAGraphMode

        # Parameters of classes of vLLM's own hold what loads them, which a tensor of a device in Python can't take over.
        # So weights are loaded on the host, and the worker moves the loaded model.
        vllm_config.load_config.device = "cpu"
        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "outrider_vllm.worker.SimWorker"
        if vllm_config.cache_config is not None and not vllm_config.cache_config.user_specified_block_size:
            vllm_config.cache_config.block_size = 16

    @classmethod
    def get_punica_wrapper(cls) -> str:
        """LoRA in torch."""
        return "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """A draft model's layers have numbers of their own."""

    @classmethod
    def use_custom_op_collectives(cls) -> bool:
        """Groups have one rank."""
        return False

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Attention is called as it is: nothing is compiled."""
        return False
