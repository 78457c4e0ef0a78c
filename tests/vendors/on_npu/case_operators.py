"""Operators of torch that the stages enqueue on this device. ``test_npu_contract.py`` holds them against the wheel."""

from pathlib import Path

import pytest
import torch

from engine.test_vision_requests import Checkpoint
from outrider import Engine, EngineConfig, SamplingParams
from outrider.device import Observer
from outrider.device.kernels.reference import bookkeeping, shaping
from outrider.device.kernels.reference import model as reference
from outrider.model import load_decoder, load_mtp, load_vision, open_head
from outrider.speculative.mtp import MtpProposer
from outrider_cpu.backend import CpuBackend
from tiny_checkpoints import write_mtp
from vendors.on_npu.case_engine import engine_on, fresh

LIST = Path(__file__).resolve().parents[1] / "operators_of_stages.txt"
SAMPLING = SamplingParams(
    max_tokens=4,
    temperature=0.8,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={5: 1.0},
    logprobs=3,
    min_tokens=2,
    seed=3,
)


class Names(Observer):
    def __init__(self):
        self.found = set()

    def launched(self, operation):
        self.found.add(operation.name)


@pytest.fixture
def unfused(monkeypatch):
    """Each operator of the references as the operators that it's made of: those are what a device is asked for."""
    for module in (reference, shaping, bookkeeping):
        for name, function in vars(module).items():
            if (
                callable(function)
                and hasattr(torch.ops.outrider, name)
                and getattr(function, "__module__", "") == module.__name__
            ):
                monkeypatch.setattr(torch.ops.outrider, name, function)


def recorded(run):
    backend = fresh()
    names = Names()
    backend.attach(names)
    try:
        run(backend)
        backend.synchronize()
    finally:
        backend.detach()
    return {name.removeprefix("aten::") for name in names.found if name.startswith("aten::")}


def text(backend):
    for speculate, options in (("none", {}), ("eagle", {}), ("eagle", {"draft_topk": 2}), ("ngram", {"draft_topk": 2})):
        engine = engine_on(backend, speculate=speculate, overlap=True, **options)
        prompt = engine.tokenizer.encode("import os\nimport sys\n")
        engine.generate([prompt, prompt[:3]], SamplingParams(max_tokens=4))
        engine.generate([prompt, prompt[:3]], SAMPLING)


def media(checkpoint, heads):
    def run(backend):
        target = load_decoder(checkpoint.directory, backend=backend, dtype=torch.float32)
        tower = load_vision(checkpoint.directory, backend=backend, dtype=torch.float32)
        own = load_mtp(open_head(heads, target=target, backend=backend, dtype=torch.float32))
        config = EngineConfig(page_size=128, max_context=256, overlap=True, max_requests=2, dtype="float32")
        engine = Engine(target, backend, proposer=MtpProposer(own), config=config, vision=tower)
        prompts = [checkpoint.prompts[name] for name in ("image", "video")]
        engine.generate(
            [tokens for tokens, _ in prompts], SamplingParams(max_tokens=4), media=[media for _, media in prompts]
        )

    return run


def test_the_list_is_what_the_stages_enqueue(unfused, tmp_path):
    """Decoding and verification of text by each kind of draft, with every sampling option; then images, videos and MTP."""
    write_mtp(tmp_path / "mtp")
    vision = Checkpoint(tmp_path / "vision", "qwen2_5_vl", CpuBackend())
    found = {"text": recorded(text), "media": recorded(media(vision, tmp_path / "mtp"))}
    found["media"] -= found["text"]
    written = "".join(f"# {kind}\n" + "".join(f"{name}\n" for name in sorted(names)) for kind, names in found.items())
    assert len(found["text"]) > 60
    (tmp_path / LIST.name).write_text(written)
    assert LIST.read_text() == written, f"the stages enqueue others now: copy {tmp_path / LIST.name} to {LIST}"
