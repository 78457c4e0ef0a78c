"""One unmodified vLLM 0.26 in this process: a small random Llama decodes, speculating. A child of ``vllm_on_device.py``.

    python vllm_decoding.py FOLDER NAME RUNNER METHOD GRAPHS [PLANT]

RUNNER ``v1`` or ``v2`` (model runner), METHOD ``eagle``, ``ngram_gpu`` or ``none``, GRAPHS ``graphs`` or ``eager``. What it
learns is kept in ``FOLDER/NAME.json`` as it goes, so that a process that is ended says how far it came. PLANT takes an
ordering out of vLLM: a call is skipped where it's made from one function of one file of vLLM.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import importlib.util
import json
import os
import re
import signal
import sys
import time
import types
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, HEADS, VOCABULARY, DRAFTED, REQUESTS, TOKENS = 4, 256, 4, 4096, 3, 4, 96
PLANTS = {
    # The copy of the sampled tokens no longer waits for the sampler.
    "copy": ("Stream", "wait_stream", {"v2": ("gpu/async_utils.py", "__init__"), "v1": ("gpu_model_runner.py", "__init__")}),
    # The host no longer waits for that copy.
    "await": (
        "Event", "synchronize", {"v2": ("gpu/async_utils.py", "get_output"), "v1": ("gpu_model_runner.py", "get_output")},
    ),
}  # fmt: skip
LOCK_S = 90.0


class Said:
    """What is known so far, in a file."""

    def __init__(self, file: Path) -> None:
        self.file, self.begun, self.known = file, time.monotonic(), {}

    def __call__(self, phase: str, **known: Any) -> None:
        self.known |= {"phase": phase, **known}
        self.known.setdefault("at", {})[phase] = round(time.monotonic() - self.begun, 1)
        self.file.write_text(json.dumps(self.known, default=str))


def configuration(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCABULARY, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def checkpoint(folder: Path, layers: int) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(configuration(layers)))
    return str(folder)


def stand_in_for_kernels() -> str:
    """Where vLLM's compiled kernels aren't installed: Triton and torch do their work. Says which there are."""
    # vLLM isn't imported yet: its platform imports the kernels.
    package = Path(next(iter(importlib.util.find_spec("vllm").submodule_search_locations)))
    if not list((package / "vllm_flash_attn").glob("_vllm_fa*.so")):  # imported by every model, used by none here
        sys.modules["vllm.vllm_flash_attn._vllm_fa3_C"] = types.ModuleType("vllm.vllm_flash_attn._vllm_fa3_C")
    if list(package.glob("_C_stable_libtorch*.so")):
        return "compiled"
    import torch

    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
    # Files that are imported name operators, for passes of a compiler that isn't used here. They must exist.
    texts = [file.read_text(errors="replace") for file in package.rglob("*.py")]
    named = {found for text in texts for found in re.findall(r"torch\.ops\.(_C|_moe_C|_C_cache_ops)\.(\w+)\.default", text)}
    faked = {
        found for text in texts for found in re.findall(r"register_fake\(\"(_C|_moe_C|_C_cache_ops)::(\w+)\.(\w+)\"", text)
    }
    named |= {(space, f"{name}.{form}") for space, name, form in faked if (space, name) in named}
    keep = []
    for space, name in sorted(named):
        keep.append(torch.library.Library(space, "FRAGMENT"))
        keep[-1].define(f"{name}() -> ()")
    asked = {found for text in texts for found in re.findall(r"torch\.ops\._C\.(\w*support\w*)\(", text)}
    for name in sorted(asked):  # whether a device can do something
        keep.append(torch.library.Library("_C", "FRAGMENT"))
        keep[-1].define(f"{name}(int capability) -> bool")
        keep[-1].impl(name, lambda capability: False, "CompositeExplicitAutograd")
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("get_cuda_view_from_cpu_tensor(Tensor cpu_tensor) -> Tensor")
    library.impl("get_cuda_view_from_cpu_tensor", mapped, "CPU")
    stand_in_for_kernels.keep = (*keep, library)
    return f"none compiled ({len(named)} named)"


def models() -> None:
    """The two model classes, imported here: vLLM would do it in a process that has no stand-ins."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM

    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
    ModelRegistry.register_model("EagleLlamaForCausalLM", EagleLlamaForCausalLM)


def mapped(tensor: Any) -> Any:
    """The same pinned bytes as a tensor of the device."""
    import torch

    shape = (tensor.numel() * tensor.element_size(),)
    made = types.SimpleNamespace(
        __cuda_array_interface__={"shape": shape, "typestr": "|u1", "data": (tensor.data_ptr(), False), "version": 3},
        kept=tensor,
    )
    return torch.as_tensor(made, device="cuda").view(tensor.dtype).view(tensor.shape)


def nvml() -> str:
    """Why vLLM doesn't find the device, as far as NVML tells."""
    from vllm.utils.import_utils import import_pynvml

    module = import_pynvml()
    try:
        module.nvmlInit()
        return f"{module.nvmlDeviceGetCount()} devices"
    except Exception as error:
        return repr(error)


