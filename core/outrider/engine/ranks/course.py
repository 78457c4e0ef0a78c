"""Course: what the ranks of one engine do next. The first rank writes it down, the others read it and check themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from outrider.device import ConfigError
from outrider.engine.ranks.codec import decode, encode
from outrider.engine.ranks.commands import Ask, Command
from outrider.engine.ranks.ranks import Ranks
from outrider.engine.ranks.records import Act, Decisions, RanksDiffer, Record
from outrider.engine.requests.batch import Batch
from outrider.engine.requests.draft_length import DraftLengthPolicy


class Course:
    """The one authority over what an engine's ranks do: on the rank that leads it publishes what was decided there, before
    that takes effect; on the others it hands out what was published.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.leads = ranks.leads
        self._log = ranks.new_log()
        self._commands: list[str] = []
        self._record: Record | None = None
        self._asked = 0
        self.over = False
        """Whether the last record was published."""

    def check_asked(self) -> None:
        """Raise :class:`ConfigError` where a caller, and not a record, asks something of an engine that follows."""
        if not self.leads and self._record is None:
            raise ConfigError("this engine follows that of rank 0, which takes all calls; call follow() here")

    @property
    def compile_seconds(self) -> float | None:
        """What compiling a guide may take: the others compile it while the first one waits for them. They refuse nothing that
        the first one took: None.
        """
        return self.ranks.config.timeout_s / 4 if self.leads else None

    def tell(self, command: Command) -> None:
        """Leading: a call changes the engine; the others hear of it with the next act. Following: nothing.

        Raises :class:`~outrider.engine.ranks.codec.RecordError` for what can't be told.
        """
        if self.leads:
            self._commands.append(encode(command, Command))

    def act(self, name: Act, decisions: Decisions | None = None, then: Callable[[], Decisions] | None = None) -> None:
        """What happens now: published where this rank leads; checked against what was published where it follows. ``then``:
        decisions that follow from ``decisions``, asked for once these agree.
        """
        if self.leads:
            decided = decisions if then is None else {**(decisions or {}), **then()}
            if not self.over:
                self._log.publish(Record(tuple(self._commands), name, decided))
                self._commands.clear()
            self._decide(decided)
            return
        self._decide(decisions)
        self._check(decisions)
        if then is not None:
            following = then()
            self._decide(following)
            self._check(following)

    def ask(self, said: str) -> tuple[str, ...]:
        """Leading: have what is beside the engine of each other rank answer, and wait for that; in order of ranks."""
        number, self._asked = self._asked, self._asked + 1
        self.tell(Ask(number, said))
        self.act("go on")
        others = range(1, self.ranks.config.world)
        return tuple(self._log.answer_of(number, rank, lambda: self.ranks.room.failure) for rank in others)

    def answer(self, number: int, said: str) -> None:
        """Following: answer a question of the record."""
        self._log.answer(number, self.ranks.rank, said)

    def end(self) -> None:
        """Leading: let the others end. Allowed twice."""
        if self.leads and not self.over:
            self._commands.clear()
            self.act("end")
        self.over = True

    def next(self) -> Record:
        """Following: wait for the next record."""
        self._record = self._log.next()
        return self._record

    @property
    def commands(self) -> Iterator[Command]:
        """Following: those of the record."""
        for text in () if self._record is None else self._record.commands:
            yield decode(text, Command)

    @property
    def drafted(self) -> int | None:
        """Following: tokens that the iteration drafts, as the first rank decided."""
        decisions = None if self._record is None else self._record.decisions
        drafted = None if decisions is None else decisions.get("drafted")
        return drafted if isinstance(drafted, int) else None

    def _decide(self, decisions: Decisions | None) -> None:
        for what, value in (decisions or {}).items():
            self.ranks.decide(what, value)

    def _check(self, ours: Decisions | None) -> None:
        if self._record is None:
            return
        theirs = self._record.decisions or {}
        for name, mine in (ours or {}).items():
            value = theirs.get(name)
            if mine != value:
                raise RanksDiffer(
                    f"rank {self.ranks.rank} comes to {name} = {mine!r}, and rank 0 decided {value!r}: "
                    f"{self.ranks.progress}; start all ranks with the same options, files and software"
                )


def decisions_of(batch: Batch | None) -> Decisions:
    """What the host decided for an iteration, of all data-parallel groups."""
    batches = () if batch is None else batch.everyone
    return {
        "admitted": tuple(request.id for each in batches for request in each.admitted),
        "preempted": tuple(request.preemptions for each in batches for request in each.requests),
        "prefill": tuple(
            number for each in batches for chunk in each.prefill for number in (chunk.request.id, chunk.start, chunk.end)
        ),
        "decode": tuple(request.id for each in batches for request in each.decode),
        "pages": tuple(number for each in batches for update in each.table_updates for number in update),
        "drafted": None if batch is None else batch.drafted,
    }


class ToldLength(DraftLengthPolicy):
    """The length that the first rank decided, on the ranks that follow it."""

    needs_acceptance = False

    def __init__(self, lengths: tuple[int, ...], course: Course) -> None:
        super().__init__(lengths)
        self._course = course

    def choose(self, requests: int, cached: int) -> int:
        """Return the length of the decision log."""
        del requests, cached
        drafted = self._course.drafted
        return self.lengths[-1] if drafted is None else drafted
