"""Models that ``outrider explore decode`` serves: the bundled one over text, or a tiny one over text and images."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.bundled import bundled
from outrider.registry import Registry

if TYPE_CHECKING:
    from outrider.device import Backend
    from outrider.model import Decoder, Media, VisionTower
    from outrider_proof.decode_program import Arrival


@dataclass(frozen=True)
class Subject:
    """A model under test: its checkpoint, and the text from which prompts are taken."""

    directory: Path
    eagle: Path
    """Directory of the EAGLE head's checkpoint."""
    dtype: str
    text: tuple[int, ...]
    """Token ids of a text; prompts are slices of it."""
    images: bool = False
    """True if two of three requests have an image; positions are then on three axes."""
    extra: int = 0
    """Maximum number of tokens that an image adds to a prompt."""

    def load(self, backend: Backend) -> tuple[Decoder, VisionTower | None]:
        """Load the decoder, and the vision tower if requests have images, on a backend."""
        import torch

        from outrider.model import load_decoder, load_vision

        dtype = getattr(torch, self.dtype)
        model = load_decoder(self.directory, backend=backend, dtype=dtype)
        vision = load_vision(self.directory, backend=backend, dtype=dtype) if self.images else None
        backend.synchronize()
        return model, vision

    def prompt(self, arrival: Arrival) -> tuple[tuple[int, ...], tuple[Media, ...]]:
        """Return the tokens and the images of a request."""
        if self.images:
            from outrider_proof.engine_setups import VISION, prompt_and_media

            return prompt_and_media(VISION, arrival)
        return self.text[arrival.start : arrival.start + arrival.length], ()

    @functools.cached_property
    def reference(self) -> tuple[Decoder, VisionTower | None]:
        """The decoder and the vision tower on the host, loaded once."""
        return self.load(Registry().create("cpu"))

    @functools.cached_property
    def plain(self) -> dict[Arrival, tuple[int, ...]]:
        """A cache from request to non-speculative greedy tokens, filled on demand and shared by all explorers."""
        return {}


@functools.cache
def bundled_text() -> Subject:
    """Return the bundled model, with prompts from the engine's source code."""
    from outrider.engine.engine import Engine
    from outrider.model import Tokenizer

    tokens = Tokenizer.from_checkpoint(bundled("target")).encode(inspect.getsource(Engine))
    return Subject(bundled("target"), bundled("eagle"), "float32", tuple(tokens))


@functools.cache
def tiny_images() -> Subject:
    """Return a tiny random vision-language model with a random EAGLE head, written once per process."""
    from outrider_proof.checkpoints import IMAGE, write_eagle
    from outrider_proof.engine_setups import text, vision_checkpoint

    directory = vision_checkpoint()
    if not (directory / "eagle").is_dir():
        write_eagle(directory / "eagle")
    return Subject(directory, directory / "eagle", "float64", text(), images=True, extra=len(IMAGE) + 1)
