"""Drafts drawn from some of the target's tokens: the same tokens, and lists that can't be are refused in plain words."""

import json

import pytest
import torch

from outrider import Engine
from outrider.cli.options.models import Speculation, vocabulary_of
from outrider.device import ConfigError
from outrider.device.kernels.weight_formats import weight_format
from outrider.errors import CheckpointError
from outrider.model import DecoderPlan, DraftVocabulary, load_decoder, load_through_transformers, with_output_head
from outrider.model.layers.ranks import Shard
from outrider.speculative.build import BUILDERS, build_proposer
from outrider.speculative.plugin import DRAFTLESS, USES_TARGET_HEAD
from outrider.speculative.proposer import NonSpeculativeProposer
from outrider_cpu.backend import CpuBackend
from outrider_proof.tiny import plain_config
from speculative.test_build import GREEDY, PROMPTS, options
from speculative.test_draft_weights import drawn_with

SOME = [int(each) for each in torch.randperm(96, generator=torch.Generator().manual_seed(3))[:60]]
"""Of 96 tokens, in the order of a list by frequency."""


@pytest.fixture(params=["json", "list", "tensor"])
def file(request, tmp_path):
    """The same tokens in each kind of file."""
    path = tmp_path / ("tokens.json" if request.param == "json" else "freq.pt")
    if request.param == "json":
        path.write_text(json.dumps(SOME))
    else:
        torch.save(SOME if request.param == "list" else torch.tensor(SOME), path)
    return path


def made(checkpoints, name, topk=1, **fields):
    config = plain_config(dtype="float64", draft_tokens=3, draft_topk=topk, max_context=48)
    return Engine.from_checkpoint(
        checkpoints / "target", CpuBackend(), draft_dir=checkpoints / name, speculate=name, config=config, **fields
    )


def drafts_of(proposer):
    """Every token that it drafts from now on."""
    inner, found = proposer.draft, set()

    def draft(inputs):
        made = inner(inputs)
        found.update(made.tokens.flatten().tolist())
        return made

    proposer.draft = draft
    return found


@pytest.mark.sample(1, per="name")
@pytest.mark.parametrize("fields", [{}, {"draft_weights": "int8"}], ids=["plain", "int8"])
@pytest.mark.parametrize(("name", "topk"), [("eagle", 1), ("eagle", 3), ("mtp", 1), ("mtp", 2), ("dflash", 1)])
def test_tokens_are_those_of_plain_decoding(checkpoints, file, name, topk, fields):
    engine = made(checkpoints, name, topk, draft_vocabulary=file, **fields)
    assert drawn_with(engine.proposer).shape[0] == len(SOME)
    assert engine.model.output_ids is None  # what is verified has all tokens
    (said,) = (choice for choice in engine.chosen if choice.name == "draft_vocabulary")
    assert (said.value, str(file) in said.why, "has all 96" in said.why) == (60, True, True)
    plain = Engine(engine.model, engine.backend, config=engine.config, proposer=NonSpeculativeProposer())
    expected = [result.token_ids for result in plain.generate(PROMPTS, GREEDY)]
    drafted = drafts_of(engine.proposer)
    assert [result.token_ids for result in engine.generate(PROMPTS, GREEDY)] == expected
    assert drafted <= set(SOME)
    assert max(drafted) >= len(SOME)  # they are tokens, not places in the list


@pytest.mark.parametrize("quantised", [None, "fp8", "int8", "int4"])
def test_its_rows_are_those_of_the_targets_head(checkpoints, quantised):
    backend = CpuBackend()
    target = load_decoder(checkpoints / "target", backend=backend, dtype=torch.float32)
    if quantised is not None:  # a head that is quantised in its checkpoint
        target = target.with_head(weight_format(quantised).quantize(target.weights.head))
    kept = torch.tensor(sorted(SOME))
    other = with_output_head(target, backend=backend, vocabulary=DraftVocabulary(ids=kept, origin="some"))
    assert other.output_size == len(SOME)
    assert torch.equal(other.output_ids, kept)
    hidden = torch.randn(5, target.config.hidden_size)
    torch.testing.assert_close(other.logits(hidden), target.logits(hidden)[:, kept])
    assert other.weights.layers is target.weights.layers


def test_the_first_tokens_are_a_number(checkpoints):
    engine = made(checkpoints, "eagle", draft_vocabulary=40)
    assert torch.equal(engine.proposer.head.target_ids, torch.arange(40))
    assert "the first 40 tokens" in next(each.why for each in engine.chosen if each.name == "draft_vocabulary")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{}", "holds {}; expected a list of tokens, at least one"),
        ("[]", r"holds \[\]; expected a list of tokens, at least one"),
        ("[1, 2.5]", "lists 2.5; expected tokens, whole numbers from 0"),
        ("[1, true]", "lists True; expected tokens"),
        ("[3, -1]", "lists -1; expected tokens"),
        ("[3, 5, 3]", "lists token 3 twice; expected each token once"),
        ("[3, 96]", "up to 96, and the target has tokens 0 to 95; expected tokens of the target"),
        ("[3, 1e400]", "lists inf; expected tokens"),
        (f"[{2**70}]", "expected tokens"),
        ("[1,", "can't be read as a list of tokens: .*; expected a list of numbers in JSON"),
        ("[" * 9999, "can't be read as a list of tokens: RecursionError"),
    ],
)
def test_lists_that_cannot_be_are_refused(checkpoints, tmp_path, content, told):
    path = tmp_path / "tokens.json"
    path.write_text(content)
    with pytest.raises((ConfigError, CheckpointError), match=told):
        made(checkpoints, "eagle", draft_vocabulary=path)


