"""Loading of the transformers fallback, and the checks that a model computes correct results on paged attention."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.device import AttentionMetadata, Backend, ConfigError, DeviceFault, DeviceLost, OutOfDeviceMemory
from outrider.errors import CheckpointError
from outrider.model.checkpoint.files import describe, present, read_json, regular_size, wrap_read_errors
from outrider.model.checkpoint.loading import loading_stream
from outrider.model.checkpoint.location import refuse_other_formats
from outrider.model.checkpoint.opening import open_checkpoint
from outrider.model.config.checkpoint_config import special_tokens
from outrider.model.config.config_fields import check_any_config
from outrider.model.config.model_config import ModelConfig
from outrider.model.layers.cache import KVCache
from outrider.model.layers.inputs import ForwardInput
from outrider.model.layers.transformers_decoder import ATTENTION, PagedPass, TransformersDecoder, paged_attention
from outrider.model.quantization.config import refuse_quantized

_PROBE_PAGE_SIZE = 4
_PROBE_LENGTHS = (11, 7)  # tokens of the two sequences of the check
# Maximum norm of the difference relative to the norm of the logits. Both computations round in a different order.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_MAX_MISSING = 1 << 26  # values; a larger difference is refused before the model is built; transformers reports a smaller one
_REMOTE_CODE = "trust_remote_code"  # appears in transformers' error message
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
_EXPERT_IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")  # of transformers, fastest first
_EXPECTED_MODEL = "another model, or one of the native families"


def load_through_transformers(
    directory: str | Path, *, backend: Backend, dtype: torch.dtype, trust_remote_code: bool = False
) -> TransformersDecoder:
    """Load a decoder that transformers can run with a replaceable attention.

    The decoder is slower than a native one. Raises :class:`CheckpointError` for a checkpoint that transformers doesn't load
    completely, and for a model whose attention the paged cache can't serve. These are models with capped attention scores,
    layers without attention, chunked attention or batch-dependent rope scaling, and any model whose logits through the paged
    cache differ from those without it.

    ``trust_remote_code`` runs Python code of the checkpoint with all rights of this process. Without it a checkpoint that
    needs its own code is an error.
    """
    from transformers import AttentionInterface

    directory = Path(directory)
    AttentionInterface.register(ATTENTION, paged_attention)
    _check_files(directory, dtype, trust_remote_code)
    with loading_stream(backend, dtype), wrap_read_errors(directory, "a model of transformers"):
        model = _load(directory, dtype, trust_remote_code).to(backend.device).eval().requires_grad_(False)
        config = _model_config(directory, model.config)
        if not model._supports_attention_backend:
            raise CheckpointError(f"{directory}: transformers' {type(model).__name__} has no replaceable attention")
        decoder = TransformersDecoder(config, model, backend.kernels_in_use)
        _compare_with_unpaged(directory, decoder, model, _logits_without_cache(directory, config, model))
    return decoder


def _check_files(directory: Path, dtype: torch.dtype, trust_remote_code: bool) -> None:
    """Raise :class:`CheckpointError` unless the tensor files are intact and hold about as many values as a model of this
    config needs.
    """
    path = directory / "config.json"
    refuse_other_formats(directory)
    refuse_quantized(directory)
    raw = read_json(path)
    for entry in directory.iterdir():  # transformers may open any of them
        if not entry.is_dir():
            regular_size(entry)
    files = open_checkpoint(directory)
    if files.origin.name.endswith(".index.json") and present(directory / files.origin.name.removesuffix(".index.json")):
        raise CheckpointError(f"{files.origin}: is the index of several files, but there's a single one as well")
    if present(directory / "generation_config.json"):
        read_json(directory / "generation_config.json")
    with wrap_read_errors(path, "a config"):
        check_any_config(raw, len(files.tensors))
        if trust_remote_code:
            return  # the checkpoint's code determines its tensors
        model = _meta_model(directory, dtype)
        values_in_files = sum(math.prod(files.shape(key)) for key in files.tensors)
        values_in_model = sum(parameter.numel() for parameter in model.parameters())
        buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
        if values_in_model > 2 * values_in_files + _MAX_MISSING or buffer_bytes > 4 * (values_in_files + _MAX_MISSING):
            raise ConfigError(f"a model of this config has {values_in_model} values, but the files hold {values_in_files}")


def _meta_model(directory: Path, dtype: torch.dtype) -> Any:
    """Return the transformers model on torch's meta device, which allocates no values, to count its parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            causal: Any = AutoModelForCausalLM
            config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            return causal.from_config(config, dtype=dtype, attn_implementation="eager", trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds
        raise ConfigError(_refused(error)) from error


def _refused(error: Exception) -> str:
    hint = "; --trust-remote-code runs the code of the checkpoint on this machine" if _REMOTE_CODE in str(error) else ""
    return f"transformers can't load it: {describe(error)}{hint}"


def _load(directory: Path, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    except Exception as error:  # transformers and safetensors raise many kinds
        raise CheckpointError(f"{directory}: {_refused(error)}") from error
    model, found = loaded
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found[what]:
            names = ", ".join(sorted(str(key) for key in found[what])[:5])
            raise CheckpointError(f"{directory}: transformers found {what.replace('_', ' ')}: {names}")
    return model


def _model_config(directory: Path, hf: Any) -> ModelConfig:
    """Return the transformers config ``hf`` as a ModelConfig with the fields that an engine reads. Raises
    :class:`CheckpointError` for a rope that depends on the batch.
    """
    rope = getattr(hf, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {each.get("rope_type") for each in rope.values() if isinstance(each, dict)}
    stateful = [kind for kind in _BATCH_DEPENDENT_ROPE if kind in kinds]
    if stateful:
        raise CheckpointError(
            f"{directory}: rope scaling {stateful[0]!r} depends on the longest sequence of a batch in transformers, so a "
            "request's tokens would depend on its neighbours"
        )
    if getattr(hf, "attention_chunk_size", None):
        raise CheckpointError(f"{directory}: chunked attention (attention_chunk_size) isn't supported")
    heads = _required_size(directory, hf, "num_attention_heads")
    layers = _required_size(directory, hf, "num_hidden_layers")
    context = _required_size(directory, hf, "max_position_embeddings")
    head_size = _uniform_size(directory, hf, "head_dim") or _required_size(directory, hf, "hidden_size") // heads
    eos, bos = special_tokens(directory, hf)
    return ModelConfig(
        family=hf.model_type,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=getattr(hf, "intermediate_size", None) or hf.hidden_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_uniform_size(directory, hf, "num_key_value_heads") or heads,
        head_size=head_size,
        rms_eps=0.0,
        max_context=context,
        windows=_windows(directory, hf),
        eos_token_ids=eos,
        bos_token_id=bos,
    )


def _required_size(directory: Path, hf: Any, name: str) -> int:
    """Return a size that paged attention needs. Raises :class:`CheckpointError` if this kind of model has none."""
    value = _uniform_size(directory, hf, name)
    if value is None:
        raise CheckpointError(
            f"{directory}: models of type {hf.model_type!r} have no {name}, which attention over a paged cache needs; "
            f"expected {_EXPECTED_MODEL}"
        )
    return value


def _uniform_size(directory: Path, hf: Any, name: str) -> int | None:
    """Return the value ``name`` of the config, which must be equal in all layers, or None if the config lacks it.

    Raises :class:`CheckpointError` if layers differ.
    """
    try:
        value: int | None = getattr(hf, name, None)
    except Exception as error:  # transformers refuses to name one size where layers differ
        raise CheckpointError(
            f"{directory}: the layers of type {hf.model_type!r} may differ in {name}, and the paged cache has one shape for "
            f"all; expected {_EXPECTED_MODEL}"
        ) from error
    return value


def _windows(directory: Path, hf: Any) -> tuple[int, ...]:
    window = getattr(hf, "sliding_window", None) or 0
    kinds = getattr(hf, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * hf.num_hidden_layers
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise CheckpointError(f"{directory}: layers of kind {', '.join(unknown)} have no place in the paged cache")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _prompts(config: ModelConfig) -> list[list[int]]:
    return [[(7 * index + 3) % config.vocab_size for index in range(length)] for length in _PROBE_LENGTHS]


def _logits_without_cache(directory: Path, config: ModelConfig, model: Any) -> list[Tensor]:
    """Return the logits [T, V] of the two sequences, computed by transformers one by one without a cache.

    Experts use the fastest implementation that works on the device. Missing support for a dtype or a grouped product appears
    only when the implementation runs.
    """
    implementations: tuple[str | None, ...] = _EXPERT_IMPLEMENTATIONS if model._can_set_experts_implementation() else (None,)
    for implementation in implementations:
        try:
            if implementation is not None:
                model.set_experts_implementation(implementation)
            with torch.no_grad():
                return [
                    model(torch.tensor([prompt], device=model.device), use_cache=False).logits[0].clone()
                    for prompt in _prompts(config)
                ]
        except (DeviceFault, DeviceLost, OutOfDeviceMemory):
            raise
        except Exception as error:  # a model may raise anything
            if implementation == implementations[-1]:
                raise CheckpointError(
                    f"{directory}: {type(model).__name__} of transformers failed in its first forward on "
                    f"{model.device}: {describe(error)}; expected {_EXPECTED_MODEL}"
                ) from error
    raise AssertionError("unreachable")


def _compare_with_unpaged(directory: Path, decoder: TransformersDecoder, model: Any, expected: list[Tensor]) -> None:
    """Run the two sequences through the paged cache in two ragged batches. Raise :class:`CheckpointError` if their logits
    differ from ``expected``.
    """
    config, device = decoder.config, decoder.device
    prompts = _prompts(config)
    model.set_attn_implementation(ATTENTION)
    span = -(-max(_PROBE_LENGTHS) // _PROBE_PAGE_SIZE)
    pages = 1 + len(prompts) * span
    cache = KVCache.allocate(config, pages=pages, page_size=_PROBE_PAGE_SIZE, dtype=decoder.dtype, device=device)
    half = [length // 2 for length in _PROBE_LENGTHS]
    for begin, end in (([0] * len(half), half), (half, list(_PROBE_LENGTHS))):
        inputs = _ragged_input(prompts, begin, end, span, device)
        paged = PagedPass(inputs, cache, decoder.kernels)
        try:
            logits = decoder.logits(decoder.forward_pass(paged, ())[0])
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}") from error
        except (DeviceFault, DeviceLost, OutOfDeviceMemory):
            raise
        except Exception as error:  # a model may raise anything with a custom attention
            raise CheckpointError(
                f"{directory}: {type(model).__name__} of transformers can't run on paged attention: {_reason(error)}; "
                f"expected {_EXPECTED_MODEL}"
            ) from error
        _check_windows(directory, config, model, paged.windows)
        row = 0
        for one, first, last in zip(expected, begin, end, strict=True):
            _check_difference(directory, logits[row : row + last - first], one[first:last], decoder.dtype)
            row += last - first


def _check_windows(directory: Path, config: ModelConfig, model: Any, found: list[int]) -> None:
    """Raise :class:`CheckpointError` unless the windows ``found`` by the attentions of a forward pass equal the config's, one
    per layer.

    The two test sequences are too short to show a different window in their logits.
    """
    kind = type(model).__name__
    if len(found) != config.num_layers:
        raise CheckpointError(
            f"{directory}: {kind} of transformers ran {len(found)} attentions in {config.num_layers} layers, and the paged "
            f"cache has keys and values for one in each; expected {_EXPECTED_MODEL}"
        )
    differing = [layer for layer, window in enumerate(config.windows) if found[layer] != window]
    if differing:
        first = differing[0]
        raise CheckpointError(
            f"{directory}: layer {first} has {_window(config.windows[first])} by its config, and {kind} of transformers "
            f"tells its attention of {_window(found[first])}, which is all that the paged attention goes by; expected "
            f"{_EXPECTED_MODEL}, or a config without a sliding_window that the model's code doesn't use"
        )


def _window(size: int) -> str:
    return f"a sliding window of {size} positions" if size else "no sliding window"


def _reason(error: Exception) -> str:
    """Return one line for the user on why ``error`` keeps a transformers model from running on paged attention."""
    if isinstance(error, TypeError) and "outrider" in str(error):
        return "its layers don't hand on to the attention what they don't know themselves"
    if isinstance(error, AttributeError) and "Identity" in str(error):
        return "its output head reaches into the body, so logits can't be computed from hidden states alone"
    return f"its own code failed ({describe(error)})"


def _check_difference(directory: Path, found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    difference = float((found - expected).norm() / expected.norm())
    if not difference <= _TOLERANCE[dtype]:
        raise CheckpointError(
            f"{directory}: its logits through the paged cache differ from those without it by {difference:.1e} of their "
            f"size, allowed is {_TOLERANCE[dtype]:.0e}: this model does something that the paged attention doesn't"
        )


def _ragged_input(
    prompts: list[list[int]], begin: list[int], end: list[int], span: int, device: torch.device
) -> ForwardInput:
    """Return tokens ``begin`` to ``end`` of each prompt. Each prompt has ``span`` consecutive pages, from page 1 on."""
    rows_and_indices = [(row, index) for row in range(len(prompts)) for index in range(begin[row], end[row])]
    new = torch.tensor([0, *(last - first for first, last in zip(begin, end, strict=True))])
    pages = 1 + torch.arange(len(prompts) * span, dtype=torch.int32).view(len(prompts), span)
    metadata = AttentionMetadata(
        query_start=new.cumsum(0).to(torch.int32).to(device),
        seq_lens=torch.tensor(end, dtype=torch.int32, device=device),
        block_table=pages.to(device),
        max_query=int(new.max()),
        max_kv=max(end),
    )
    return ForwardInput(
        torch.tensor([prompts[row][index] for row, index in rows_and_indices], device=device),
        torch.tensor([index for _, index in rows_and_indices], device=device),
        torch.tensor([(1 + row * span) * _PROBE_PAGE_SIZE + index for row, index in rows_and_indices], device=device),
        metadata,
    )
