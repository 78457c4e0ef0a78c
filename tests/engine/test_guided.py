"""Guided requests: outputs fit their guides, and greedy ones are those of a plain loop over transformers' logits."""

import json
import re
import threading
import time
from pathlib import Path

import pytest
import torch
import xgrammar
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM
from xgrammar.testing import _is_grammar_accept_string

from engine.guided_schemas import SCHEMAS, check_fits
from engine.test_hand_over import finish, until_output
from outrider import Engine, SamplingParams
from outrider.device import ConfigError
from outrider.engine import ChoiceGuide, Ebnf, JsonObject, JsonSchema, Regex
from outrider.engine.guides import grammars
from outrider.engine.guides.grammars import Grammars, Guidance, mask_words
from outrider.engine.requests.request import FinishReason
from outrider.errors import RequestError
from outrider.model import Tokenizer, load_decoder, load_eagle, open_head
from outrider.registry import get_backend
from outrider.speculative.eagle import EagleProposer, EagleTreeProposer
from outrider.speculative.proposer import NonSpeculativeProposer
from outrider.speculative.tree import DynamicTree
from outrider_cpu.backend import CpuBackend
from outrider_proof.decode_program import Residues
from outrider_proof.tiny import plain_config

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "tags"],
}
GUIDES = {
    "schema": JsonSchema(SCHEMA),
    "regex": Regex("(ab|cd){2,4}x\\d*"),
    "grammar": Ebnf('root ::= "(" root ")" | "x"'),
    "choice": ChoiceGuide(["yes", "no, never", "maybe"]),
}
LONGEST = 28
ENDS = frozenset((0,))


class Bundled:
    """The bundled model with its tokenizer on one backend, in float64."""

    def __init__(self, backend, directory):
        self.backend = backend
        self.tokenizer = Tokenizer.from_checkpoint(directory / "target")
        stream = backend.create_stream("load")
        with backend.on(stream):
            self.target = load_decoder(directory / "target", backend=backend, dtype=torch.float64)
            self.head = load_eagle(open_head(directory / "eagle", target=self.target, backend=backend, dtype=torch.float64))
        stream.synchronize()

    def engine(self, speculate="eagle", **config):
        proposers = {
            "none": NonSpeculativeProposer,
            "eagle": lambda: EagleProposer(self.head, draft_tokens=3),
            "tree": lambda: EagleTreeProposer(self.head, DynamicTree(topk=2, depth=3)),
        }
        config = plain_config(**{"dtype": "float64", "max_context": 256, "max_requests": 6} | config)
        return Engine(self.target, self.backend, proposer=proposers[speculate](), config=config, tokenizer=self.tokenizer)

    def text(self, tokens):
        return self.tokenizer.decode(tokens)


@pytest.fixture(scope="module")
def cpu(bundled_dir):
    return Bundled(CpuBackend(), bundled_dir)


@pytest.fixture(scope="module")
def sim(bundled_dir):
    return Bundled(get_backend("sim"), bundled_dir)


@pytest.fixture(scope="module")
def library(cpu):
    """xgrammar's own objects, made as its documentation says; nothing of the engine's."""
    vocabulary = cpu.tokenizer.vocab_size
    texts = [cpu.tokenizer._tokenizer.id_to_token(token) for token in range(vocabulary)]
    texts[0] = texts[1] = ""
    info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.BYTE_LEVEL, vocab_size=vocabulary, stop_token_ids=[0])
    return xgrammar.GrammarCompiler(info)


