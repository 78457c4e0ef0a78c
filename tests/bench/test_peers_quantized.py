"""Quantised weights beside another engine: what it is told of them, and what is refused."""

import json
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig

from bench.test_bench_peers import WORKED
from outrider.device import QuantizedWeight
from outrider.device.kernels.weight_formats import WEIGHT_FORMATS, weight_format
from outrider.model.quantization import read_quantization
from outrider_bench.limits import iteration_bytes
from outrider_bench.peers.outrider import open_peer
from outrider_bench.peers.work import checkpoint_configs
from outrider_bench.random_checkpoint import compressed_tensors


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_configs_are_valid_and_say_the_format(name, tmp_path):
    given, way = compressed_tensors(name, head=True), weight_format(name)
    (group,) = QuantizationConfig.model_validate(given).config_groups.values()
    weights, inputs = group.weights, group.input_activations
    assert (weights.num_bits, weights.symmetric) == (way.elements.bits, not way.zeros)
    assert (weights.block_structure or [0, 0])[0] == (way.rows if way.rows > 1 else 0)
    assert (weights.group_size or 0) == (0 if way.rows > 1 else way.columns)
    assert (inputs is None) == (way.activations is None)
    assert inputs is None or (inputs.dynamic and (inputs.group_size or 0) == way.activation_group)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": given}))
    assert read_quantization(tmp_path) is not None


def test_an_output_head_is_named_where_it_is_quantised_and_left_out_otherwise():
    for head in (True, False):
        given = compressed_tensors("fp8", head=head)
        (group,) = given["config_groups"].values()
        assert (("lm_head" in group["targets"]), ("lm_head" in given["ignore"])) == (head, not head)


def test_target_and_draft_have_the_same_config_and_a_directory_of_their_own(tmp_path):
    names = set()
    for quantize, head in ((None, False), ("fp8", False), ("fp8", True)):
        directories = checkpoint_configs(work(quantize, head), tmp_path)
        found = [json.loads((each / "config.json").read_text()).get("quantization_config") for each in directories]
        assert found == [quantize and compressed_tensors(quantize, head=head)] * 2
        names.add(directories[0].parent.name)
    assert names == {"tiny-float32", "tiny-float32-fp8", "tiny-float32-fp8-head"}


def work(quantize=None, head=False, **drafts):
    return replace(WORKED, model=replace(WORKED.model, quantize=quantize, quantize_head=head, **drafts))


QUANTIZED = ("--engines", "outrider", "--quantize", "fp8", "--lm-head", "--speculate", "eagle", "--repeat", "1")
SHORT = ("--batch", "1", "--prompt-tokens", "8", "--new-tokens", "8")


@pytest.mark.slow
def test_the_record_says_what_is_quantised(outrider):
    result = outrider("bench", "peers", "--backend", "cpu", "--shape", "tiny", *QUANTIZED, *SHORT, "--json").json
    assert (result["quantize"], result["quantize_head"], result["quantized"]) == ("fp8", True, "fp8, output head too")
    assert [each["status"] for each in result["engines"]] == ["measured"]


@pytest.mark.parametrize("head", [True, False])
def test_this_engine_quantises_target_draft_and_head(head):
    options = {"mode": None, "prefill_chunk": None, "tune_seconds": 0.0}
    with closing(open_peer(work("fp8", head), "eagle", "cpu", options)._engine) as engine:
        target, draft = engine.model.weights, engine.proposer.head.weights
        products = (target.layers[1].qkv, target.layers[1].down, draft.fusion, draft.layers[0].gate_up)
        assert all(isinstance(each, QuantizedWeight) for each in products)
        assert isinstance(target.head, QuantizedWeight) == head


def test_this_engine_drafts_with_weights_in_few_bits():
    """And a limit counts their bytes, once for each drafted token."""
    options, limits, sizes = {"mode": None, "prefill_chunk": None, "tune_seconds": 0.0}, {}, {}
    for format in ("stored", "int8"):
        asked = work(draft_weights=format)
        peer = open_peer(asked, "eagle", "cpu", options)
        with closing(peer._engine) as engine:
            target, head = engine.model.weights, engine.proposer.head
            limits[format] = iteration_bytes(engine, batch=1, context=8)
            assert not any(isinstance(each, QuantizedWeight) for each in (target.head, target.layers[1].qkv))
            assert f"the draft's weights in {format}" in peer.settings
            read = (head.output.weights.head, head.weights.fusion, *products(head.weights.layers[0]))
            assert all(isinstance(each, QuantizedWeight) for each in read) is (format == "int8")
            sizes[format] = sum(each.nbytes for each in read)
    saved = engine.proposer.depth * (sizes["stored"] - sizes["int8"])
    assert limits["stored"] - limits["int8"] == saved > 0
    some = work(draft_vocabulary="16")
    peer = open_peer(some, "eagle", "cpu", options)
    with closing(peer._engine) as engine:
        own, drawn = engine.model.weights.head, engine.proposer.head.output.weights.head
        assert "draft tokens out of 16" in peer.settings
        assert torch.equal(drawn, own[:16])
        saved = engine.proposer.depth * (own.nbytes - drawn.nbytes)
        assert limits["stored"] - iteration_bytes(engine, batch=1, context=8) == saved
    peer = open_peer(work(draft_weights="int8"), "none", "cpu", options)
    with closing(peer._engine):
        assert "the draft's weights" not in peer.settings  # of the runs without drafts


def products(layer):
    return layer.qkv, layer.output, layer.gate_up, layer.down
