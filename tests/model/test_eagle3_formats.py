"""What EAGLE-3 and 3.1 heads say in their configs: which states they read, and where they norm, against plain torch."""

import json

import pytest
import torch
from safetensors.torch import save_file

from model.harness import Driver
from model.test_eagle3 import TOKENS, norm, reference_head
from model.wrong_configs import WRONG_CONFIGS
from outrider.errors import CheckpointError
from outrider.model import load_decoder, load_eagle3, open_head
from tiny_checkpoints import write_checkpoint, write_eagle3

HIDDEN = 32
NORMS = {"input_norm.weight": (3 * HIDDEN,), **{f"fc_norm.{index}.weight": (HIDDEN,) for index in range(3)}}


def write(tmp_path, config, *, prefix="midlayer", norms=(), envelope=False):
    """A target of 8 layers, and a head whose file says ``config`` besides the usual; its tensors by their plain names."""
    write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=8)
    state = write_eagle3(tmp_path / "head", layers=None)
    torch.manual_seed(11)
    state |= {name: torch.rand(NORMS[name]) + 0.5 for name in norms}
    save_file({key.replace("midlayer", prefix): value for key, value in state.items()}, tmp_path / "head/model.safetensors")
    file = tmp_path / "head/config.json"
    said = json.loads(file.read_text())
    if envelope:
        said = {"speculators_model_type": "eagle3", "draft_vocab_size": 40, "transformer_layer_config": said}
        del said["transformer_layer_config"]["draft_vocab_size"]
    file.write_text(json.dumps(said | config))
    return state


def load(tmp_path, backend):
    target = load_decoder(tmp_path / "target", backend=backend, dtype=torch.float32)
    return target, load_eagle3(open_head(tmp_path / "head", target=target, backend=backend, dtype=torch.float32))


def check(tmp_path, backend, state, layers, *, before_fc=False, each=False, before_residual=False, output=False):
    """What the head makes of prompt and two draft steps is what plain torch makes."""
    target, head = load(tmp_path, backend)
    assert head.aux_hidden_state_layers == layers
    driver = Driver(target)
    inputs = driver.inputs([(driver.sequence(), TOKENS)])
    with torch.no_grad():
        final, captured = target.forward_with_aux_hidden_states(inputs, driver.cache, head.aux_hidden_state_layers)
        states = [norm(x, state[f"fc_norm.{index}.weight"]) if each else x for index, x in enumerate(captured)]
        joined = torch.cat(states, -1)
        joined = norm(joined, state["input_norm.weight"]) if before_fc else joined
        hidden = head.condition(final, captured)
        torch.testing.assert_close(hidden, joined @ state["fc.weight"].T, atol=1e-4, rtol=1e-4)
        draft, tokens = Driver(target, config=head.config), [*TOKENS[1:], 12]
        sequence = draft.sequence()
        made = head.forward(draft.inputs([(sequence, tokens)]), hidden, draft.cache)
        known = hidden
        for token in (70, 3):
            embedding = target.weights.embedding
            expected = reference_head(state, torch.tensor(tokens), known, embedding, before_residual=before_residual)
            normed = norm(expected, state["norm.weight"])
            expected = normed if output else expected
            torch.testing.assert_close(made[-1], expected[-1], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(head.logits(made)[-1], (normed @ state["lm_head.weight"].T)[-1], atol=1e-3, rtol=1e-4)
            tokens, known = [*tokens, token], torch.cat((known, expected[-1:]))
            made = head.forward(draft.inputs([(sequence, [token])]), made[-1:], draft.cache)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, (1, 3, 6)),
        ({"aux_hidden_state_layer_ids": [6, 0, 2]}, (6, 0, 2)),
        ({"target_layer_ids": [1, 3, 6]}, (2, 4, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 3, 6]}}, (0, 4, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}, (2, 4, 8)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, (2, 4, 5)),
        ({"target_layer_ids": [0, 2, 5], "eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, (1, 3, 6)),
        ({}, (2, 4, 5)),
    ],
)
def test_the_states_that_the_config_names(tmp_path, backend, config, layers):
    check(tmp_path, backend, write(tmp_path, config), layers)


@pytest.mark.sample(8)
@pytest.mark.parametrize("prefix", ["midlayer", "layers.0"])
@pytest.mark.parametrize(
    ("config", "norms", "told"),
    [
        ({"norm_before_fc": True}, ["input_norm.weight"], {"before_fc": True}),
        ({"eagle_config": {"norm_before_fc": True}}, ["input_norm.weight"], {"before_fc": True}),
        ({}, ["input_norm.weight"], {"before_fc": True}),
        ({"fc_norm": True}, [f"fc_norm.{index}.weight" for index in range(3)], {"each": True}),
        ({"fc_norm": True, "norm_before_fc": True}, list(NORMS), {"each": True, "before_fc": True}),
        ({"norm_before_residual": True}, [], {"before_residual": True}),
        ({"norm_output": True}, [], {"output": True}),
        ({"norm_output": True, "norm_before_residual": True}, [], {"output": True, "before_residual": True}),
    ],
)
def test_where_the_config_norms(tmp_path, backend, prefix, config, norms, told):
    check(tmp_path, backend, write(tmp_path, config, prefix=prefix, norms=norms), (2, 4, 5), **told)


def test_the_envelope_of_speculators(tmp_path, backend):
    said = {"norm_before_residual": True, "norm_output": True, "norm_before_fc": True, "fc_norm": False}
    said |= {"eagle_aux_hidden_state_layer_ids": [1, 4, 7], "target_hidden_size": None}
    state = write(tmp_path, said, prefix="layers.0", norms=["input_norm.weight"], envelope=True)
    check(tmp_path, backend, state, (1, 4, 7), before_fc=True, before_residual=True, output=True)


@pytest.mark.parametrize(("config", "options", "message"), WRONG_CONFIGS["eagle3"])
def test_what_is_refused(tmp_path, backend, config, options, message):
    write(tmp_path, config, **options)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path, backend)
    assert str(tmp_path / "head") in str(caught.value)
