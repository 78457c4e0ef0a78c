"""``outrider generate``: print a model's continuation of a prompt, and the first difference from non-speculative decoding."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from outrider.cli.options.models import launched
from outrider.cli.options.option_records import (
    ChatOption,
    GuideOption,
    ImageOption,
    MaxTokensOption,
    MessagesOption,
    ModelOptions,
    SamplingOptions,
    build_guide,
    encode_prompt,
    find_template,
    read_messages,
    with_options,
)
from outrider.cli.options.option_values import INPUT_FILE, JsonOption, checking_options, option, parsed, text
from outrider.cli.options.rank_processes import (
    DataParallelOption,
    ExpertParallelOption,
    Joined,
    TensorParallelOption,
    run_on_ranks,
)
from outrider.cli.terminal.files import read_text
from outrider.cli.terminal.report import CommandReport, Interrupted, highlighter
from outrider.cli.terminal.torch_probe import require_torch
from outrider.device.errors import ConfigError
from outrider.errors import RequestError
from outrider.speculative.plugin import DRAFTLESS

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.engine.requests.request import StepOutput
    from outrider.engine.requests.sampling import SamplingParams
    from outrider.model import Media, Tokenizer


_ENOUGH_DRAFTS, _CHANCE = 24, 0.03
"""Minimum number of draft tokens for a judgement of their acceptance, and the accepted share that counts as chance."""


@dataclass(slots=True)
class StreamedOutput:
    """The output of one request so far, and its figures once the request has ended."""

    prompt: Sequence[int]
    media: Sequence[Media] = ()
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    """Failure of the device that ended the request; the tokens before it are valid."""
    iterations: int = 0
    acceptance_length: float = 0.0
    """Mean number of tokens that one verification yielded."""
    drafted: int = 0
    """Number of draft tokens that were verified."""
    seconds: float = 0.0
    """Time from the request to its last token."""

    @property
    def tokens_per_s(self) -> float:
        """Return the output tokens per second of the whole request, prefill included."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    def stream(
        self,
        engine: Engine,
        params: SamplingParams,
        write: Callable[[str], object] | None,
        *,
        ended: Callable[[], bool] = lambda: False,
        highlight: Callable[[str], str] = str,
    ) -> None:
        """Generate the request's output, and pass text to ``write`` as soon as later tokens can't change it.

        Aborts the request once ``ended`` returns True. ``highlight`` formats the text of accepted draft tokens.
        """
        before = engine.stats
        started = time.perf_counter()
        try:
            # Closed here, not by the garbage collector: an interrupted stream must end its request now.
            outputs = cast("Generator[StepOutput]", engine.stream(self.prompt, params, media=self.media))
            with closing(outputs):
                for output in outputs:
                    self.tokens.extend(output.tokens)
                    if output.text is not None:
                        self.text += output.text
                        if write is not None and output.text:
                            drafted, own = split_text(output, engine.tokenizer)
                            write((highlight(drafted) if drafted else "") + own)
                            sys.stdout.flush()
                    elif write is not None:
                        self._write_token_ids(output.tokens, write)
                    if output.finish_reason is not None:
                        self.finish_reason = str(output.finish_reason)
                    self.error = self.error or output.error
                    if ended():
                        break
        finally:
            self.seconds = time.perf_counter() - started
            after = engine.stats
            self.iterations = after.request_iterations - before.request_iterations
            verified = after.verified_tokens - before.verified_tokens
            self.acceptance_length = verified / self.iterations if self.iterations else 0.0
            self.drafted = after.drafted_tokens - before.drafted_tokens
            if write is not None and self.tokens:
                write("\n")
                sys.stdout.flush()

    @property
    def is_accepted_by_chance(self) -> bool:
        """True if enough draft tokens were verified, and hardly any was accepted."""
        accepted = (self.acceptance_length - 1) * self.iterations
        return self.drafted >= _ENOUGH_DRAFTS and accepted < _CHANCE * self.drafted

    def _write_token_ids(self, tokens: Sequence[int], write: Callable[[str], object]) -> None:
        """Write the ids of the newest ``tokens``; used for a checkpoint without a tokenizer."""
        begin = "" if len(tokens) == len(self.tokens) else ","
        if tokens:
            write(begin + ",".join(map(str, tokens)))
            sys.stdout.flush()

    def data(self, engine: Engine) -> dict[str, object]:
        """Return the output, its figures and the device as JSON data."""
        return {
            "text": self.text,
            "token_ids": self.tokens,
            "finish_reason": self.finish_reason,
            **({"error": self.error} if self.error else {}),
            "acceptance_length": self.acceptance_length,
            "iterations": self.iterations,
            "backend": engine.backend.name,
            "device": str(engine.backend.device),
            "tokens_per_s": self.tokens_per_s,
            "seconds": self.seconds,
        }


