"""The platform class, by which vLLM queries the properties of an out-of-tree device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.interface import Platform, PlatformEnum

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class SimPlatform(Platform):
    """The simulated device, described as a vendor's plugin describes its device."""

    _enum = PlatformEnum.OOT
    device_name = "sim"
    device_type = "sim"
    dispatch_key = "PrivateUse1"
    ray_device_key = "sim"
    dist_backend = "gloo"  # for process groups of one rank
    device_control_env_var = "SIM_VISIBLE_DEVICES"

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """The floating-point dtypes that vLLM may use: those in which the host computes the operations."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def import_kernels(cls) -> None:
        """Do nothing where vLLM imports a platform's compiled kernels: there are none."""

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Raise no error for any dtype: the host has kernels for all of them."""
        del dtype

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """Return the allocated memory of the device in bytes."""
        del device
        return float(torch.sim.memory_allocated())  # type: ignore[attr-defined]

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """Return the device's name for logs: `sim`."""
        del device_id
        return "sim"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Return the total memory of the device in bytes."""
        del device_id
        return int(torch.sim.mem_get_info()[1])  # type: ignore[attr-defined]

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> None:
        """Return None: the device has no compute capability."""
        del device_id

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Do nothing where vLLM selects a device: the process has one simulated device."""
        del device

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seed the device's random number generator."""
        torch.sim.manual_seed_all(seed)  # type: ignore[attr-defined]

    @classmethod
    def inference_mode(cls) -> Any:
        """Return `torch.no_grad()`, as out-of-tree platforms do."""
        return torch.no_grad()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Return True: copies from pinned memory are asynchronous."""
        return True

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """Return 1, the number by which kernels choose their grid."""
        del device_id
        return 1

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        """Return the name of vLLM's Triton attention, for every model."""
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        del selected_backend, attn_selector_config, num_heads
        return str(AttentionBackendEnum.TRITON_ATTN.get_path())

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Select eager mode, weight loading on the host, and :class:`~outrider_vllm.worker.SimWorker`."""
        from vllm.config import CompilationMode, CUDAGraphMode

        # vLLM's parameter classes have loader attributes, which a simulated device's tensor subclass would lose. So vLLM
        # loads the weights on the host, and the worker moves the loaded model.
        vllm_config.load_config.device = "cpu"
        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "outrider_vllm.worker.SimWorker"
        if vllm_config.cache_config is not None and not vllm_config.cache_config.user_specified_block_size:
            vllm_config.cache_config.block_size = 16

    @classmethod
    def get_punica_wrapper(cls) -> str:
        """Return the name of vLLM's LoRA implementation in torch."""
        return "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """Raise no error for several layers with one number: the draft model's layers are numbered separately."""

    @classmethod
    def use_custom_op_collectives(cls) -> bool:
        """Return False: process groups have one rank."""
        return False

    @classmethod
    def opaque_attention_op(cls) -> bool:
        """Return False: attention is called directly, because nothing is compiled."""
        return False