def plant(name: str, runner: str) -> Callable[[], int]:
    """Take an ordering out; the result says how often it was missed."""
    import torch

    kind, call, places = PLANTS[name]
    owner, (file, function) = getattr(torch.cuda, kind), places[runner]
    before, skipped = getattr(owner, call), [0]

    def skips(self: Any, *args: Any, **kwargs: Any) -> Any:
        code = sys._getframe(1).f_code
        if code.co_name == function and code.co_filename.endswith(file):
            skipped[0] += 1
            return None
        return before(self, *args, **kwargs)

    setattr(owner, call, skips)
    return lambda: skipped[0]


@contextlib.contextmanager
def alone(folder: Path) -> Generator[dict[str, Any]]:
    """One process at a time is timed, while others start: with a lock, which the system opens when its holder ends."""
    import fcntl

    until, begun, exclusive = time.monotonic() + LOCK_S, time.monotonic(), False
    with (folder / "lock").open("w") as file:
        while not exclusive and time.monotonic() < until:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                exclusive = True
            except BlockingIOError:
                time.sleep(0.05)
        yield {"alone": exclusive, "waited_s": round(time.monotonic() - begun, 1)}


def overdue(*_: Any) -> None:
    raise TimeoutError("the time for this stage is over")


def arguments(folder: Path, method: str, graphs: bool, kernels: str) -> dict[str, Any]:
    """What vLLM's engine is given."""
    compilation: dict[str, Any] = {"mode": 0, "cudagraph_mode": "FULL" if graphs else "NONE"}
    if graphs:
        compilation["cudagraph_capture_sizes"] = [1, 2, 4, 8, 16]
    if kernels != "compiled":
        compilation["custom_ops"] = ["none"]
    given: dict[str, Any] = {
        "model": checkpoint(folder / "target", LAYERS), "load_format": "dummy", "skip_tokenizer_init": True,
        "dtype": "bfloat16", "generation_config": "vllm",
        "max_model_len": 512, "max_num_seqs": REQUESTS, "max_num_batched_tokens": 512, "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 256 << 20, "async_scheduling": True, "attention_backend": "TRITON_ATTN", "seed": 0,
        "compilation_config": compilation, "enforce_eager": not graphs, "disable_log_stats": True,
    }  # fmt: skip
    if method == "eagle":
        given["speculative_config"] = {
            "method": "eagle", "model": checkpoint(folder / "draft", 1), "num_speculative_tokens": DRAFTED,
        }  # fmt: skip
    elif method == "ngram_gpu":
        given["speculative_config"] = {
            "method": "ngram_gpu", "num_speculative_tokens": DRAFTED, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
        }  # fmt: skip
    return given


def main(folder: Path, name: str, runner: str, method: str, graphs: str, planted: str = "") -> None:
    said = Said(folder / f"{name}.json")
    said("began")
    faulthandler.enable()
    limit = int(float(os.environ.get("VLLM_DECODING_LIMIT", "200")))
    faulthandler.dump_traceback_later(limit, exit=False)  # where it hangs
    signal.signal(signal.SIGALRM, overdue)
    signal.alarm(limit + 1)  # so that who watches still says what it saw
    import torch

    said("torch", torch=torch.__version__, device=torch.cuda.get_device_name(0))
    kernels = stand_in_for_kernels()
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        raise RuntimeError(f"vLLM runs on {type(current_platform).__name__}, not on CUDA: {nvml()}")
    if kernels != "compiled":
        models()
    said("vllm", vllm=vllm.__version__, kernels=kernels)
    from vllm import LLM, SamplingParams

    engine = LLM(**arguments(folder, method, graphs == "graphs", kernels))
    settings = engine.llm_engine.vllm_config
    said(
        "engine",
        asynchronous=settings.scheduler_config.async_scheduling,
        v2=settings.use_v2_model_runner,
        graphs=str(settings.compilation_config.cudagraph_mode),
        core=type(engine.llm_engine.engine_core).__name__,
    )
    steps, step = [0], engine.llm_engine.step

    def counted() -> Any:
        steps[0] += 1
        return step()

    engine.llm_engine.step = counted
    prompts = [{"prompt_token_ids": [3 + (7 * n + k) % 50 for k in range(6 + 9 * n)]} for n in range(REQUESTS)]

    def decode(count: int) -> Any:
        greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        return engine.generate(prompts, greedy, use_tqdm=False)

    decode(8)  # what compiles, compiles now
    torch.cuda.synchronize()
    skipped = plant(planted, runner) if planted else int
    said("warm")
    with alone(folder) as how:
        said("timed", **how)
        steps[0], begun = 0, time.perf_counter()
        results = decode(TOKENS)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    tokens = [list(each.outputs[0].token_ids) for each in results]
    said(
        "decoded",
        seconds=round(seconds, 4),
        steps=steps[0],
        ms_a_step=round(1e3 * seconds / max(1, steps[0]), 3),
        tokens=sum(map(len, tokens)),
        hash=hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:12],
        skipped=skipped(),
    )
    with contextlib.suppress(Exception):
        engine.llm_engine.engine_core.shutdown()
    said("over")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