@pytest.fixture(scope="module")
def oracle(bundled_dir, library):
    """The likeliest token that the mask lets through, one after the other, from transformers' logits."""
    model = AutoModelForCausalLM.from_pretrained(bundled_dir / "target", dtype=torch.float64).eval()
    compiled = {
        "schema": lambda: library.compile_json_schema(json.dumps(SCHEMA), max_whitespace_cnt=16),
        "regex": lambda: library.compile_regex("(ab|cd){2,4}x[0-9]*"),
        "grammar": lambda: library.compile_grammar('root ::= "(" root ")" | "x"'),
        "choice": lambda: library.compile_grammar('root ::= "yes" | "no, never" | "maybe"'),
    }
    known = {}

    def tokens(prompt, guide):
        key = tuple(prompt), guide
        if key not in known:
            matcher = xgrammar.GrammarMatcher(compiled[guide]()) if guide else None
            mask = xgrammar.allocate_token_bitmask(1, model.config.vocab_size)
            written, given, past = [], torch.tensor([prompt]), None
            while len(written) < LONGEST and written[-1:] != [0]:
                with torch.no_grad():
                    seen = model(given, past_key_values=past, use_cache=True)
                past, logits = seen.past_key_values, seen.logits[0, -1].float()
                if matcher is not None:
                    matcher.fill_next_token_bitmask(mask)
                    xgrammar.apply_token_bitmask_inplace(logits.unsqueeze(0), mask)
                written.append(int(logits.argmax()))
                assert matcher is None or matcher.accept_token(written[-1])
                given = torch.tensor([written[-1:]])
            known[key] = tuple(written)
        return known[key]

    return tokens