def parse_token_ids(given: str) -> list[int]:
    """Return the token ids of a text such as ``1,2,3``. Raises :class:`RequestError` for anything else."""
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() and part.isascii() and len(part) < 20 for part in parts):
        raise RequestError("expected whole numbers with commas between them, such as 12,7")
    return [int(part) for part in parts]


@with_options
def generate(
    context: typer.Context,
    *,
    prompt: Annotated[str | None, option("--prompt", value=text(), help="The text to continue.")] = None,
    prompt_file: Annotated[
        Path | None, option("--prompt-file", value=INPUT_FILE, help="A file with the text; - is standard input.")
    ] = None,
    token_ids: Annotated[
        str | None,
        option("--token-ids", value=parsed("N,N,…", parse_token_ids), help="The prompt as token ids, instead of a text."),
    ] = None,
    chat: ChatOption = False,
    messages: MessagesOption = None,
    image: ImageOption = None,
    max_tokens: MaxTokensOption = 64,
    options: ModelOptions,
    compare: Annotated[
        bool,
        option(
            "--compare",
            help="Also decode greedily without speculation; exit code 1 if the tokens differ. In float32 unless --dtype or "
            "--exact is given; a difference is shown with the gap of the logits.",
        ),
    ] = False,
    sampling: SamplingOptions,
    guide: GuideOption = None,
    tensor_parallel: TensorParallelOption = 1,
    data_parallel: DataParallelOption = 1,
    expert_parallel: ExpertParallelOption = False,
    json_output: JsonOption = False,
) -> CommandReport | None:
    """Continue a prompt, and print the text during generation. Without --model the bundled model continues it."""
    with checking_options():
        conversation = None if messages is None else read_messages(messages)
        tokens_or_text = _prompt_of(prompt, prompt_file, token_ids, chat=chat, has_messages=conversation is not None)
        if compare and sampling.temperature != 0:
            raise ConfigError(
                f"--compare compares greedy decoding, the temperature is {sampling.temperature}; leave --temperature out"
            )
        params = sampling.params(max_tokens=max_tokens, guide=build_guide(guide or ()))
    require_torch()
    ranks_report = run_on_ranks(context.obj, tensor_parallel, data_parallel, expert=expert_parallel, json_output=json_output)
    if ranks_report is not None:
        return ranks_report
    from outrider.engine.config import Choice

    speculation, dtype = options.speculation(), options.dtype
    command_choices = [Choice("max_requests", 1, "this command makes one request")]
    if compare and dtype is None and not options.exact:
        dtype = "float32"
        command_choices.insert(0, Choice("dtype", dtype, "--compare compares tokens, and coarser rounding makes others"))
    template = find_template(speculation.model) if chat or conversation is not None else None
    with Joined(tensor_parallel, data_parallel, expert=expert_parallel) as joined:
        load_engine = options.loader(
            speculation, max_requests=1, dtype=dtype, command_choices=command_choices, join=joined.join
        )
        load_reference = options.loader(speculation.without(), max_requests=1, dtype=dtype, join=joined.join, verbose=False)
        engine = load_engine()
        if engine.follows:
            engine.follow()
            if compare:
                load_reference().follow()
            return None
        with closing(engine):
            if template is not None:
                tokens_or_text = template.tokens(conversation or [_user_message(tokens_or_text, len(image or ()))])
            output = StreamedOutput(*encode_prompt(engine, tokens_or_text, speculation.model, image or ()))
            try:
                output.stream(engine, params, None if json_output else sys.stdout.write, highlight=highlighter())
            except KeyboardInterrupt:
                raise Interrupted(f"interrupted after {len(output.tokens)} tokens", output.data(engine)) from None
        launch = launched(engine, command_choices)
        data: dict[str, Any] = {**output.data(engine), "speculate": speculation.kind, **launch}
        if output.error is not None or not compare:
            code = 1 if output.error else 0
            return CommandReport(data=data, render=lambda console: _summary(console, data), exit_code=code, streamed=True)
        return _compare(load_reference(), params, output, data)


