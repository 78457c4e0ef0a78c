"""Drafts by weights in few bits: the same tokens, and proposers without a draft head say so."""

import shutil
from dataclasses import replace

import pytest
import torch

from outrider import Engine
from outrider.cli.options.models import Speculation
from outrider.device import CapabilityError, ConfigError, KernelSet, QuantizedWeight
from outrider.device.kernels.reference.model import dequantize, spread
from outrider.device.kernels.weight_formats import weight_format
from outrider.engine.setup.resolve import choose_draft_weights
from outrider.model import (
    DRAFT_FORMATS,
    DecoderPlan,
    load_decoder,
    load_through_transformers,
    with_output_head,
)
from outrider.speculative.build import BUILDERS, build_proposer
from outrider.speculative.plugin import DRAFT_HEADS, DRAFTLESS, USES_TARGET_HEAD
from outrider.speculative.proposer import NonSpeculativeProposer
from outrider_cpu.backend import CpuBackend
from outrider_proof.tiny import plain_config
from speculative.test_build import GREEDY, PROMPTS, options
from tiny_checkpoints import rewrite


def made(checkpoints, name, **fields):
    config = plain_config(dtype="float64", draft_tokens=3, max_context=48)
    return Engine.from_checkpoint(
        checkpoints / "target", CpuBackend(), draft_dir=checkpoints / name, speculate=name, config=config, **fields
    )


def drawn_with(proposer):
    """The output head that a proposer draws with."""
    head = proposer.head if hasattr(proposer, "head") else proposer._heads[0]
    return head.output.weights.head