WAYS = {
    "plain": ("cpu", "none", {}),
    "chain": ("cpu", "eagle", {}),
    "tree": ("cpu", "tree", {}),
    "sim, overlap": ("sim", "eagle", {"overlap": True}),
    "sim, graphs": ("sim", "eagle", {"overlap": True, "graphs": True, "buckets": (6,)}),
    "sim, fused": ("sim", "tree", {"overlap": True, "mode": "fused", "buckets": (6,)}),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_are_those_of_a_plain_loop(way, request, oracle, prompt_tokens):
    """Four guided requests and two that aren't, in one batch."""
    name, speculate, config = WAYS[way]
    engine = request.getfixturevalue(name).engine(speculate, **config)
    chosen = [*GUIDES, None, None]
    prompts = [tokens[-20:] for tokens in prompt_tokens[: len(chosen)]]
    params = [SamplingParams(max_tokens=LONGEST, guide=GUIDES.get(guide)) for guide in chosen]
    found = engine.generate(prompts, params)
    for prompt, guide, completion in zip(prompts, chosen, found, strict=True):
        assert completion.token_ids == oracle(prompt, guide), guide
    if speculate != "none":
        assert max(completion.acceptance_length for completion in found[:4]) > 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
def test_a_guide_after_a_text_leaves_the_tokens_before_it_alone(way, request, oracle, prompt_tokens):
    name, speculate, config = WAYS[way]
    bundled = request.getfixturevalue(name)
    prompt = prompt_tokens[0][-20:]
    free = oracle(prompt, None)
    length = next(k for k in range(2, LONGEST) if bundled.text(free[:k]).count(bundled.text(free[k - 2 : k])) == 1)
    guide = JsonSchema(SCHEMA, after=bundled.text(free[length - 2 : length]))
    (found,) = bundled.engine(speculate, **config).generate([prompt], SamplingParams(max_tokens=LONGEST, guide=guide))
    guided = oracle([*prompt, *free[:length]], "schema")
    assert found.token_ids == (*free[:length], *guided)[:LONGEST]
    assert len(found.token_ids) > length


class Bracketed:
    """A matcher for "(" and any number of letters: tokens are bytes."""

    def __init__(self):
        self.accepted = []

    def accept(self, token):
        allowed = (token == ord("(")) == (not self.accepted)
        self.accepted += [token] * allowed
        return allowed

    def rollback(self, count):
        del self.accepted[len(self.accepted) - count :]

    def fill(self, words, index):
        words[index] = grammars.mask_of_tokens([ord("(")] if not self.accepted else [ord("a")], 256)

    is_complete = False


TOKENS = dict(enumerate((b"<", b"/t>", b">", b"</t>", b"</t> ", b">(", b"t", b"(", b"<<", b"")))
STEPS = st.lists(st.tuples(st.integers(0, len(TOKENS) - 1), st.integers(0, 3)), max_size=12)


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(steps=STEPS)
def test_a_delayed_matcher_goes_back_to_where_it_was(steps):
    """Against a search in the whole text. ``steps``: a token, and how many tokens are undone after it."""
    inner = Bracketed()
    inner_accept = inner.accept
    inner.accept = lambda token: inner_accept(TOKENS[token][0] if TOKENS[token] else 0)
    crossing = [(token, text) for token, text in TOKENS.items() if text.partition(b">")[2].strip()]
    matcher = grammars.DelayedMatcher(
        inner, b"</t>", TOKENS.__getitem__, crossing=crossing, ends=frozenset((9,)), vocabulary=len(TOKENS)
    )
    accepted = []
    words = torch.zeros((1, 1), dtype=torch.int32)
    for token, undone in steps:
        before, marker, _ = b"".join(TOKENS[each] for each in accepted).partition(b"</t>")
        if not marker:
            matcher.fill(words, 0)
            completed = (before + TOKENS[token]).partition(b"</t>")[2].strip()
            assert bool(words[0, 0] >> token & 1) == (token != 9 and not completed)
        if matcher.accept(token):
            accepted.append(token)
        matcher.rollback(min(undone, len(accepted)))
        del accepted[max(0, len(accepted) - undone) :]
        texts = [b"".join(TOKENS[each] for each in accepted[:count]) for count in range(len(accepted) + 1)]
        started = next((count for count, text in enumerate(texts) if b"</t>" in text), len(accepted))
        assert len(inner.accepted) == len(accepted) - started
        assert 9 not in accepted[:started]


BEGINNINGS = dict(enumerate((b"<", b"<c", b"c", b"c>", b">a", b"<c>a", b"(", b"a", b" ", b"[")))


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(steps=STEPS)
@example(steps=[(6, 0), (0, 0), (6, 2)])
def test_a_text_that_begins_otherwise_isnt_guided(steps):
    """Against a search in the whole text, in which "(<" is both. ``steps``: a token, and how many are undone after it."""
    inner = Bracketed()
    inner_accept = inner.accept
    inner.accept = lambda token: inner_accept(BEGINNINGS[token][0])
    inner.fill = lambda words, index: words[index].copy_(
        grammars.mask_of_tokens([each for each, text in BEGINNINGS.items() if (text == b"(") == (not inner.accepted)], 32)
    )
    matcher = grammars.OptionalMatcher(inner, [b"<c>", b"(<"], BEGINNINGS.__getitem__, [*BEGINNINGS.items()])

    def fits(tokens):
        texts = [BEGINNINGS[each] for each in tokens]
        texts = texts[1:] if texts[:1] == [b" "] else texts
        whole = b"".join(texts)
        is_guided = not texts or (texts[0] == b"(" and b"(" not in texts[1:])
        return whole.startswith((b"<c>", b"(<")) or b"<c>".startswith(whole) or is_guided

    accepted = []
    for token, undone in steps:
        words = torch.zeros((1, 1), dtype=torch.int32)
        matcher.fill(words, 0)
        allowed = [int(words[0, 0]) >> each & 1 for each in BEGINNINGS]
        assert allowed == [fits([*accepted, each]) for each in BEGINNINGS]
        assert matcher.accept(token) == fits([*accepted, token])
        accepted += [token] * allowed[token]
        matcher.rollback(min(undone, len(accepted)))
        del accepted[max(0, len(accepted) - undone) :]


@pytest.fixture(scope="module")
def drawing(cpu):
    return cpu.engine(max_requests=16, max_context=320)


DRAWN = settings(
    deadline=None, phases=[Phase.generate], database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
EIGHT = st.lists(SCHEMAS, min_size=8, max_size=8)


def check_outputs(engine, schemas, seed, tokens):
    """Two outputs for each schema, greedy and drawn, that end by themselves or are cut; returns how many ended."""
    prompt = engine.tokenizer.encode("x = ")
    asked = [(schema, heat) for schema in schemas for heat in (0.0, 1.0)]
    params = [SamplingParams(max_tokens=tokens, guide=JsonSchema(s), temperature=heat, seed=seed) for s, heat in asked]
    ended = 0
    for (schema, _), completion in zip(asked, engine.generate([prompt] * len(asked), params), strict=True):
        assert completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), completion
        if completion.finish_reason is FinishReason.STOP:
            check_fits(engine.tokenizer.decode(completion.token_ids), schema)
            ended += 1
    return ended


@settings(DRAWN, max_examples=1)
@given(schemas=EIGHT, seed=st.integers(0, 999))
def test_what_is_written_fits_a_drawn_schema(drawing, schemas, seed):
    assert check_outputs(drawing, schemas, seed, 80) > 4


@pytest.mark.slow
@settings(DRAWN, max_examples=25)
@given(schemas=EIGHT, seed=st.integers(0, 999))
def test_what_is_written_fits_200_drawn_schemas(drawing, schemas, seed):
    assert check_outputs(drawing, schemas, seed, 300) > 8


# -- beside other options ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(cpu):
    return cpu.engine()


@pytest.fixture
def one(cpu, engine):
    """A completion of one prompt, and its text."""

    def run(guide, **params):
        prompt = cpu.tokenizer.encode("def main(")
        found = engine.generate([prompt], SamplingParams(**{"max_tokens": LONGEST} | params, guide=guide))
        return [(completion, cpu.text(completion.token_ids)) for completion in found]

    return run


def test_samples_of_a_prompt_are_guided_each(one):
    texts = {text for _, text in one(Regex("[a-z]{3}"), n=4, temperature=1.0)}
    assert len(texts) > 1
    assert all(re.fullmatch("[a-z]{3}", text) for text in texts)


def test_other_options_come_behind_the_mask(one, cpu):
    ((done, text),) = one(Regex("(foo|bar)+"), temperature=1.0, top_k=1, frequency_penalty=2.0, max_tokens=30)
    assert re.fullmatch("(foo|bar)+", text) or done.finish_reason is FinishReason.LENGTH
    ((_, text),) = one(ChoiceGuide(["foo", "bar"]), logit_bias=dict.fromkeys(cpu.tokenizer.encode("bar"), 50.0))
    assert text == "bar"


def test_a_special_token_is_refused_without_a_word_and_an_end_is_taken(cpu, capfd):
    made = Grammars(cpu.tokenizer, vocabulary=cpu.tokenizer.vocab_size + 3, ends=(0,))
    params, (letter,) = SamplingParams(guide=Regex("a*")), cpu.tokenizer.encode("a", special_tokens=False)
    state = made.guidance(params, frozenset())
    for token in (1, cpu.tokenizer.vocab_size + 2):  # the other special one, and one that the tokenizer doesn't know
        assert "isn't allowed by the guide" in state.accept_token(token)
    assert [state.accept_token(token) for token in (letter, 0)] == [None, None]
    assert made.guidance(params, frozenset((1,))).accept_token(1) is None  # a stop token of the request
    assert capfd.readouterr() == ("", "")


def test_log_probabilities_are_the_models_own(one, cpu):
    ((free, _),) = one(None, max_tokens=1, logprobs=3)
    ((guided, _),) = one(ChoiceGuide(["zebra"]), max_tokens=1, logprobs=3)
    assert guided.logprobs[0].top == free.logprobs[0].top
    assert guided.logprobs[0].logprob < free.logprobs[0].top[-1][1]


def test_a_bias_that_bans_all_that_is_allowed_ends_the_request_and_no_other(cpu, engine):
    prompt = cpu.tokenizer.encode("def main(")
    banned = {token: float("-inf") for token in range(2, cpu.tokenizer.vocab_size) if cpu.text([token]).startswith("q")}
    params = [SamplingParams(max_tokens=8, guide=Regex("q+"), logit_bias=banned), SamplingParams(max_tokens=8)]
    failed, other = engine.generate([prompt, prompt], params)
    assert failed.finish_reason is FinishReason.ERROR
    assert "isn't allowed by the guide" in failed.error
    assert (failed.token_ids, len(other.token_ids)) == ((), 8)


def test_an_output_ends_where_its_guide_lets_it(one, cpu):
    ((done, text),) = one(Regex("a{0,6}"), min_tokens=3)
    assert (done.finish_reason, len(done.token_ids) > 3, done.token_ids[-1]) == (FinishReason.STOP, True, 0)
    ((done, text),) = one(Regex("a{6}"), ignore_eos=True)  # nothing else may come behind it
    assert (done.finish_reason, text) == (FinishReason.STOP, "aaaaaa")
    ((done, text),) = one(Regex("[ab]*"), ignore_eos=True, max_tokens=12)
    assert (done.finish_reason, len(done.token_ids)) == (FinishReason.LENGTH, 12)
    (token,) = cpu.tokenizer.encode("b")
    ((done, text),) = one(Regex("[ab]{20}"), stop_token_ids=(token,))  # it's text to the guide
    assert done.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    ((done, text),) = one(Regex("(x, )*y"), stop=(", x",))
    assert ", x" not in done.text


def test_requests_wait_are_preempted_and_share_prefixes(cpu, oracle, prompt_tokens):
    prompt = prompt_tokens[0][-20:]
    engine = cpu.engine(max_requests=3, page_size=4, num_pages=23, prefill_chunk=7)
    names = [*GUIDES, None, "schema"]
    ids = {engine.add_request(prompt, SamplingParams(max_tokens=LONGEST, guide=GUIDES.get(name))): name for name in names}
    requests = dict(engine._requests)
    aborted = engine.add_request(prompt, SamplingParams(max_tokens=LONGEST, guide=GUIDES["schema"]))
    for step in range(500):
        if step == 6:
            engine.abort(aborted)
        engine.step()
        if not engine.has_unfinished:
            break
    assert sum(request.preemptions for request in requests.values()) > 0
    for request, name in ids.items():
        assert tuple(requests[request].output) == oracle(prompt, name)


def test_a_guided_request_goes_on_in_another_engine(cpu, sim, oracle, prompt_tokens):
    prompt = prompt_tokens[0][-20:]
    first, second = cpu.engine(max_requests=2), sim.engine(max_requests=2, overlap=True)
    request = first.add_request(prompt, SamplingParams(max_tokens=LONGEST, guide=GUIDES["schema"]))
    until_output(first, request, 6)
    assert finish(second, second.take_over(first.hand_over(request))).token_ids == oracle(prompt, "schema")


def test_an_interrupt_while_the_grammar_is_walked_costs_nothing(cpu, oracle, prompt_tokens, monkeypatch):
    prompt = prompt_tokens[0][-20:]
    engine = cpu.engine()
    request = engine.add_request(prompt, SamplingParams(max_tokens=LONGEST, guide=GUIDES["schema"]))
    record, fill, left = engine._requests[request], grammars.XgrammarMatcher.fill, [3, 9, 10, 17]

    def interrupted(self, words, index):
        left[:] = [count - 1 for count in left]
        if 0 in left:
            raise KeyboardInterrupt
        fill(self, words, index)

    monkeypatch.setattr(grammars.XgrammarMatcher, "fill", interrupted)
    raised = 0
    while not record.finished:
        try:
            engine.step()
        except KeyboardInterrupt:
            raised += 1
    assert raised == 4
    assert tuple(record.output) == oracle(prompt, "schema")


# -- what isn't taken ----------------------------------------------------------------------------------------------------

WRONG = {
    "JSON": lambda: JsonSchema("{"),
    "a JSON object": lambda: JsonSchema("[]"),
    "NaN": lambda: JsonSchema('{"const": NaN}'),
    "isn't JSON": lambda: JsonSchema('{"items":' * 20_000),
    "within each other": lambda: JsonSchema('{"items":' * 90 + "{}" + "}" * 90),
    "at most 512": lambda: JsonSchema({"properties": {str(i): {} for i in range(600)}}),
    "262144": lambda: JsonSchema({"enum": ["x" * 300_000]}),
    "unterminated": lambda: Regex("("),
    "a back reference": lambda: Regex("(a)\\1"),
    "a look-ahead or a look-behind": lambda: Regex("a(?=b)"),
    "an anchor inside": lambda: Regex("a^b"),
    "65536 times": lambda: Regex("a{100000}"),
    "1 to 4096 strings": lambda: ChoiceGuide([]),
    "strings that": lambda: ChoiceGuide(["a", ""]),
    "half a character": lambda: Ebnf('root ::= "\ud800"'),
    "guide is 'json'": lambda: SamplingParams(guide="json"),
}


@pytest.mark.parametrize("said", WRONG)
def test_a_guide_that_cannot_be_enforced_is_an_error_when_it_is_made(said):
    with pytest.raises(ConfigError, match=said):
        WRONG[said]()


DATA = json.loads((Path(__file__).resolve().parents[1] / "data/guide_schemas.json").read_text())
"""Schemas that can't be enforced, with what is said of them; and ones that are, with texts that fit and texts that don't.

Some are as clients derive them: Pydantic names the property that tells schemas of ``oneOf`` apart; Zod limits integers to
JavaScript's safe ones.
"""


@pytest.mark.parametrize(("said", "schema"), DATA["refused"])
def test_a_schema_that_cannot_be_enforced_is_an_error_when_it_is_made(said, schema):
    with pytest.raises(ConfigError, match=said):
        JsonSchema(schema)


@pytest.mark.parametrize(("schema", "fitting", "unfit"), DATA["enforced"])
def test_keywords_and_references_are_enforced_together(schema, fitting, unfit):
    grammar = xgrammar.Grammar.from_json_schema(JsonSchema(schema).compiler_text)
    for text in (*fitting, *unfit):
        assert _is_grammar_accept_string(grammar, text) == (text in fitting), text


def test_tuples_of_older_drafts():
    first = [{"type": "integer"}, {"type": "array", "items": [{"type": "null"}]}]
    old = JsonSchema({"type": "array", "items": first, "additionalItems": {"type": "string"}, "minItems": 2})
    first[1] = {"type": "array", "prefixItems": first[1]["items"]}
    new = JsonSchema({"type": "array", "prefixItems": first, "items": {"type": "string"}, "minItems": 2})
    assert json.loads(old.compiler_text) == json.loads(new.compiler_text)


@pytest.mark.parametrize(
    ("guide", "said"),
    [
        (Ebnf("root ::= "), "Expect element"),
        (Ebnf("root ::= other"), "other"),
        (Ebnf('start ::= "a"'), "root"),
        (Ebnf('root ::= root "a"'), "allows no text"),
        (JsonSchema({"$ref": "#"}), "allows no text"),
        (JsonSchema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
    ],
)
def test_a_guide_that_does_not_compile_is_an_error_of_the_request(cpu, engine, guide, said):
    before = engine.open_requests
    with pytest.raises(RequestError, match=said):
        engine.add_request([5], SamplingParams(guide=guide))
    assert engine.open_requests == before


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        ('root ::= . .. "!"', r"(?s).{3}!"),
        ('root ::= "a.b" [.] .{2} # . or "\n', r"(?s)a\.b\..{2}"),
        ('root ::= "\\"." [^\\].] .', r"(?s)\"\.[^\].]."),
        ('root ::= a.b\na.b ::= "q"', "q"),
    ],
)
def test_a_dot_of_a_grammar_is_any_character(engine, grammar, expected):
    (out,) = engine.generate([[5]], SamplingParams(guide=Ebnf(grammar), temperature=1, max_tokens=40))
    assert out.finish_reason == "stop"
    assert re.fullmatch(expected, engine.tokenizer.decode(out.token_ids))