class Harmful:
    """What a pickle with code in it would be."""


@pytest.mark.parametrize(
    ("name", "write", "told"),
    [
        ("tokens.txt", lambda path: path.write_text("1 2"), r"expected a number of tokens, or a file \.json or \.pt"),
        ("none.json", lambda path: None, "there is no such file; expected a list of tokens"),
        (
            "freq.pt",
            lambda path: path.write_bytes(b"nothing"),
            "can't be read as a list of tokens: .*without code of its own",
        ),
        ("freq.pt", lambda path: torch.save(Harmful(), path), "can't be read as a list of tokens: .*without code of its own"),
        ("freq.pt", lambda path: torch.save(torch.ones(3), path), "lists 1.0; expected tokens, whole numbers from 0"),
        ("freq.pt", lambda path: torch.save(torch.ones(3, 2).long(), path), r"holds a tensor of shape \[3, 2\]; expected a"),
        ("freq.pt", lambda path: torch.save({"a": 1}, path), "expected a list of tokens, at least one"),
    ],
)
def test_files_that_hold_no_list_are_refused_before_the_target_is_read(checkpoints, tmp_path, name, write, told, monkeypatch):
    monkeypatch.setattr(DecoderPlan, "load", lambda *_: pytest.fail("the target was read"))
    write(tmp_path / name)
    with pytest.raises((ConfigError, CheckpointError), match=told):
        made(checkpoints, "eagle", draft_vocabulary=tmp_path / name)


@pytest.mark.parametrize("number", [0, -4, 2**40])
def test_no_token_at_all_is_refused(checkpoints, number):
    with pytest.raises(ConfigError, match=f"draft_vocabulary is {number}; expected 1 to 16777216 tokens of the target"):
        made(checkpoints, "eagle", draft_vocabulary=number)


@pytest.mark.parametrize("name", sorted(set(BUILDERS) - USES_TARGET_HEAD))
def test_proposers_that_draw_otherwise_refuse_it(checkpoints, name):
    given = options(
        checkpoints, directory=None if name in DRAFTLESS else checkpoints / name, vocabulary=DraftVocabulary.load(40)
    )
    with pytest.raises(ConfigError, match=f"draft_vocabulary is given, but speculate='{name}' doesn't draw drafts"):
        build_proposer(name, given)


@pytest.mark.parametrize("name", ["eagle", "mtp"])
def test_trees_have_no_more_branches_than_there_are_tokens(checkpoints, name):
    with pytest.raises(ConfigError, match="draft_topk is 3, and drafts are drawn from 2 tokens; expected at most as many"):
        made(checkpoints, name, 3, draft_vocabulary=2)


def test_a_model_through_transformers_keeps_its_head(checkpoints):
    backend = CpuBackend()
    target = load_through_transformers(checkpoints / "target", backend=backend, dtype=torch.float32)
    with pytest.raises(ConfigError, match="draft_vocabulary is given, and the target runs by transformers' own code"):
        with_output_head(target, backend=backend, vocabulary=DraftVocabulary.load(40))


def test_a_head_quantised_in_blocks_of_rows_keeps_them(checkpoints):
    given = options(checkpoints, directory=checkpoints / "eagle", vocabulary=DraftVocabulary.load(40))
    whole = weight_format("fp8").quantize(given.target.weights.head)
    block = type(whole)(
        format="fp8", data=whole.data, scales=whole.scales[:1].contiguous(), block=(128, whole.shape[1]), shape=whole.shape
    )
    with pytest.raises(ConfigError, match="head is fp8 block 128x.*: its rows can't be taken one by one; leave draft_vocab"):
        with_output_head(given.target.with_head(block), backend=given.backend, vocabulary=given.vocabulary)


@pytest.mark.parametrize(("vocabulary", "size"), [(96, 3), (97, 4), (9, 4), (5, 4), (7, 2), (10, 1)])
def test_ranks_have_as_many_rows_each_and_all_tokens_in_order(vocabulary, size):
    """Whatever is wanted, of any vocabulary: what all ranks have side by side is ascending, with nothing behind it."""
    from outrider.model.heads.draft_output import _rows_of_rank

    for seed in range(20):
        drawn = torch.Generator().manual_seed(seed)
        count = int(torch.randint(1, vocabulary + 1, (), generator=drawn))
        wanted = torch.randperm(vocabulary, generator=drawn)[:count].sort().values
        whole, widths = [], set()
        for rank in range(size):
            shard = Shard(rank, size)
            rows, ids, width = _rows_of_rank(wanted, shard, vocabulary)
            first, last = shard.uneven(vocabulary)
            assert ((rows >= 0) & (rows < last - first)).all() if len(rows) else True
            whole.append(torch.nn.functional.pad(rows + first, (0, width - len(rows)), value=-1))
            widths.add(width)
        assert len(widths) == 1
        together = torch.cat(whole)
        assert torch.equal(together[: len(ids)], ids)
        assert (together[len(ids) :] == -1).all()
        assert torch.isin(wanted, ids).all()
        assert torch.equal(ids, ids.unique())


def test_what_the_command_line_names():
    assert vocabulary_of(None) is None
    assert vocabulary_of("32768") == 32768
    assert str(vocabulary_of("freq_32768.pt")) == "freq_32768.pt"
    chosen = Speculation.with_defaults("eagle", model=None, draft=None, draft_tokens=3, draft_vocabulary="512")
    assert chosen.draft_vocabulary == 512
    assert chosen.without().draft_vocabulary is None