@pytest.mark.sample(1, per="name")
@pytest.mark.parametrize("format", DRAFT_FORMATS)
@pytest.mark.parametrize("name", sorted(USES_TARGET_HEAD))
def test_tokens_are_those_of_plain_decoding(checkpoints, name, format):
    engine = made(checkpoints, name, draft_weights=format)
    assert isinstance(drawn_with(engine.proposer), QuantizedWeight)
    assert drawn_with(engine.proposer).elements is weight_format(format).elements
    assert isinstance(engine.model.weights.head, torch.Tensor)  # what is verified takes it
    said = {choice.name: choice.value for choice in engine.chosen}
    assert said["draft_weights"] == format
    plain = Engine(engine.model, engine.backend, config=engine.config, proposer=NonSpeculativeProposer())
    expected = [result.token_ids for result in plain.generate(PROMPTS, GREEDY)]
    assert [result.token_ids for result in engine.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.parametrize("format", DRAFT_FORMATS)
def test_drafts_come_from_the_copy_and_nothing_else_is_copied(checkpoints, format):
    backend = CpuBackend()
    target = load_decoder(checkpoints / "target", backend=backend, dtype=torch.float32)
    other = with_output_head(target, backend=backend, format=format)
    assert (other.weights.layers, other.weights.embedding) == (target.weights.layers, target.weights.embedding)
    hidden = torch.randn(5, target.config.hidden_size)
    kept = other.weights.head
    plain = dequantize(kept.data, kept.scales, kept.zero_points, kept.format, kept.block, kept.shape, torch.float32)
    largest = (32 if kept.elements.bits == 8 else 4) if kept.elements.is_float else 1  # steps near the largest
    step = largest * spread(kept.scales.float(), kept.block, kept.shape)
    assert ((plain - target.weights.head).abs() <= step * 0.51).all()
    expected = target.kernels.linear_quantized(hidden, other.weights.head)
    torch.testing.assert_close(other.logits(hidden), expected, rtol=0, atol=0)
    assert not torch.equal(other.logits(hidden), target.logits(hidden))


@pytest.mark.parametrize("name", sorted(DRAFT_HEADS))
def test_products_of_the_draft_are_rounded_and_experts_and_norms_are_not(checkpoints, name):
    proposer = build_proposer(name, options(checkpoints, directory=checkpoints / name, weights="int8"))
    head = proposer.head if hasattr(proposer, "head") else proposer._heads[0]
    layer = head.weights.layers[0]
    assert all(isinstance(each, QuantizedWeight) for each in (layer.qkv, layer.output, layer.gate_up, layer.down))
    assert isinstance(layer.mlp_norm, torch.Tensor)
    first = head.weights.fusion
    assert isinstance(first, QuantizedWeight)
    if name not in USES_TARGET_HEAD:  # it has an output head of its own
        assert isinstance(head.weights.head, QuantizedWeight)


@pytest.mark.parametrize("name", sorted(DRAFT_HEADS - USES_TARGET_HEAD))
def test_heads_with_an_output_head_of_their_own_give_the_same_tokens(checkpoints, name):
    engine = made(checkpoints, name, draft_weights="fp8")
    plain = Engine(engine.model, engine.backend, config=engine.config, proposer=NonSpeculativeProposer())
    expected = [result.token_ids for result in plain.generate(PROMPTS, GREEDY)]
    assert [result.token_ids for result in engine.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.parametrize("name", sorted(set(BUILDERS) - DRAFT_HEADS))
def test_proposers_without_a_draft_head_refuse_a_format(checkpoints, name):
    given = options(checkpoints, directory=None if name in DRAFTLESS else checkpoints / name, weights="fp8")
    with pytest.raises(ConfigError, match=f"speculate='{name}' has no draft head; dflash, eagle"):
        build_proposer(name, given)
    if name not in DRAFTLESS:
        with pytest.raises(ConfigError, match=rf"speculate='suffix\+{name}' has no draft head"):
            build_proposer(f"suffix+{name}", given)


class MultipliesQuantized(KernelSet):
    """Kernels that multiply quantised weights themselves."""

    def linear_quantized(self, *operands, **options):
        return super().linear_quantized(*operands, **options)


@pytest.mark.parametrize(
    ("kernels", "dtype", "formats", "chosen"),
    [
        (MultipliesQuantized, torch.bfloat16, {"int8", "fp8", "int4"}, "fp8"),
        (MultipliesQuantized, torch.float16, {"int8", "int4"}, "int8"),
        (MultipliesQuantized, torch.float16, {"int4"}, None),
        (MultipliesQuantized, torch.float32, {"fp8"}, None),
        (KernelSet, torch.bfloat16, {"fp8"}, None),
    ],
)
def test_the_engine_rounds_16_bits_to_8_that_the_kernels_multiply(kernels, dtype, formats, chosen):
    capabilities = replace(CpuBackend().capabilities, quantized_formats=frozenset(formats))
    assert choose_draft_weights(capabilities, kernels(), dtype) == chosen


@pytest.mark.parametrize(("asked", "format"), [(None, "fp8"), ("stored", None), ("int4", "int4")])
def test_the_choice_of_the_engine_and_that_of_the_user(checkpoints, asked, format, monkeypatch):
    monkeypatch.setattr("outrider.engine.setup.loading.choose_draft_weights", lambda *_: "fp8")
    engine = made(checkpoints, "eagle", draft_weights=asked)
    said = [choice.value for choice in engine.chosen if choice.name == "draft_weights"]
    assert said == [asked or format]
    assert isinstance(engine.proposer.head.weights.fusion, QuantizedWeight) is (format is not None)


def test_an_output_head_of_its_own_is_rounded_itself(checkpoints, tmp_path):
    """An EAGLE checkpoint may have another output head than the target's."""
    directory = tmp_path / "eagle"
    shutil.copytree(checkpoints / "eagle", directory)
    target = load_decoder(checkpoints / "target", backend=CpuBackend(), dtype=torch.float32)
    rewrite(directory, lambda tensors: tensors | {"lm_head.weight": -target.weights.head})
    head = build_proposer("eagle", options(checkpoints, directory=directory, weights="int8")).head
    assert head.has_own_output_head
    assert isinstance(head.weights.head, QuantizedWeight)


def test_suffix_decoding_in_front_of_a_head_takes_it(checkpoints):
    first, behind = build_proposer(
        "suffix+eagle", options(checkpoints, directory=checkpoints / "eagle", weights="int8")
    ).parts
    assert drawn_with(behind).format == "int8"
    assert not hasattr(first, "head")


@pytest.mark.parametrize(("name", "format"), [("eagle", "fp4"), ("ngram", "fp8"), ("none", "stored")])
def test_what_cannot_be_is_said_before_the_target_is_read(checkpoints, name, format, monkeypatch):
    monkeypatch.setattr(DecoderPlan, "load", lambda *_: pytest.fail("the target was read"))
    with pytest.raises(ConfigError, match=f"draft_weights is '?{format}"):
        made(checkpoints, name, draft_weights=format)


def test_a_head_that_is_quantised_already_stays_as_it_is(checkpoints):
    given = options(checkpoints, directory=checkpoints / "eagle", weights="fp8")
    kept = weight_format("int8").quantize(given.target.weights.head)
    proposer = build_proposer("eagle", replace(given, target=given.target.with_head(kept)))
    assert drawn_with(proposer) is kept
    assert proposer.head.weights.fusion.format == "fp8"


def test_a_model_through_transformers_keeps_its_head(checkpoints):
    target = load_through_transformers(checkpoints / "target", backend=CpuBackend(), dtype=torch.float32)
    given = options(checkpoints, directory=checkpoints / "eagle", weights="fp8")
    proposer = build_proposer("eagle", replace(given, target=target))
    assert proposer.head.output is target
    assert proposer.head.weights.fusion.format == "fp8"


def test_a_backend_without_kernels_for_it_says_so(checkpoints, monkeypatch):
    given = options(checkpoints, directory=checkpoints / "eagle", weights="fp8")
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
    chosen = Speculation.with_defaults("eagle", model=None, draft=None, draft_tokens=3, draft_weights="fp8")
    assert chosen.without().draft_weights is None
