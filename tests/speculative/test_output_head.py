"""Drafts drawn with a copy of the target's output head in few bits: the same tokens, and who has no use for it says so."""

from dataclasses import replace

import pytest
import torch

from outrider import Engine
from outrider.cli.options.models import Speculation
from outrider.device import CapabilityError, ConfigError, QuantizedWeight
from outrider.device.kernels.reference.quantized import dequantize, spread
from outrider.device.kernels.weight_formats import weight_format
from outrider.model import OUTPUT_FORMATS, DecoderPlan, load_decoder, load_through_transformers, with_output_head
from outrider.speculative.build import BUILDERS, build_proposer
from outrider.speculative.plugin import DRAFTLESS, USES_TARGET_HEAD
from outrider.speculative.proposer import NonSpeculativeProposer
from outrider_cpu.backend import CpuBackend
from outrider_proof.tiny import plain_config
from speculative.test_build import GREEDY, PROMPTS, options


def made(checkpoints, name, **fields):
    config = plain_config(dtype="float64", draft_tokens=3, max_context=48)
    return Engine.from_checkpoint(
        checkpoints / "target", CpuBackend(), draft_dir=checkpoints / name, speculate=name, config=config, **fields
    )


def drawn_with(proposer):
    """The output head that a proposer draws with."""
    head = proposer.head if hasattr(proposer, "head") else proposer._heads[0]
    return head.target.weights.head


@pytest.mark.sample(1, per="name")
@pytest.mark.parametrize("format", OUTPUT_FORMATS)
@pytest.mark.parametrize("name", sorted(USES_TARGET_HEAD))
def test_tokens_are_those_of_plain_decoding(checkpoints, name, format):
    engine = made(checkpoints, name, draft_output_head=format)
    assert isinstance(drawn_with(engine.proposer), QuantizedWeight)
    assert drawn_with(engine.proposer).elements is weight_format(format).elements
    assert isinstance(engine.model.weights.head, torch.Tensor)  # what is verified takes it
    said = {choice.name: choice.value for choice in engine.chosen}
    assert said["draft_output_head"] == format
    plain = Engine(engine.model, engine.backend, config=engine.config, proposer=NonSpeculativeProposer())
    expected = [result.token_ids for result in plain.generate(PROMPTS, GREEDY)]
    assert [result.token_ids for result in engine.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.parametrize("format", OUTPUT_FORMATS)
def test_drafts_come_from_the_copy_and_nothing_else_is_copied(checkpoints, format):
    backend = CpuBackend()
    target = load_decoder(checkpoints / "target", backend=backend, dtype=torch.float32)
    other = with_output_head(target, backend=backend, format=format)
    assert (other.weights.layers, other.weights.embedding) == (target.weights.layers, target.weights.embedding)
    hidden = torch.randn(5, target.config.hidden_size)
    kept = other.weights.head
    plain = dequantize(kept.data, kept.scales, kept.zero_points, kept.format, kept.block, kept.shape, torch.float32)
    step = (32 if kept.elements.is_float else 1) * spread(kept.scales, kept.block, kept.shape)
    assert ((plain - target.weights.head).abs() <= step * 0.51).all()
    expected = target.kernels.linear_quantized(hidden, other.weights.head)
    torch.testing.assert_close(other.logits(hidden), expected, rtol=0, atol=0)
    assert not torch.equal(other.logits(hidden), target.logits(hidden))


@pytest.mark.parametrize("name", sorted(set(BUILDERS) - USES_TARGET_HEAD))
def test_proposers_that_draw_otherwise_refuse_it(checkpoints, name):
    given = options(checkpoints, directory=None if name in DRAFTLESS else checkpoints / name, output_head="fp8")
    with pytest.raises(ConfigError, match=f"speculate='{name}' doesn't draw drafts with the target's output head"):
        build_proposer(name, given)
    if name not in DRAFTLESS:
        with pytest.raises(ConfigError, match=rf"speculate='suffix\+{name}' doesn't draw"):
            build_proposer(f"suffix+{name}", given)


def test_suffix_decoding_in_front_of_a_head_takes_it(checkpoints):
    first, behind = build_proposer(
        "suffix+eagle", options(checkpoints, directory=checkpoints / "eagle", output_head="int8")
    ).parts
    assert drawn_with(behind).format == "int8"
    assert not hasattr(first, "head")


def test_an_unknown_format_is_refused(checkpoints):
    with pytest.raises(ConfigError, match="draft_output_head is 'fp4'; expected one of fp8, fp8-tensor, .*, or None"):
        build_proposer("eagle", options(checkpoints, directory=checkpoints / "eagle", output_head="fp4"))


@pytest.mark.parametrize(("name", "format"), [("eagle", "fp4"), ("eagle3", "fp8")])
def test_what_cannot_be_is_said_before_the_target_is_read(checkpoints, name, format, monkeypatch):
    monkeypatch.setattr(DecoderPlan, "load", lambda *_: pytest.fail("the target was read"))
    with pytest.raises(ConfigError, match=f"draft_output_head is '?{format}"):
        made(checkpoints, name, draft_output_head=format)


def test_a_head_that_is_quantised_already_is_refused(checkpoints):
    given = options(checkpoints, directory=checkpoints / "eagle", output_head="fp8")
    target = given.target.with_head(weight_format("int8").quantize(given.target.weights.head))
    with pytest.raises(ConfigError, match="the target's output head is int8.* already; leave draft_output_head out"):
        build_proposer("eagle", replace(given, target=target))


def test_a_model_through_transformers_keeps_its_head(checkpoints):
    backend = CpuBackend()
    target = load_through_transformers(checkpoints / "target", backend=backend, dtype=torch.float32)
    with pytest.raises(ConfigError, match="transformers' own code, whose output head stays as it is"):
        with_output_head(target, backend=backend, format="fp8")


def test_a_backend_without_kernels_for_it_says_so(checkpoints, monkeypatch):
    given = options(checkpoints, directory=checkpoints / "eagle", output_head="fp8")
    declared = replace(given.backend.capabilities, quantized_formats=frozenset({"int8"}))
    monkeypatch.setattr(type(given.backend), "capabilities", declared)
    with pytest.raises(CapabilityError, match=r"is fp8, and backend 'cpu' .* has no kernels for that \(it declares int8\)"):
        build_proposer("eagle", given)


@pytest.mark.parametrize(("columns", "group"), [(256, 128), (192, 64), (96, 32), (48, 16), (40, 8)])
def test_groups_of_four_bits_divide_the_columns(columns, group):
    assert weight_format("int4").fitted(columns).quantize(torch.randn(3, columns)).block == (1, group)


def test_columns_without_groups_are_refused():
    with pytest.raises(ConfigError, match="a weight of 42 columns has no groups in int4: expected columns in multiples of 8"):
        weight_format("int4").fitted(42)


def test_many_rows_are_rounded_some_at_a_time():
    weight = torch.randn(20000, 8)
    whole = weight_format("int8").quantize(weight)
    last = weight_format("int8").quantize(weight[-5:])
    assert torch.equal(whole.data[-5:], last.data)
    assert torch.equal(whole.scales[-5:], last.scales)


def test_plain_decoding_beside_it_has_no_draft_to_draw():
    chosen = Speculation.with_defaults("eagle", model=None, draft=None, draft_tokens=3, draft_output_head="fp8")
    assert chosen.without().draft_output_head is None
