"""The work that every engine of ``outrider bench peers`` gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider_bench.load import MixedLoad
from outrider_bench.random_checkpoint import write_configs
from outrider_bench.random_model import RandomModel

PHASES: Mapping[str, str] = {
    "decode": "--prompt-tokens and --new-tokens",
    "prefill": "--prefill-tokens and a new token",
    "batch-prefill": "--prefill-batches and a new token",
    "mixed": "--prompts and --outputs",
    "context": "--contexts and --new-tokens",
}
"""The phases, with the options that set the lengths of their requests."""
_CACHE_MARGIN = 1.1
_VOCABULARY = 400
_MAX_MIXED = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerWork:
    """Random weights of a shape and the work of each phase, the same for all engines."""

    model: RandomModel
    """The weights and the synthetic acceptance, with an EAGLE draft; an engine replaces the proposer by the measured one."""
    dtype: str
    batches: tuple[int, ...]
    """Batch sizes of ``decode``."""
    prompt_tokens: int
    """Prompt length of ``decode``."""
    new_tokens: int
    """New tokens of each request of ``decode`` and ``context``."""
    rates: tuple[float, ...]
    """For each draft token the chance that it and all before it are accepted."""
    device: str
    """Name of the device, as torch spells it."""
    phases: tuple[str, ...]
    lengths: tuple[int, ...]
    """Prompt lengths of ``prefill``."""
    prompt_batches: tuple[tuple[int, int], ...]
    """Numbers of prompts and of tokens of each prompt of ``batch-prefill``."""
    contexts: tuple[int, ...]
    """Prompt lengths of ``context``, where one request decodes."""
    load: MixedLoad
    """The requests of ``mixed``."""
    max_requests: int
    max_context: int | None
    """Maximum number of tokens of a request; None: as many as the work needs."""
    memory: float
    """Fraction of the device's memory, for an engine that takes a fraction."""
    keep: str | None = None
    """Directory for compiled kernels of the engines; None: a temporary directory."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PeerWork:
        """Return the work that a child process gets as JSON."""
        fields = {name: _list_to_tuple(content[name]) for name in cls.__slots__ if name not in ("model", "load")}
        load = {name: _list_to_tuple(value) for name, value in content["load"].items()}
        return cls(**fields, model=RandomModel(**content["model"]), load=MixedLoad(**load))

    def describe(self) -> dict[str, object]:
        """Return the work as entries of a report."""
        about = self.model.description
        return {
            **{name: value for name, value in asdict(self).items() if name not in ("model", "load")},
            **{name: value for name, value in asdict(self.model).items() if name not in ("speculate", "draft_layers")},
            **asdict(self.load),
            **{name: about[name] for name in ("quantized", "acceptance")},
            "mixed": self.load.describe() if "mixed" in self.phases else None,
        }

    @property
    def _draft_room(self) -> int:
        return 2 * (self.model.draft_tokens + 1)

    def cases(self, phase: str) -> tuple[Any, ...]:
        """Return the cases of a phase: batch sizes, prompt lengths, numbers of prompts and of their tokens, or times."""
        found: dict[str, tuple[Any, ...]] = {
            "decode": self.batches,
            "prefill": self.lengths,
            "batch-prefill": self.prompt_batches,
            "mixed": ("seconds", "latency"),
            "context": self.contexts,
        }
        return found[phase]

    def requests(self, phase: str, case: Any) -> list[tuple[int, int]]:
        """Return the prompt length and the number of new tokens of each request of a case, all of which arrive at once."""
        if phase == "mixed":
            return self.load.lengths
        if phase == "decode":
            return [(self.prompt_tokens, self.new_tokens)] * int(case)
        if phase == "context":
            return [(case, self.new_tokens)]
        count, tokens = case if phase == "batch-prefill" else (1, case)
        return [(tokens, 1)] * count

    @property
    def _all_requests(self) -> list[tuple[str, list[tuple[int, int]]]]:
        """The requests of each case of the measured phases, with the phase."""
        return [(phase, self.requests(phase, case)) for phase in self.phases for case in self.cases(phase)]

    @property
    def longest(self) -> tuple[int, str]:
        """Maximum length of a request in tokens, and the options that set it."""
        return max(
            (self.load.longest if phase == "mixed" else max(map(sum, requests)), PHASES[phase])
            for phase, requests in self._all_requests
        )

    @property
    def concurrent(self) -> int:
        """Maximum number of requests that arrive at once, of ``mixed`` at most 128."""
        return max(
            min(len(requests), _MAX_MIXED) if phase == "mixed" else len(requests) for phase, requests in self._all_requests
        )

    @property
    def shape_context(self) -> int:
        """Maximum context of a model of this shape."""
        from outrider.model.config.shapes import shape_config

        return shape_config(self.model.shape).max_context

    @property
    def context(self) -> int:
        """Maximum tokens of a request for an engine: ``max_context``, or the longest request with room for drafts."""
        if self.max_context is not None:
            return self.max_context
        return min(self.longest[0] + self._draft_room, self.shape_context)

    @property
    def cached_tokens(self) -> int:
        """Capacity of the KV cache in tokens: the maximum that runs at the same time, and a margin."""
        most = [self.context]
        for _, requests in self._all_requests:
            lengths = sorted((prompt + new + self._draft_room for prompt, new in requests), reverse=True)
            most.append(sum(lengths[: self.max_requests]))
        return round(_CACHE_MARGIN * max(most)) + 64 * self.max_requests

    @property
    def vocabulary(self) -> int:
        """Number of different token ids in prompts. Any number serves, because the weights are random."""
        from outrider.model.config.shapes import shape_config

        return min(_VOCABULARY, shape_config(self.model.shape).vocab_size)


def _list_to_tuple(value: Any) -> Any:
    return tuple(_list_to_tuple(each) for each in value) if isinstance(value, list) else value


def checkpoint_configs(work: PeerWork, directory: Path) -> tuple[Path, Path]:
    """Write the configs of a target and of a draft, without weights, and return their directories.

    The same work has the same directories, since engines find compiled kernels by the name of a directory.
    """
    model = work.model
    quantized = [] if model.quantize is None else [model.quantize, *(["head"] if model.quantize_head else [])]
    root = directory / "-".join([*Path(model.shape).parts[-2:], work.dtype, *quantized]).replace("/", "")
    return write_configs(model.shape, root, dtype=work.dtype, quantize=model.quantize, quantize_head=model.quantize_head)


def cache_bytes(work: PeerWork, *, drafts: bool) -> int:
    """Return the bytes of keys and values of :attr:`PeerWork.cached_tokens`, with a draft layer if ``drafts``.

    A request of a hybrid model also has a recurrent state for each verified token. One more state covers the last page of
    its keys, since vLLM gives that page the size of a state.
    """
    from outrider.engine.config import DTYPES
    from outrider.model.config.shapes import shape_config

    shape = shape_config(work.model.shape)
    dtype = DTYPES[work.dtype]
    layers = len(shape.attention_layers) + (1 if drafts else 0)
    cached = work.cached_tokens * layers * sum(heads * size for heads, size in shape.cached_sizes) * dtype.itemsize
    if shape.recurrent is None:
        return cached
    states = 2 + (work.model.draft_tokens if drafts else 0)
    return cached + round(_CACHE_MARGIN * work.max_requests * states * shape.recurrent.state_bytes(dtype))
