"""Layouts of published checkpoints that differ from what transformers writes: the tokens are those of transformers, plain and
with drafts."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.harness import Driver
from outrider import Engine, SamplingParams
from outrider.device import ConfigError
from outrider.errors import CheckpointError
from outrider.model import load_decoder
from outrider.model.inputs import KeptRows
from outrider_cpu.backend import CpuBackend
from outrider_proof.checkpoints import (
    write_checkpoint,
    write_dflash,
    write_eagle,
    write_eagle3,
    write_mtp,
    write_peagle,
)
from outrider_proof.tiny import plain_config

PROMPTS, COUNT = [[5, 6, 7, 8, 5, 6], [9]], 10
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)


def rewrite(directory, change, **config):
    """Apply ``change`` to a dictionary of the checkpoint's tensors and write the result; ``config`` replaces fields."""
    state = {key: value.clone() for key, value in load_file(directory / "model.safetensors").items()}
    state = change(state) or state
    save_file({key: value.contiguous() for key, value in state.items()}, directory / "model.safetensors")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def oracle(model):
    """Return the greedy tokens of transformers' model in float64."""
    model, found = model.double(), []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        for _ in range(COUNT):
            with torch.no_grad():
                logits = model(tokens, use_cache=False).logits[0, -1]
            tokens = torch.cat((tokens, logits.argmax().view(1, 1)), dim=1)
        found.append(tuple(tokens[0, len(prompt) :].tolist()))
    return found


def engine_of(directory, speculate="none", *, draft=None, max_context=48, **options):
    config = plain_config(dtype="float64", draft_tokens=3, max_context=max_context)
    return Engine.from_checkpoint(directory, CpuBackend(), draft_dir=draft, speculate=speculate, config=config, **options)


def tokens_of(engine):
    return [result.token_ids for result in engine.generate(PROMPTS, GREEDY)]


def check(directory, model, speculate="draft-model", *, draft=None, **options):
    """Compare with transformers' ``model``, plain and with drafts: by default the checkpoint drafts for itself."""
    expected = oracle(model)
    assert tokens_of(engine_of(directory, **options)) == expected
    draft = directory if speculate == "draft-model" and draft is None else draft
    drafting = engine_of(directory, speculate, draft=draft, **options)
    assert tokens_of(drafting) == expected
    return drafting


# -- heads of multi-token prediction inside the model's checkpoint ---------------------------------------------------


def write_mimo(directory):
    """Write a MiMo checkpoint: Qwen2's decoder and heads of multi-token prediction. Return transformers' Qwen2 model."""
    model = write_checkpoint(directory, "qwen2")
    heads = write_mtp(directory / "heads")
    rewrite(
        directory,
        lambda state: state | heads,
        model_type="mimo",
        architectures=["MiMoForCausalLM"],
        num_nextn_predict_layers=2,
        attention_bias=True,
        head_dim=8,
        auto_map={"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"},
    )
    return model


@pytest.fixture(scope="module")
def mimo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mimo")
    return directory, write_mimo(directory)


def test_mimo_drafts_with_the_heads_in_its_own_checkpoint(mimo):
    directory, model = mimo
    inside = check(directory, model, "mtp")
    outside = engine_of(directory, "mtp", draft=directory / "heads")
    assert inside.proposer.depth == outside.proposer.depth == 2
    for mine, other in zip(inside.proposer._heads, outside.proposer._heads, strict=True):
        assert torch.equal(mine.weights.projection, other.weights.projection)


def test_heads_inside_are_checked(mimo, tmp_path):
    directory, _ = mimo
    for path in ("config.json", "model.safetensors"):
        (tmp_path / path).write_bytes((directory / path).read_bytes())
    rewrite(tmp_path, lambda state: state | {"model.mtp_layers.0.extra": torch.zeros(1)})
    engine_of(tmp_path)
    with pytest.raises(CheckpointError, match="not expected: 'model.mtp_layers.0.extra'"):
        engine_of(tmp_path, "mtp")


def test_a_model_without_heads_is_refused_before_it_is_read(tmp_path):
    write_checkpoint(tmp_path, "llama")
    read = []
    with pytest.raises(CheckpointError, match=r"has no heads of multi-token prediction; expected tensors model\.mtp_layers"):
        engine_of(tmp_path, "suffix+mtp", progress=lambda *told: read.append(told))
    assert read == []


# -- EAGLE and EAGLE-3 heads -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    return directory, write_checkpoint(directory, "llama", num_hidden_layers=4)


def without(*names):
    return lambda state: {key: value for key, value in state.items() if key not in names}


