"""Options that several commands share, as records, and the prompt of a command.

:func:`with_options` expands a record into the options of a command. A record has the model and its device, or how tokens are
sampled. The prompt is a text with images or a conversation, and its output may have to match a guide.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

from outrider.cli.options.models import (
    DraftOption,
    DraftTokensOption,
    DraftTopkOption,
    DraftVocabularyOption,
    DraftWeightsOption,
    DtypeOption,
    ExactOption,
    KvDtypeOption,
    KvMemoryOption,
    MaxContextOption,
    MaxRequestsOption,
    ModelOption,
    PageSizeOption,
    QuantizedOption,
    QuantizeOption,
    SpeculateOption,
    Speculation,
    TransformersOption,
    TrustOption,
    check_draft,
    given_settings,
    load,
)
from outrider.cli.options.option_values import (
    INPUT_FILE,
    BackendOption,
    UsageError,
    VerboseOption,
    closest,
    number,
    option,
    text,
    whole,
)
from outrider.cli.terminal.files import read_bounded, read_text
from outrider.errors import RequestError, shown

if TYPE_CHECKING:
    from outrider.engine.engine import Engine
    from outrider.engine.guides.guides import Guide
    from outrider.engine.requests.sampling import SamplingParams
    from outrider.model import Media, Tokenizer
    from outrider.model.media.chat_template import ChatTemplate


Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model, its draft, its device and its context length: the options of each command that runs a model."""

    model: ModelOption = None
    speculate: SpeculateOption = None
    backend: BackendOption = None
    draft: DraftOption = None
    draft_tokens: DraftTokensOption = 4
    draft_topk: DraftTopkOption = 1
    quantized: QuantizedOption = "kernels"
    quantize: QuantizeOption = None
    dtype: DtypeOption = None
    kv_dtype: KvDtypeOption = "auto"
    max_context: MaxContextOption = None
    exact: ExactOption = False
    through_transformers: TransformersOption = False
    trust_remote_code: TrustOption = False
    verbose: VerboseOption = False

    def __post_init__(self) -> None:
        check_draft(self.speculate, self.draft)
        if self.trust_remote_code and not self.through_transformers:
            raise UsageError("--trust-remote-code goes with --through-transformers; add it, or leave both out")
        if self.quantize is not None and self.through_transformers:
            raise UsageError("--quantize has no effect on the code of transformers; leave --through-transformers out")

    def speculation(self) -> Speculation:
        """Return the checkpoints and the proposer. Raises :class:`CheckpointError` for a checkpoint that can't be found."""
        names = {each.name for each in fields(Speculation)} | {"quantize"}
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name in names}
        return Speculation.with_defaults(self.speculate, **own)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the engine that these options give, for :func:`~outrider.cli.options.models.load`."""
        return given_settings(max_context=self.max_context, kv_dtype=self.kv_dtype, batch_invariant=self.exact)

    def loader(self, speculation: Speculation, **overrides: Any) -> Callable[..., Engine]:
        """Return :func:`~outrider.cli.options.models.load` bound to these options; ``overrides`` replace them."""
        own: dict[str, Any] = {"dtype": self.dtype, "settings": self.settings(), "verbose": self.verbose}
        return partial(load, self.backend, speculation, **own | overrides)


@dataclass(frozen=True, kw_only=True)
class ServerOptions(ModelOptions):
    """The options of :class:`ModelOptions`, the sizes of a server's KV cache and batch, and how its drafts are selected."""

    kv_memory: KvMemoryOption = None
    page_size: PageSizeOption = None
    max_requests: MaxRequestsOption = None
    draft_weights: DraftWeightsOption = None
    draft_vocabulary: DraftVocabularyOption = None

    def settings(self) -> dict[str, Any]:
        """Return the settings of the server's engine that these options give."""
        own = given_settings(kv_memory=self.kv_memory, page_size=self.page_size, max_requests=self.max_requests)
        return super().settings() | own


