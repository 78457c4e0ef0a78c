"""What is done beside the reading of weights."""

import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from triton.runtime import cache

from outrider_triton import plugin
from outrider_triton.launch import hash_compiler


@pytest.fixture
def hashed(monkeypatch):
    """Where the key was asked for, and an event once it was."""
    asked, threads = threading.Event(), []

    def key():
        threads.append(threading.current_thread())
        asked.set()

    monkeypatch.setattr(cache, "triton_key", key)
    return SimpleNamespace(asked=asked, threads=threads)


def test_another_thread_hashes_the_compiler_when_kernels_are_made(hashed, monkeypatch):
    facts = SimpleNamespace(name="NVIDIA H100", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(get_device_properties=lambda device: facts))
    plugin.default_kernels(SimpleNamespace(label="cuda", device=torch.device("cuda")), measured=False)
    assert hashed.asked.wait(60)
    assert hashed.threads != [threading.current_thread()]


def test_a_release_without_such_a_function(monkeypatch):
    monkeypatch.delattr(cache, "triton_key")
    before = threading.active_count()
    hash_compiler()
    assert threading.active_count() == before


def test_the_function_of_this_release_keeps_its_result():
    first = cache.triton_key()
    assert cache.triton_key() is first
