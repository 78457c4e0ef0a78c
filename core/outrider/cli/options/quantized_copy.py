"""``--quantize``: a quantised copy of a checkpoint, written into the cache when it is first asked for."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from outrider.cli.terminal.starting import show_progress
from outrider.cli.terminal.streams import note
from outrider.errors import CheckpointError

_COPY_FORMAT = 1
"""Number of the copies' format; part of the name of the cache entry."""
_MIB = 1 << 20


def find_quantized_copy(source: Path, weight_format: str) -> Path:
    """Return the copy of the checkpoint ``source`` with weights in ``weight_format``, and write it if there is none.

    A note says what was chosen and how many bytes the weights have. The copy is reused while the files of ``source`` are
    unchanged. Raises :class:`CheckpointError` for a checkpoint that is quantised already or can't be, and for a cache that
    can't be written.
    """
    from huggingface_hub import cached_assets_path

    from outrider.model.quantization.writing import fitting_group, quantize_checkpoint

    group = fitting_group(source, weight_format)
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(source.iterdir()) if file.is_file()]
    state = json.dumps([_COPY_FORMAT, weight_format, group, str(source.resolve()), files])
    shared = weight_format if group is None else f"{weight_format} with a scale for {group} columns"
    try:
        root = cached_assets_path(library_name="outrider", namespace="quantized")
        target = Path(root) / hashlib.sha256(state.encode()).hexdigest()[:32]
        if target.exists():
            note(f"outrider: weights in {shared}: the copy in {target}\n")
            return target
        with show_progress() as tell:
            written = quantize_checkpoint(
                source,
                target,
                format=weight_format,
                group=group,
                progress=lambda key, done, total: tell("quantising", done, total),
            )
    except OSError as error:
        raise CheckpointError(
            f"{source}: its copy in {weight_format} can't be written into the cache: {error}; set HF_HOME to another one"
        ) from error
    before, after = written.bytes_before / _MIB, written.bytes_after / _MIB
    note(
        f"outrider: weights in {shared}, rounded without calibration, so answers differ a little: {after:.0f} MiB instead of "
        f"{before:.0f}; the copy in {target} is used again\n"
    )
    return target