def with_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a command so that typer sees the options of each parameter that is annotated as a record of options.

    The decorated function takes every option by keyword, as typer calls it, and passes the records to ``command``. Raises
    :class:`TypeError` if two records share an option.
    """
    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    records: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        annotation = hints[name]
        if isinstance(annotation, type) and is_dataclass(annotation):
            inner, each = get_type_hints(annotation, include_extras=True), fields(annotation)
            parameters += [_option(field.name, field.default, inner[field.name]) for field in each]
            records[name] = annotation, tuple(field.name for field in each)
        else:
            parameters.append(_option(name, parameter.default, annotation))
    twice = len(parameters) - len({parameter.name for parameter in parameters})
    if twice:
        raise TypeError(f"{command.__name__} has {twice} options that two of its records share, expected each one once")

    @wraps(command)
    def call(**given: Any) -> Result:
        made = {name: record(**{each: given.pop(each) for each in names}) for name, (record, names) in records.items()}
        return command(**given, **made)

    del call.__wrapped__  # its signature would be taken for this one
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _option(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    value = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=annotation)


_MAX_GUIDE_BYTES = 1 << 20

MaxTokensOption = Annotated[int, option("--max-tokens", value=whole(1), help="Maximum number of new tokens of a text.")]
TemperatureOption = Annotated[
    float, option("--temperature", value=number(0), help="Temperature of the samples; 0 is greedy.")
]
SeedOption = Annotated[
    int, option("--seed", value=whole(-(2**63), 2**63 - 1), help="Random seed of the samples; unused at temperature 0.")
]
TopKOption = Annotated[int, option("--top-k", value=whole(0), help="Sample from the K likeliest tokens; 0: all.")]
TopPOption = Annotated[
    float,
    option("--top-p", value=number(0, 1, above=True), help="Sample from the likeliest tokens with this total probability."),
]
StopOption = Annotated[list[str] | None, option("--stop", value=text(), help="End before this text. Repeatable.")]
GuideOption = Annotated[
    list[str] | None,
    option(
        "--guide",
        value=text("KIND[=VALUE]"),
        help="The output must match: json-object, json-schema=FILE|TEXT (TEXT starts with {), regex=PATTERN, grammar=FILE "
        "(EBNF of GBNF, from the rule root on), or choice=TEXT. Repeat choice for several texts.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of a request on the command line: how its tokens are sampled, and where its text ends."""

    temperature: TemperatureOption = 0.0
    seed: SeedOption = 0
    top_k: TopKOption = 0
    top_p: TopPOption = 1.0
    stop: StopOption = None

    def params(self, **others: Any) -> SamplingParams:
        """Return the engine's record of these options and ``others``. Raises :class:`RequestError` for a bad value."""
        from outrider.engine.requests.sampling import SamplingParams

        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed,
            top_k=self.top_k,
            top_p=self.top_p,
            stop=tuple(self.stop or ()),
            **others,
        )


def build_guide(given: Sequence[str]) -> Guide | None:
    """Return the guide that the values of ``--guide`` describe, or None without a value.

    Raises :class:`RequestError` for an unknown kind, for several guides, and for a file that isn't UTF-8 text.
    """
    from outrider.engine.guides.guides import ChoiceGuide, Ebnf, JsonObject, JsonSchema, Regex

    if not given:
        return None
    pairs = [text.partition("=")[::2] for text in given]
    kinds = {kind for kind, _ in pairs}
    if len(kinds) > 1 or (len(pairs) > 1 and kinds != {"choice"}):
        raise RequestError(f"--guide was given {len(pairs)} times; an output matches one guide: repeat choice=TEXT alone")
    kind, value = pairs[0]
    if (kind == "json-object") == ("=" in given[0]):
        raise RequestError(
            f"--guide is {shown(given[0])}; expected json-object, or a kind with its value, such as regex=[0-9]+"
        )
    match kind:
        case "json-object":
            return JsonObject()
        case "json-schema":
            return JsonSchema(
                value if value.lstrip().startswith("{") else read_text(Path(value), "a JSON schema", _MAX_GUIDE_BYTES)
            )
        case "regex":
            return Regex(value)
        case "grammar":
            return Ebnf(read_text(Path(value), "a grammar", _MAX_GUIDE_BYTES))
        case "choice":
            return ChoiceGuide([text for _, text in pairs])
    kinds_of_guide = ("json-object", "json-schema", "regex", "grammar", "choice")
    raise RequestError(
        f"--guide has the kind {shown(kind)}; expected one of {', '.join(kinds_of_guide)}{closest(kind, kinds_of_guide)}"
    )


ImageOption = Annotated[
    list[Path] | None,
    option(
        "--image",
        value=INPUT_FILE,
        help="Image for a vision-language model. Repeatable. It replaces <|image_pad|> in the prompt, or precedes the text.",
    ),
]

_IMAGE_START, _IMAGE_END = "<|vision_start|>", "<|vision_end|>"
"""Tokens that Qwen's models expect around an image."""
_MAX_IMAGE_BYTES = 256 * 2**20


def encode_prompt(
    engine: Engine, text: str | Sequence[int], model: Path, images: Sequence[Path]
) -> tuple[Sequence[int], Sequence[Media]]:
    """Return the token ids of the text, unless it's token ids already, and the images that belong to placeholders among them.

    Raises :class:`RequestError` for a file that isn't an image, for an image without a placeholder, and for a text if the
    checkpoint has no tokenizer.
    """
    if not isinstance(text, str):
        tokens = list(text)
    elif engine.has_tokenizer:
        tokens = engine.tokenizer.encode(text)
    else:
        raise RequestError(f"{model} has no tokenizer; give the prompt as --token-ids, and token ids come back")
    vision = engine.model.config.vision
    if not images:
        return tokens, ()
    if vision is None:
        raise RequestError(f"--image was given, but {model} is a checkpoint of a model of text alone")
    from outrider.model import MediaProcessor

    processor = MediaProcessor.from_checkpoint(model)
    media = [processor.image(_read_image(path)) for path in images]
    if vision.image_token not in tokens and engine.has_tokenizer:
        start = engine.model.config.bos_token_id
        tokens = _with_image_placeholders(engine.tokenizer, tokens, vision.image_token, len(images), start)
    return tokens, media


