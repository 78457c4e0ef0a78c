"""``outrider generate``: text from a prompt."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from outrider.cli.answer import Answer
from outrider.cli.chat_options import ChatOption, ChatTemplateOption, MessagesOption, Talk
from outrider.cli.engine_options import AnyModelOptions, with_options
from outrider.cli.guide_options import (
    ChoiceOption,
    GrammarOption,
    JsonObjectOption,
    JsonSchemaOption,
    RegexOption,
    chosen_guide,
)
from outrider.cli.images import ImageOption, Question
from outrider.cli.inputs import check_utf8, read_bounded
from outrider.cli.models import launched
from outrider.cli.rank_processes import DataParallelOption, Joined, TensorParallelOption, spread
from outrider.cli.report import Interrupted, JsonOption, Report
from outrider.cli.sampling_options import LogprobsOption, SamplesOption, SamplingOptions, logprob_data
from outrider.device.errors import ConfigError
from outrider.errors import RequestError, shown

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.engine.requests.request import Completion
    from outrider.engine.requests.sampling import SamplingParams


@with_options
def generate(
    context: typer.Context,
    *,
    prompt: Annotated[str | None, typer.Option(help="The text to continue.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", metavar="F", help="A file with the text; - is standard input.")
    ] = None,
    token_ids: Annotated[
        str | None,
        typer.Option("--token-ids", metavar="I,J,…", help="The prompt as token ids, instead of a text."),
    ] = None,
    chat: ChatOption = False,
    messages: MessagesOption = None,
    chat_template: ChatTemplateOption = None,
    image: ImageOption = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", metavar="N", help="Maximum number of new tokens.")] = 64,
    sampling: SamplingOptions,
    logprobs: LogprobsOption = None,
    n: SamplesOption = 1,
    json_schema: JsonSchemaOption = None,
    json_object: JsonObjectOption = False,
    regex: RegexOption = None,
    grammar: GrammarOption = None,
    choice: ChoiceOption = None,
    options: AnyModelOptions,
    tensor_parallel: TensorParallelOption = 1,
    data_parallel: DataParallelOption = 1,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Also decode greedily without speculation; exit code 1 if the tokens differ. In float32 unless --dtype is "
            "given; a difference is shown with the gap of the logits.",
        ),
    ] = False,
    json_output: JsonOption = False,
) -> Report:
    """Continue a prompt. Text is printed as it is generated; without --model by the bundled model."""
    from outrider.cli.torch_probe import require_torch

    talk = Talk.asked(chat, messages, chat_template)
    text = _given(prompt, prompt_file, token_ids, talk)
    if compare and sampling.temperature != 0:
        raise ConfigError(
            f"--compare compares greedy decoding, the temperature is {sampling.temperature}; leave --temperature out"
        )
    if compare and n > 1:
        raise ConfigError(f"--compare compares one output with another, --n is {n}; leave --n out")
    guide = chosen_guide(json_schema, json_object, regex, grammar, choice)
    require_torch()
    spread_out = spread(context.obj, tensor_parallel, data_parallel, json_output=json_output)
    if spread_out is not None:
        return spread_out
    from outrider.engine.config import Choice

    params = sampling.params(max_tokens=max_tokens, logprobs=logprobs, n=n, guide=guide)
    speculation, dtype, running = options.speculation(), options.dtype, options.running()
    beside: list[Choice] = []
    if compare and dtype is None:
        dtype = "float32"
        beside.append(Choice("dtype", dtype, "--compare compares tokens, and coarser rounding makes others"))
    if options.max_requests is None:
        beside.append(Choice("max_requests", n, "the samples of this command"))
    template = None if talk is None else talk.template(speculation.model)
    with Joined(tensor_parallel, data_parallel) as joined:
        engine = options.loader(speculation, max_requests=n, dtype=dtype, say=not json_output, beside=beside, joined=joined)()
        plain_running = replace(running, draft_length=None)
        load_plain = options.loader(
            speculation.without(), max_requests=1, dtype=dtype, running=plain_running, tune_seconds=0.0, joined=joined
        )
        if engine.follows:
            engine.follow()
            if compare:
                load_plain().follow()
            return Report.told_elsewhere()
        with closing(engine):
            if talk is not None and template is not None:
                text = talk.tokens(template, text, images=len(image or ()))
            question = Question.ask(engine, text, speculation.model, image or ())
            if n > 1:
                return _samples(engine, question, params, {"speculate": speculation.kind, **launched(engine, beside)})
            run = Answer(question)
            try:
                run.stream(engine, params, None if json_output else sys.stdout.write)
            except KeyboardInterrupt:
                raise Interrupted(f"interrupted after {len(run.tokens)} tokens", run.data(engine)) from None
        data: dict[str, object] = {**run.data(engine), "speculate": speculation.kind, **launched(engine, beside)}
        if run.error is not None or not compare:
            return Report(data=data, render=lambda console: _summary(console, data), exit_code=1 if run.error else 0)
        plain = Answer(question)
        plain_engine = load_plain()
        with closing(plain_engine):
            plain.stream(plain_engine, params, None)
        same = plain.tokens == run.tokens
        data["same_as_plain"] = same
        data["plain"] = plain.data(plain_engine)
        if not same:
            data["difference"] = _difference(plain_engine, question, params, run.tokens, plain.tokens)

    def render(console: Console) -> None:
        _summary(console, data)
        console.print(f"plain decoding: {plain.tokens_per_s:.1f} tokens/s, {plain.iterations} iterations")
        console.print(f"same tokens as plain greedy decoding: {'yes' if same else 'no'}")
        if not same:
            console.print(f"first difference: {_shown(data['difference'], data['dtype'])}")

    return Report(data=data, render=render, exit_code=0 if same else 1)


def _difference(
    plain: Engine, question: Question, params: SamplingParams, ours: Sequence[int], theirs: Sequence[int]
) -> dict[str, object] | None:
    """The first token that differs, and how close the decision was where logits alone made it; None: in the length."""
    from outrider.cli.differences import Closer, first_difference
    from outrider.model import Decoder

    at = first_difference(ours, theirs)
    if at is None:
        return None
    reshaped = params.penalized or params.biases or params.min_tokens or params.guide is not None
    by_logits = isinstance(plain.model, Decoder) and plain.model.ranks is None
    if question.media or reshaped or not by_logits:
        return {"position": at, "speculative": ours[at], "plain": theirs[at]}
    found = Closer(plain).look(question.tokens, ours, theirs)
    assert found is not None
    return asdict(found)


def _shown(difference: object, dtype: object) -> str:
    if not isinstance(difference, dict):
        return "in the length"
    where = f"at token {difference['position']}"
    if "gap" not in difference:
        return where
    return (
        f"{where}, where the logits of both are within {difference['gap']:.3g} of the largest "
        f"({difference['gap_roundings']:.1f} roundings of {dtype})"
    )


def _samples(engine: Engine, question: Question, params: SamplingParams, how: Mapping[str, object]) -> Report:
    """Several samples of one prompt: printed when all are done, since their tokens come side by side."""
    started = time.perf_counter()
    results = engine.generate([question.tokens], params, media=[question.media])
    seconds = time.perf_counter() - started
    samples = [
        {
            "text": _text(engine, result),
            "token_ids": result.token_ids,
            "finish_reason": str(result.finish_reason),
            **({"error": result.error} if result.error else {}),
            **({"logprobs": logprob_data(result.logprobs)} if result.logprobs else {}),
        }
        for result in results
    ]
    data: dict[str, object] = {
        "samples": samples,
        "acceptance_length": engine.stats.acceptance_length,
        "iterations": engine.stats.iterations,
        "finish_reason": ", ".join(str(sample["finish_reason"]) for sample in samples),
        "backend": engine.backend.name,
        "device": str(engine.backend.device),
        "tokens_per_s": sum(len(result.token_ids) for result in results) / seconds,
        "seconds": seconds,
        **how,
    }

    def render(console: Console) -> None:
        for index, sample in enumerate(samples):
            console.print(f"--- sample {index}")
            console.print(str(sample["text"] if engine.has_tokenizer else sample["token_ids"]))
        _summary(console, data)

    failed = next((result.error for result in results if result.error), None)
    if failed is not None:
        data["error"] = failed
    return Report(data=data, render=render, exit_code=1 if failed else 0)


def _text(engine: Engine, result: Completion) -> str:
    """The text of a sample; empty where the checkpoint has no tokenizer."""
    if result.text is not None or not engine.has_tokenizer:
        return result.text or ""
    return engine.tokenizer.decode(result.token_ids)


def _summary(console: Console, data: dict[str, object]) -> None:
    console.print(
        f"\n{data['tokens_per_s']:.1f} tokens/s, acceptance length {data['acceptance_length']:.2f}, "
        f"{data['iterations']} iterations, finished: {data['finish_reason']}, backend {data['backend']} ({data['device']})"
    )
    if "error" in data:
        console.print(f"error: {data['error']}; the text before it is right", style="bold red", markup=False)


def _given(prompt: str | None, prompt_file: Path | None, token_ids: str | None, talk: Talk | None) -> str | list[int]:
    """The text or the tokens to continue; nothing where a conversation comes from a file."""
    if talk is None or talk.messages is None:
        if talk is not None and token_ids is not None:
            raise RequestError("--chat was given with --token-ids; a template is filled in with text: give --prompt instead")
        return _prompt(prompt, prompt_file) if token_ids is None else _token_ids(token_ids, prompt, prompt_file)
    if prompt is not None or prompt_file is not None or token_ids is not None:
        raise RequestError("--messages is a prompt, and so are --prompt, --prompt-file and --token-ids; give one of them")
    return ""


def _token_ids(given: str, prompt: str | None, prompt_file: Path | None) -> list[int]:
    if prompt is not None or prompt_file is not None:
        raise RequestError("--token-ids is a prompt, and so are --prompt and --prompt-file; give one of them")
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() and part.isascii() and len(part) < 20 for part in parts):
        raise RequestError(f"--token-ids is {shown(given)}; expected whole numbers with commas between them")
    return [int(part) for part in parts]


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise RequestError(
            f"{'neither' if prompt is None else 'both'} --prompt TEXT {'nor' if prompt is None else 'and'} --prompt-file F "
            "given; expected exactly one of them"
        )
    if prompt_file is None:
        text = prompt or ""
    else:
        data = read_bounded(prompt_file)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"{prompt_file}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    check_utf8("--prompt", text)
    if not text:
        raise RequestError("the prompt is empty; give at least one character")
    return text
