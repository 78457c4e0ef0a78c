"""Scopes of the emulated device."""

import torch

from torch_npu.npu.streams import Stream, as_npu, machine


def get_cann_version(module="CANN"):
    return "emulated"


def synchronize(device=None):
    with as_npu("ACL device synchronize"):
        machine().synchronize_device()


class device:  # noqa: N801
    def __init__(self, device):
        self.idx = device.index if isinstance(device, torch.device) else device

    def __enter__(self):
        if self.idx not in (None, 0):
            raise RuntimeError(f"Invalid device id {self.idx}")

    def __exit__(self, *args):
        return False


def current_stream(device=None):
    return Stream.of(machine().stream)


def default_stream(device=None):
    return Stream.of(machine().default)


def set_stream(stream):
    if stream is not None:
        machine().set_stream(stream.queue)


class StreamContext:
    def __init__(self, stream_ctx):
        self.stream = stream_ctx

    def __enter__(self):
        if self.stream is not None:
            self.src_prev_stream = current_stream()
            set_stream(self.stream)

    def __exit__(self, exec_type, exec_value, traceback):
        if self.stream is not None:
            set_stream(self.src_prev_stream)


def stream(stream):
    return StreamContext(stream)