def _with_image_placeholders(
    tokenizer: Tokenizer, tokens: list[int], image_token: int, count: int, start: int | None
) -> list[int]:
    """Return ``tokens`` with placeholders for ``count`` images after the start token and before the text."""
    around = [[token] if (token := tokenizer.token_id(name)) is not None else [] for name in (_IMAGE_START, _IMAGE_END)]
    begin = 1 if tokens[:1] == [start] else 0
    return [*tokens[:begin], *[*around[0], image_token, *around[1]] * count, *tokens[begin:]]


def _read_image(path: Path) -> object:
    from outrider.model.media.vision import decode_image

    try:
        data = read_bounded(path, "an image", _MAX_IMAGE_BYTES)
    except OSError as error:
        raise RequestError(f"{path}: {error}") from error
    try:
        return decode_image(data)
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error


_MAX_TEMPLATE_BYTES = 1 << 20
_MAX_MESSAGES = 10_000

ChatOption = Annotated[bool, option("--chat", help="Pass the prompt as a message, through the checkpoint's chat template.")]
MessagesOption = Annotated[
    Path | None,
    option(
        "--messages",
        value=INPUT_FILE,
        help='A conversation to answer, as JSON: [{"role": "user", "content": "…"}, …]; - is standard input.',
    ),
]
ChatTemplateOption = Annotated[
    Path | None, option("--chat-template", value=INPUT_FILE, help="A Jinja template in place of the checkpoint's.")
]


def find_template(model: Path, source: str | None = None) -> ChatTemplate:
    """Return the chat template of a checkpoint, or ``source`` in its place.

    Raises :class:`RequestError` for a checkpoint without a template or without a tokenizer.
    """
    from outrider.model.media.chat_template import ChatTemplate
    from outrider.model.media.tokenizer import has_tokenizer

    if not has_tokenizer(model):
        raise RequestError(f"{model} has no tokenizer, so it can't chat; outrider generate --token-ids takes token ids")
    found = ChatTemplate.from_checkpoint(model, source=source)
    if found is None:
        raise RequestError(
            f"{model} has no chat template: it continues texts, and wasn't made to answer messages; give it a template with "
            "outrider chat --chat-template FILE, choose a checkpoint that was trained to chat, or use outrider generate "
            "--prompt TEXT"
        )
    return found


def read_template(path: Path) -> str:
    """Read a Jinja template from a file. Raises :class:`RequestError` for a file that isn't UTF-8 text."""
    return read_text(path, "a chat template", _MAX_TEMPLATE_BYTES)


def read_messages(path: Path) -> tuple[Mapping[str, Any], ...]:
    """Read the messages of a JSON file. Raises :class:`RequestError`, which names the first invalid message."""
    try:
        found = json.loads(read_text(path, "messages as JSON"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: not JSON: {error}") from None
    if not isinstance(found, list) or not 0 < len(found) <= _MAX_MESSAGES:
        raise RequestError(
            f"{path}: has {shown(found)}; expected a list of 1 to {_MAX_MESSAGES} messages: "
            '[{"role": "user", "content": "…"}]'
        )
    for index, message in enumerate(found):
        where = f"{path}: message {index}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"{where} is {shown(message)}; expected an object with a role and its content")
        _decode_arguments(message.get("tool_calls"))
        content = message.get("content")
        if content in (None, "") and message["role"] == "assistant":
            continue  # it may call tools instead
        if not isinstance(content, str | list) or not content:
            raise RequestError(f"{where}, of the role {shown(message['role'])}: content is {shown(content)}; expected a text")
        parts = content if isinstance(content, list) else []
        for position, part in enumerate(parts):
            is_part = isinstance(part, dict) and isinstance(part.get("type"), str)
            if not is_part or (part["type"] == "text" and not isinstance(part.get("text"), str)):
                raise RequestError(
                    f"{where}: content[{position}] is {shown(part)}; expected an object with a type, such as "
                    '{"type": "text", "text": "…"}'
                )
        if parts and all(part["type"] == "text" for part in parts):  # many templates read no list
            message["content"] = "\n".join(part["text"] for part in parts)
    return tuple(found)


def _decode_arguments(calls: Any) -> None:
    """Replace the arguments of tool calls that are JSON text, as in OpenAI's API, by the objects that templates expect."""
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            from outrider.model.media.chat_template import call_arguments

            function["arguments"] = call_arguments(function["arguments"])