@pytest.mark.parametrize("text", ["[", '"\\'])
def test_a_long_grammar_without_an_end_of_a_literal_is_refused_at_once(engine, text):
    """A search in quadratic time would take a minute of all threads."""
    before = time.process_time()
    with pytest.raises(RequestError, match="can't be compiled"):
        engine.generate([[5]], SamplingParams(guide=Ebnf("root ::= " + text * 50_000), max_tokens=4))
    assert time.process_time() - before < 5


def test_without_the_library_or_a_tokenizer_it_says_what_to_do(cpu, engine, monkeypatch):
    bare = Engine(cpu.target, cpu.backend, config=plain_config(dtype="float64", max_requests=1))
    with pytest.raises(ConfigError, match="without a tokenizer"):
        bare.add_request([5], SamplingParams(guide=JsonObject()))
    monkeypatch.setattr(grammars, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'outrider\[guided\]'"):
        engine.add_request([5], SamplingParams(guide=Regex("not compiled before")))


def test_compiling_has_a_limit_of_time_and_number_and_is_shared(cpu, monkeypatch):
    made, gate = Grammars(cpu.tokenizer, vocabulary=2048, ends=(0,)), threading.Event()
    compiled, calls = grammars._compile_guide, []

    def slow(compiler, guide):
        calls.append(guide)
        assert gate.wait(10)
        return compiled(compiler, guide)

    monkeypatch.setattr(grammars, "_compile_guide", slow)
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 0.01)
    for number in range(4):
        with pytest.raises(RequestError, match="takes more than"):
            made.compile(Regex(f"a{number}"))
        with pytest.raises(RequestError, match="takes more than"):
            made.compile(Regex(f"a{number}"))  # the one that is under way
    with pytest.raises(RequestError, match="as many as may be at a time"):
        made.compile(Regex("b"))
    monkeypatch.setattr(grammars, "COMPILE_SECONDS", 10.0)
    waiting = list(made._compiling.values())
    gate.set()
    for future in waiting:
        future.result(timeout=10)
    made.compile(Regex("a0"))
    assert len(calls) == 4


