"""Proposers by name, from checkpoints on disk: the right tokens, and errors that name what is wrong."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.harness import Driver
from outrider import Engine, SamplingParams
from outrider.device import ConfigError
from outrider.errors import CheckpointError
from outrider.model import load_decoder, load_mtp, open_head, with_vocabulary_size
from outrider.speculative.build import BUILDERS, DraftOptions, build_proposer
from outrider.speculative.proposer import NonSpeculativeProposer
from outrider_cpu.backend import CpuBackend
from outrider_proof.tiny import plain_config
from tiny_checkpoints import tiny_config, word_tokenizer, write_checkpoint
from tiny_vision_checkpoints import write_vision_checkpoint

PROMPTS = [[1, 5, 9, 13], [7], [3, 3, 3, 3, 3, 3]]
CHAINS = ("dflash", "peagle", "suffix")
"""Proposers without trees."""
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.mark.sample(6)
@pytest.mark.parametrize(("name", "topk"), [(n, k) for n in sorted(BUILDERS) for k in (1, 3) if k == 1 or n not in CHAINS])
def test_every_name_builds_a_proposer_that_changes_no_token(checkpoints, name, topk):
    config = plain_config(dtype="float64", draft_tokens=3, draft_topk=topk, max_context=48)
    directory = checkpoints / name
    draft = directory if directory.exists() else None
    engine = Engine.from_checkpoint(checkpoints / "target", CpuBackend(), draft_dir=draft, speculate=name, config=config)
    assert engine.proposer.name == name
    assert engine.proposer.is_tree == (topk > 1 and name != "none")
    plain = Engine(engine.model, engine.backend, config=config, proposer=NonSpeculativeProposer())
    expected = [result.token_ids for result in plain.generate(PROMPTS, GREEDY)]
    assert [result.token_ids for result in engine.generate(PROMPTS, GREEDY)] == expected


def options(checkpoints, **fields):
    backend = CpuBackend()
    target = load_decoder(checkpoints / "target", backend=backend, dtype=torch.float32)
    defaults = {"target": target, "backend": backend, "dtype": torch.float32, "directory": None, "draft_tokens": 3}
    return DraftOptions(**defaults | fields)


def test_unknown_names_and_missing_checkpoints_are_refused(checkpoints):
    with pytest.raises(
        ConfigError,
        match="speculate is 'medusa'; expected one of dflash, draft-model, eagle, eagle3, mtp, ngram, none, peagle, suffix",
    ):
        build_proposer("medusa", options(checkpoints))
    for name in ("dflash", "eagle", "eagle3", "mtp", "peagle", "draft-model"):
        with pytest.raises(ConfigError, match=f"speculate='{name}' needs the directory"):
            build_proposer(name, options(checkpoints))


def test_a_plugin_may_add_a_name(checkpoints):
    made = build_proposer("mine", options(checkpoints), builders={"mine": lambda _: NonSpeculativeProposer()})
    assert isinstance(made, NonSpeculativeProposer)


def test_suffix_decoding_drafts_as_many_tokens_as_the_heads_behind_it(checkpoints):
    made = build_proposer("suffix+mtp", options(checkpoints, directory=checkpoints / "mtp", draft_tokens=4))
    assert (made.name, made.depth, [part.depth for part in made.parts]) == ("suffix+mtp", 2, [2, 2])
    with pytest.raises(ConfigError, match="'none' drafts nothing"):
        build_proposer("suffix+mine", options(checkpoints), builders={"mine": lambda _: NonSpeculativeProposer()})


@pytest.mark.parametrize(
    ("name", "fields", "match"),
    [
        ("suffix+eagle", {"topk": 2}, "draft_topk is 2, but speculate='suffix.eagle' drafts chains"),
        (
            "suffix+none",
            {},
            "speculate is 'suffix.none'; expected one of .*, eagle3, mtp, peagle after",
        ),
        ("suffix+medusa", {}, "speculate is 'suffix.medusa'"),
        ("suffix", {"topk": 2}, "draft_topk is 2, but speculate='suffix' drafts chains"),
        ("peagle", {"topk": 2}, "draft_topk is 2, but speculate='peagle' drafts chains"),
        ("peagle", {"draft_tokens": 64}, "draft_tokens is 64; expected 1 to 63 from a P-EAGLE head"),
    ],
)
def test_options_that_do_not_go_together_are_refused(checkpoints, name, fields, match):
    with pytest.raises(ConfigError, match=match):
        build_proposer(name, options(checkpoints, directory=checkpoints / name, **fields))


def words(directory, count):
    """A tokenizer of so many tokens beside a checkpoint."""
    word_tokenizer([f"t{token}" for token in range(count)]).save(str(directory / "tokenizer.json"))


@pytest.mark.parametrize(
    ("rows", "used", "match"),
    [
        (64, None, "vocab_size is 64, the target's is 96: .* no tokenizer says which are used"),
        (104, 97, "vocab_size is 104, the target's is 96: .* the draft's tokenizer has 97"),
        (92, 93, "vocab_size is 92, the target's is 96: .* the draft's tokenizer has 93"),
    ],
)
def test_a_draft_model_of_another_vocabulary_is_refused(checkpoints, tmp_path, rows, used, match):
    write_checkpoint(tmp_path / "other", "llama", num_hidden_layers=1, vocab_size=rows)
    if used is not None:
        words(tmp_path / "other", used)
    with pytest.raises(CheckpointError, match=match):
        build_proposer("draft-model", options(checkpoints, directory=tmp_path / "other"))


def test_a_hybrid_draft_model_drafts_no_trees(checkpoints, tmp_path):
    write_vision_checkpoint(tmp_path / "hybrid", "qwen3_5")
    with pytest.raises(ConfigError, match=r"draft_topk is 2, and .*hybrid has recurrent layers: each branch"):
        build_proposer("draft-model", options(checkpoints, directory=tmp_path / "hybrid", topk=2))


@pytest.mark.parametrize("tied", [False, True])
def test_rows_that_lack_are_never_the_likeliest(tmp_path, tied):
    """Whatever the rows that are there say of a state."""
    write_checkpoint(tmp_path, "llama", tie_word_embeddings=tied)
    words(tmp_path, 90)
    backend = CpuBackend()
    model = load_decoder(tmp_path, backend=backend, dtype=torch.float64)
    made = with_vocabulary_size(model, 100, directory=tmp_path, backend=backend)
    hidden = torch.randn(5, model.config.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    logits = made.logits(hidden)
    assert torch.equal(logits[:, :96], model.logits(hidden))
    assert torch.equal(logits[:, 96:], torch.full((5, 4), -torch.inf, dtype=torch.float64))
    assert torch.equal(made.embed(torch.arange(96)), model.embed(torch.arange(96)))


@pytest.mark.sample(1, per="topk")
@pytest.mark.parametrize("rows", [92, 96, 104])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("topk", [1, 2])
def test_a_draft_model_may_differ_in_rows_that_no_token_uses(tmp_path, rows, tied, topk):
    """The target drafts for itself, with fewer rows or more: as much is accepted as with the same."""
    write_checkpoint(tmp_path / "target", "llama", vocab_size=96, tie_word_embeddings=tied, seed=5)
    state = load_file(tmp_path / "target" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in state:
            more = 9 * torch.ones(max(rows - 96, 0), state[name].shape[1])  # would be likelier than any other
            state[name] = torch.cat((state[name][:rows], more))
    (tmp_path / "draft").mkdir()
    save_file(state, tmp_path / "draft" / "model.safetensors")
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    words(tmp_path / "draft", 90)
    backend = CpuBackend()
    target = load_decoder(tmp_path / "target", backend=backend, dtype=torch.float64)
    parts = {"target": target, "backend": backend, "dtype": torch.float64, "draft_tokens": 3, "topk": topk}
    prompts, params = [(3, 1, 4), (2, 7)], SamplingParams(max_tokens=21, ignore_eos=True)
    plain = Engine(target, backend, proposer=NonSpeculativeProposer(), config=plain_config(dtype="float64")).generate(
        prompts, params
    )
    drafted, as_many = (
        Engine(
            target,
            backend,
            proposer=build_proposer("draft-model", DraftOptions(directory=tmp_path / name, **parts)),
            config=plain_config(dtype="float64"),
        ).generate(prompts, params)
        for name in ("draft", "target")
    )
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert all(token < 92 for each in plain for token in each.token_ids), "drawn so that a shorter table has them all"
    assert [each.iterations for each in drafted] == [each.iterations for each in as_many]


def test_a_draft_model_with_a_shorter_context_drafts_while_it_fits(tmp_path):
    """The target drafts for itself, as if it were made for 24 positions: beyond them every iteration adds one token."""
    write_checkpoint(tmp_path / "target", "llama", num_hidden_layers=1, max_position_embeddings=512)
    shutil.copytree(tmp_path / "target", tmp_path / "short")
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 24}))
    target, backend, config = tmp_path / "target", CpuBackend(), plain_config(dtype="float64", draft_tokens=3)
    plain = Engine.from_checkpoint(target, backend, config=config)
    engine = Engine.from_checkpoint(target, backend, draft_dir=tmp_path / "short", speculate="draft-model", config=config)
    assert engine.max_context == 512
    short, long = [5, 6, 7], [9] * 300
    params = [SamplingParams(max_tokens=16, ignore_eos=True), SamplingParams(max_tokens=24, ignore_eos=True)]
    expected = [result.token_ids for result in plain.generate([short, long], params)]
    together = engine.generate([short, long], params)
    assert [result.token_ids for result in together] == expected
    assert together[0].acceptance_length > 3
    drafted = engine.stats.drafted_tokens
    (alone,) = engine.generate([long], params[1])
    assert alone.token_ids == expected[1]
    assert (alone.acceptance_length, engine.stats.drafted_tokens) == (1, drafted), "drafts beyond the context"


# -- multi-token prediction ------------------------------------------------------------------------------------------


def damaged(checkpoints, tmp_path, change):
    directory = tmp_path / "mtp"
    directory.mkdir()
    state = load_file(checkpoints / "mtp" / "model.safetensors")
    config = json.loads((checkpoints / "mtp" / "config.json").read_text())
    change(state, config)
    save_file({key: value.clone() for key, value in state.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


NORM = "model.mtp_layers.1.token_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda state, _: state.pop(NORM), f"missing: '{NORM}'"),
        (
            lambda state, _: state.update({"model.mtp_layers.0.extra": state[NORM]}),
            "not expected: 'model.mtp_layers.0.extra'",
        ),
        (lambda state, _: state.update({NORM: state[NORM][:8]}), rf"tensor '{NORM}' has shape \[8\], expected \[32\]"),
        (lambda _, config: config.pop("num_nextn_predict_layers"), "num_nextn_predict_layers is None"),
        (lambda _, config: config.update(num_nextn_predict_layers=3), "missing: 'model.mtp_layers.2"),
        (lambda _, config: config.update(vocab_size=100), "vocab_size is 100, the target's is 96"),
        (lambda _, config: config.update(hidden_size=64), "hidden_size is 64, the target's is 32"),
    ],
)
def test_damaged_heads_give_an_error_that_names_the_damage(checkpoints, tmp_path, change, match):
    made = options(checkpoints, directory=damaged(checkpoints, tmp_path, change))
    with pytest.raises(CheckpointError, match=match):
        build_proposer("mtp", made)


def test_a_head_computes_what_its_formula_says(checkpoints):
    """Against plain torch: norms, projection of hidden state and embedding, one decoder layer, final norm."""

    made = options(checkpoints, directory=checkpoints / "mtp")
    head = load_mtp(open_head(made.directory, target=made.target, backend=made.backend, dtype=torch.float32))[1]
    state = {
        key.removeprefix("model.mtp_layers.1."): value
        for key, value in load_file(checkpoints / "mtp" / "model.safetensors").items()
        if ".1." in key
    }
    count = 6
    tokens, hidden = torch.arange(10, 10 + count), torch.randn(count, 32, generator=torch.Generator().manual_seed(1))
    driver = Driver(made.target, config=head.config)
    found = head.forward(driver.inputs([(driver.sequence(), tokens.tolist())]), hidden, driver.cache)

    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    hf = tiny_config("llama")
    hf._attn_implementation = "eager"
    layer = LlamaDecoderLayer(hf, 0)
    names = {key for key, _ in layer.named_parameters()}
    layer.load_state_dict({key: value for key, value in state.items() if key in names})

    def norm(x, name):
        return torch.nn.functional.rms_norm(x, (32,), state[f"{name}.weight"], hf.rms_norm_eps)

    embedded = made.target.weights.embedding[tokens]
    both = torch.cat((norm(hidden, "hidden_layernorm"), norm(embedded, "token_layernorm")), -1)
    x = (both @ state["input_proj.weight"].T).unsqueeze(0)
    rotary = LlamaRotaryEmbedding(hf)(x, torch.arange(count).unsqueeze(0))
    mask = torch.full((count, count), float("-inf")).triu(1).view(1, 1, count, count)
    with torch.no_grad():
        out = layer(x, attention_mask=mask, position_embeddings=rotary)
    out = out[0] if isinstance(out, tuple) else out
    torch.testing.assert_close(found, norm(out.view(count, 32), "final_layernorm"), atol=1e-5, rtol=1e-4)