def split_text(output: StepOutput, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the new text of an output in two parts: the text of its accepted draft tokens, and the rest.

    The first part is empty if the text of the last token can't be told from the text before it.
    """
    piece = output.text or ""
    if not output.drafted:
        return "", piece
    own = tokenizer.decode(output.tokens[output.drafted :])
    return (piece[: len(piece) - len(own)], own) if piece.endswith(own) else ("", piece)


def _compare(reference_engine: Engine, params: SamplingParams, output: StreamedOutput, data: dict[str, Any]) -> CommandReport:
    """Decode the prompt of ``output`` without speculation and add the comparison to ``data``. Closes the engine."""
    reference = StreamedOutput(output.prompt, output.media)
    with closing(reference_engine):
        reference.stream(reference_engine, params, None)
    data["non_speculative"] = reference.data(reference_engine)
    data["same_tokens"] = reference.tokens == output.tokens
    data["acceptance_near_chance"] = data["speculate"] not in DRAFTLESS and output.is_accepted_by_chance
    if not data["same_tokens"]:
        data["difference"] = _find_difference(reference_engine, params, output, reference.tokens)
    return CommandReport(
        data=data,
        render=lambda console: _comparison(console, data, reference),
        exit_code=0 if data["same_tokens"] else 1,
        streamed=True,
    )


def _comparison(console: Console, data: dict[str, Any], reference: StreamedOutput) -> None:
    """Print the statistics of the speculative and the non-speculative run, and the first difference of their tokens."""
    _summary(console, data)
    console.print(f"outrider: {reference.tokens_per_s:.1f} tokens/s without speculation")
    console.print(f"outrider: same tokens as non-speculative greedy decoding: {'yes' if data['same_tokens'] else 'no'}")
    if data["acceptance_near_chance"]:
        console.print(
            "outrider: warning: hardly any draft was accepted, as if by chance: the draft may belong to another model, or "
            "its config may name other layers than it was trained with (eagle_aux_hidden_state_layer_ids)"
        )
    if not data["same_tokens"]:
        console.print(f"outrider: first difference: {_shown_difference(data['difference'], data['dtype'])}")


def _find_difference(
    reference: Engine, params: SamplingParams, output: StreamedOutput, reference_tokens: Sequence[int]
) -> dict[str, Any] | None:
    """Return the first token of ``output`` that differs from the reference, or None if only their lengths differ.

    Includes the gap of the logits if nothing but the logits decides the tokens.
    """
    from outrider.model import Decoder

    reshaped = params.penalized or params.biases or params.min_tokens or params.guide is not None
    by_logits = isinstance(reference.model, Decoder) and reference.model.ranks.is_single
    if output.media or reshaped or not by_logits:
        return first_difference(output.tokens, reference_tokens)
    return difference_of_logits(reference, output.prompt, output.tokens, reference_tokens)


def first_difference(speculative_tokens: Sequence[int], reference_tokens: Sequence[int]) -> dict[str, Any] | None:
    """Return position and tokens of the first difference, or None if one output is a prefix of the other."""
    for position, (speculative, plain) in enumerate(zip(speculative_tokens, reference_tokens, strict=False)):
        if speculative != plain:
            return {"position": position, "speculative": speculative, "plain": plain}
    return None


def difference_of_logits(
    reference: Engine, prompt: Sequence[int], speculative_tokens: Sequence[int], reference_tokens: Sequence[int]
) -> dict[str, Any] | None:
    """Return the first difference of two continuations of ``prompt`` as :func:`first_difference` does, with its logits.

    They are computed again by a prefill of the common part, with the native model, kernels, dtype, page size and context
    length of ``reference``. ``top_logit`` is the largest logit, ``gap`` the distance between it and the lower one of both
    tokens' logits, and ``gap_roundings`` the same in units of the last place of the engine's dtype at ``top_logit``.
    """
    import torch

    found = first_difference(speculative_tokens, reference_tokens)
    if found is None:
        return None
    logits = _logits_after(reference, [*prompt, *speculative_tokens[: found["position"]]])
    top = max(logits)
    gap = top - min(logits[found["speculative"]], logits[found["plain"]])
    unit = torch.finfo(reference.config.torch_dtype).eps * 2.0 ** math.floor(math.log2(max(abs(top), 2.0**-20)))
    return {**found, "top_logit": top, "gap": gap, "gap_roundings": gap / unit}


def _logits_after(engine: Engine, tokens: Sequence[int]) -> list[float]:
    """Return the logits [V] after ``tokens``, from a prefill by a new engine like ``engine``."""
    from outrider.device import WrappedKernels
    from outrider.engine.config import EngineConfig
    from outrider.engine.engine import Engine
    from outrider.engine.requests.sampling import SamplingParams
    from outrider.model import Decoder

    recorded: list[Any] = []

    class RecordingKernels(WrappedKernels):
        """Kernels that record the logits of reported log-probabilities. They can't run in a captured graph."""

        def logprobs(self, logits: Any, tokens: Any, count: int) -> Any:
            """Record the logits, and return the log-probabilities of the wrapped kernels."""
            recorded.append(logits.flatten(0, -2)[0].double())
            return super().logprobs(logits, tokens, count)

    model, config = engine.model, engine.config
    assert isinstance(model, Decoder)
    config_of_prefill = EngineConfig(
        max_requests=1,
        page_size=config.page_size,
        max_context=engine.max_context,
        dtype=config.dtype,
        mode="staged",
        graphs=False,
        overlap=False,
        prefix_cache=False,
    )
    decoder = Decoder(model.config, model.weights, RecordingKernels(model.kernels))
    prefill = Engine(decoder, engine.backend, config=config_of_prefill)
    prefill.generate([tokens], SamplingParams(max_tokens=1, logprobs=0, ignore_eos=True))
    row: list[float] = recorded[-1].tolist()
    return row


def _shown_difference(difference: object, dtype: object) -> str:
    if not isinstance(difference, dict):
        return "in the length"
    where = f"at token {difference['position']}"
    if "gap" not in difference:
        return where
    return (
        f"{where}, where the logits of both are within {difference['gap']:.3g} of the largest "
        f"({difference['gap_roundings']:.1f} roundings of {dtype})"
    )


def _summary(console: Console, data: dict[str, object]) -> None:
    drafted = "" if data["speculate"] == "none" else f", {data['speculate']} accepts {data['acceptance_length']:.2f}"
    console.print(f"outrider: {data['tokens_per_s']:.1f} tokens/s on {data['backend']} in {data['dtype']}{drafted}")
    if "error" in data:
        console.print(f"outrider: error: {data['error']}; the text before it is right", style="bold red", markup=False)


def _user_message(prompt: str | Sequence[int], images: int) -> dict[str, Any]:
    """Return the only message of a conversation. It begins with placeholders for ``images`` images."""
    content: Any = prompt
    if images:
        content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": prompt}]
    return {"role": "user", "content": content}


def _prompt_of(
    prompt: str | None, prompt_file: Path | None, token_ids: str | None, *, chat: bool, has_messages: bool
) -> str | list[int]:
    """Return the text or the tokens to continue, or an empty text if the conversation comes from a file."""
    if has_messages:
        if prompt is not None or prompt_file is not None or token_ids is not None:
            raise RequestError("--messages is a prompt, and so are --prompt, --prompt-file and --token-ids; give one of them")
        return ""
    if chat and token_ids is not None:
        raise RequestError("--chat was given with --token-ids; a template is filled in with text: give --prompt instead")
    if token_ids is None:
        return _prompt_text(prompt, prompt_file)
    if prompt is not None or prompt_file is not None:
        raise RequestError("--token-ids is a prompt, and so are --prompt and --prompt-file; give one of them")
    return parse_token_ids(token_ids)


def _prompt_text(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise RequestError(
            f"{'neither' if prompt is None else 'both'} --prompt TEXT {'nor' if prompt is None else 'and'} --prompt-file F "
            'given; expected exactly one of these and --token-ids, such as --prompt "def read("'
        )
    text = prompt or "" if prompt_file is None else read_text(prompt_file)
    if not text:
        raise RequestError("the prompt is empty; give at least one character")
    return text