def test_a_guide_that_takes_too_long_to_walk_ends_its_request_and_no_other(cpu, monkeypatch):
    engine = cpu.engine(max_requests=2)
    monkeypatch.setattr(grammars, "MASK_TIME_LIMIT_S", -1.0)
    slow = SamplingParams(max_tokens=8, guide=Regex("[a-z]*"))
    prompt = cpu.tokenizer.encode("def main(")
    failed, other = engine.generate([prompt, prompt], [slow, SamplingParams(max_tokens=8)])
    assert (failed.finish_reason, failed.token_ids) == (FinishReason.ERROR, ())
    assert "took more than" in failed.error
    assert len(other.token_ids) == 8


# -- the walk ------------------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_masks_along_a_tree_are_those_of_a_walk_to_each_node(data):
    vocabulary = 40
    size = data.draw(st.integers(0, 7))
    parents = [-1, *(data.draw(st.integers(-1, node)) for node in range(size))]
    tokens = [data.draw(st.integers(0, vocabulary - 1)) for _ in range(size)]
    output = data.draw(st.lists(st.integers(0, 12), max_size=3))
    state, taken = Guidance(Residues(vocabulary), vocabulary=vocabulary), []
    for choice in output:
        taken.append(3 * choice + (sum(taken) + len(taken)) % 3)
        assert state.accept_token(taken[-1]) is None
    masks = torch.zeros((size + 1, mask_words(vocabulary)), dtype=torch.int32)
    state.fill_draft_masks(tokens, parents, masks)
    for node in range(size + 1):
        way, at = [], node
        while at > 0:
            way.insert(0, tokens[at - 1])
            at = parents[at]
        allowed, walked = at == 0, list(taken)
        for token in way:
            allowed = allowed and token % 3 == (sum(walked) + len(walked)) % 3
            walked.append(token)
        wanted = {t for t in range(vocabulary) if not allowed or t % 3 == (sum(walked) + len(walked)) % 3}
        bits = [int(masks[node, t // 32]) >> (t % 32) & 1 for t in range(vocabulary)]
        assert {t for t, bit in enumerate(bits) if bit} == wanted
    refused = state.accept_token((sum(taken) + len(taken) + 1) % 3)
    assert "isn't allowed by the guide" in refused


def test_what_an_interrupted_walk_left_is_undone_before_the_next_mask():
    class Interrupted(Residues):
        def fill(self, words, index):
            if index:
                raise KeyboardInterrupt
            super().fill(words, index)

    state = Guidance(Interrupted(9), vocabulary=9)
    masks, wanted = torch.zeros((2, mask_words(9)), dtype=torch.int32), torch.zeros((1, mask_words(9)), dtype=torch.int32)
    with pytest.raises(KeyboardInterrupt):
        state.fill_draft_masks((0,), (-1, 0), masks)
    state.fill_next_mask(masks, 0)
    Residues(9).fill(wanted, 0)
    assert torch.equal(masks[:1], wanted)
