"""A monitor that compares the memory that each stage accesses with the stage's declaration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from outrider.device import Observer, OutriderError

if TYPE_CHECKING:
    from torch import Tensor

    from outrider import Engine
    from outrider.device import Operation
    from outrider.engine.stages import DecodeBatch, Frame, Stage
    from outrider.engine.state.parts import EngineParts


class UndeclaredAccess(OutriderError):
    """A stage accessed memory that its ``reads`` and ``writes`` do not name."""


class StageMonitor:
    """A monitor of all stages of ``engine``. It needs a device that reports accesses, and an attached observer.

    ``note`` receives each fault. A stage may read what it wrote itself. Temporary memory and weights need no declaration.
    """

    def __init__(self, engine: Engine, note: Callable[[OutriderError], None]) -> None:
        self._backend = engine.backend
        self._note = note
        self.accessed: dict[str, set[tuple[str, str]]] = {}
        """The accesses of each stage, by name: ``reads`` or ``writes``, and the memory."""
        self._names = {
            self._backend.locate(tensor).storage: name
            for name, tensors in declared_memory(engine._parts)
            for tensor in tensors
            if tensor.numel()
        }
        step: Any = engine._step
        for stage in vars(getattr(step, "step", step)._stages).values():
            if hasattr(stage, "reads"):
                self._watch(stage)

    def _watch(self, stage: Stage) -> None:
        run, accessed = stage.run, self.accessed.setdefault(stage.name, set())

        def watched(batch: DecodeBatch, frame: Frame) -> None:
            observer = self._backend.observer or Observer()
            launched, written = observer.launched, set[str]()

            def check(operation: Operation) -> None:
                launched(operation)
                for access in operation.accesses:
                    name = self._names.get(access.storage)
                    if name is None:
                        continue
                    kind = "writes" if access.write else "reads"
                    accessed.add((kind, name))
                    if access.write:
                        written.add(name)
                    elif name in written:
                        continue
                    if not any(is_part(name, declared) for declared in getattr(stage, kind)):
                        self._note(
                            UndeclaredAccess(
                                f"the stage {stage.name!r} {kind} {name!r} ({operation.name}, {operation.location}) and "
                                f"doesn't declare it; name it in {type(stage).__name__}.{kind}"
                            )
                        )

            setattr(observer, "launched", check)  # noqa: B010  # mypy takes it for an assignment to a method
            try:
                run(batch, frame)
            finally:
                delattr(observer, "launched")

        setattr(stage, "run", watched)  # noqa: B010

    def unused(self, stage: Stage) -> set[tuple[str, str]]:
        """Return the declarations of ``stage`` that no access has used: ``reads`` or ``writes``, and the memory."""
        accessed = self.accessed[stage.name]
        return {
            (kind, declared)
            for kind in ("reads", "writes")
            for declared in getattr(stage, kind)
            if not any(each == kind and is_part(name, declared) for each, name in accessed)
        }


def is_part(name: str, declared: str) -> bool:
    """Return True if ``declared`` is the memory ``name`` or a group that contains it."""
    return f"{name}.".startswith(f"{declared}.")


def declared_memory(parts: EngineParts) -> Iterator[tuple[str, Iterable[Tensor]]]:
    """Yield the names that stages may declare, with the tensors of each."""
    yield from ((name, [memory]) for name, memory in parts.buffers._memory.items())
    yield "staged inputs", [parts.staging._device]
    yield "request rows", _tensors(parts.rows)
    yield "sampling options", _tensors(parts.options)
    yield "published lengths", [parts.future.seq_lens]
    yield "resolved lengths", [parts.future.batch_seq_lens]
    yield "stash", [parts.future.last_tokens, *parts.future.relay.values()]
    yield "results", [parts.results._device, parts.results._logprobs._device]
    yield "token masks", [parts.masks._draft_masks]
    yield "target cache", [tensor for layer in parts.cache.layers for tensor in layer]
    yield "recurrent states", [tensor for layer in parts.cache.states for tensor in layer]
    yield "draft cache", parts.proposer.caches


def _tensors(owner: object) -> list[Tensor]:
    from torch import Tensor  # the help of the explorer's commands does without

    return [value for value in vars(owner).values() if isinstance(value, Tensor)]
