"""Compile two kernels in worker processes for a device that isn't here: ``workers_child.py [broken]``.

Prints one JSON line: for each compilation in this process its kernel and True if the cache had it, the workers that were
started in each of two rounds, those that still run, and the kernels that threads loaded. ``broken``: workers end at once.
"""

import json
import subprocess
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from outrider_triton import workers
from outrider_triton.jit import rows
from outrider_triton.launch import compile_only, launch


class Driver:
    """The part of a driver that a compilation asks, and a device that notes the kernels it gets."""

    def __init__(self):
        self.loaded = []
        self.utils, self.launcher_cls = self, lambda source, metadata: metadata
        self.set_current_device = self.get_device_properties = lambda device: {"max_shared_mem": 227 << 10}
        self.load_binary = lambda name, *others: self.loaded.append(name) or (1, 2, 32, 0, 1024)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0 * device

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


class Noted(subprocess.Popen):
    """A process that is noted if it is a worker."""

    started: list = []  # noqa: RUF012

    def __init__(self, command, *args, **more):
        if "outrider_triton.workers" in command:
            self.started.append(self)
            if sys.argv[1:] == ["broken"]:
                command = [sys.executable, "-c", "pass"]
        super().__init__(command, *args, **more)


def main():
    driver = Driver()
    triton.runtime.driver.set_active(driver)
    subprocess.Popen = Noted
    compiled, counts = [], []
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **more: compiled.append((src.name, cache_hit))
    called = [each for each in vars(rows).values() if isinstance(each, JITFunction) and each is not rows.silu_mul]
    assert all(each.cache_key for each in called)  # so that Triton hashes silu_mul otherwise than a fresh process does
    for _ in range(2):
        rows.silu_mul.device_caches.clear()
        with workers.compiling(processors=4), compile_only():
            for dtype in (torch.bfloat16, torch.float32):
                operands = torch.zeros(4, 128, dtype=dtype), torch.zeros(4, 64, dtype=dtype), None, 64, 64
                launch(rows.silu_mul, (4, 1), *operands, pdl=True, PLANES=False, BLOCK=64)
        counts.append(len(Noted.started))
    running = sum(each.poll() is None for each in Noted.started)
    print(json.dumps({"compiled": compiled, "workers": counts, "running": running, "loaded": driver.loaded}))


if __name__ == "__main__":
    main()