def test_eagle3_without_an_output_head_takes_the_targets(target, tmp_path):
    directory, model = target
    write_eagle3(tmp_path, draft_vocab=96)
    rewrite(tmp_path, without("lm_head.weight", "d2t", "t2d"))
    head = check(directory, model, "eagle3", draft=tmp_path).proposer.head
    hidden = torch.randn(2, 32, dtype=torch.float64)
    normed = head.kernels.rms_norm(hidden, head.weights.norm, head.config.rms_eps)
    assert torch.equal(head.logits(hidden), head.target.logits(normed))


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, (1, 2, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]}}, (2, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, (2, 3, 4)),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ()),
    ],
)
def test_eagle3_reads_the_states_that_its_producer_means(target, tmp_path, fields, layers):
    """Numbers in eagle_config count outputs of layers if the first one is 1, else inputs; 4 is the output of all layers."""
    directory, model = target
    write_eagle3(tmp_path, layers=None)
    rewrite(tmp_path, lambda state: None if layers else without("fc.weight")(state), **fields)
    engine = check(directory, model, "eagle3", draft=tmp_path)
    assert engine.proposer.aux_hidden_state_layers == layers
    assert engine.proposer.reads_hidden is (layers == ())


def test_the_output_of_the_last_layer_is_the_state_before_the_final_norm(target):
    """Also for a prompt whose last layer keeps the last rows alone."""
    directory, model = target
    decoder = load_decoder(directory, backend=CpuBackend(), dtype=torch.float64)
    driver = Driver(decoder)
    inputs = driver.inputs([(driver.sequence(), [5, 6, 7]), (driver.sequence(), [8, 9])])
    kept = KeptRows.last_of_each(inputs.attention, torch.tensor([2, 4]))
    with torch.no_grad():
        whole, (first, last) = decoder.forward_with_aux_hidden_states(inputs, driver.cache, (2, 4))
        rows, (_, again) = decoder.forward_with_aux_hidden_states(replace(inputs, kept=kept), driver.cache, (2, 4))
        states = model.double().model(torch.tensor([[5, 6, 7]]), output_hidden_states=True)
    torch.testing.assert_close(first[:3], states.hidden_states[2][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(decoder.kernels.rms_norm(last, decoder.weights.norm, decoder.config.rms_eps), whole)
    torch.testing.assert_close(whole[:3], states.last_hidden_state[0], atol=1e-4, rtol=1e-4)
    assert torch.equal(again, last)
    assert torch.equal(rows, whole[[2, 4]])


@pytest.mark.parametrize("copy", [True, False])
def test_eagle_with_an_output_head(target, tmp_path, copy):
    """A copy of the target's takes no memory; another one drafts."""
    directory, model = target
    write_eagle(tmp_path)
    own = load_file(directory / "model.safetensors")["lm_head.weight"]
    own = own if copy else own.flip(0)
    rewrite(tmp_path, lambda state: state | {"lm_head.weight": own})
    head = check(directory, model, "eagle", draft=tmp_path).proposer.head
    assert (head.weights.head is None) is copy
    hidden = torch.randn(2, 32, dtype=torch.float64)
    torch.testing.assert_close(head.logits(hidden), hidden @ own.double().T)
    if copy:
        tokens_of(engine_of(directory, "eagle", draft=tmp_path, draft_vocabulary=40))
    else:
        with pytest.raises(ConfigError, match="has another one of its own"):
            engine_of(directory, "eagle", draft=tmp_path, draft_vocabulary=40)


def test_a_draft_token_that_is_listed_twice_is_refused(target, tmp_path):
    """Its probability would count once in verification, and twice in sampling."""
    directory, _ = target
    write_eagle3(tmp_path)
    rewrite(tmp_path, lambda state: state["d2t"].__setitem__(1, state["d2t"][0] - 1))
    with pytest.raises(CheckpointError, match=r"'d2t' points to token \d+ more than once \(1 repetitions"):
        engine_of(directory, "eagle3", draft=tmp_path)


@pytest.mark.parametrize("speculate", ["eagle", "eagle3", "dflash", "peagle", "mtp", "draft-model"])
def test_a_draft_of_another_kind_is_refused_by_its_name(target, tmp_path, speculate):
    directory, _ = target
    writers = {"eagle": write_eagle, "eagle3": write_eagle3, "peagle": write_peagle, "dflash": write_dflash, "mtp": write_mtp}
    for kind, write in writers.items():
        write(tmp_path / kind)
        if kind != speculate:
            name = "no heads of multi-token" if speculate == "mtp" else f"a draft for speculate '{kind}', not '{speculate}'"
            with pytest.raises(CheckpointError, match=name):
                engine_of(directory, speculate, draft=tmp_path / kind)
