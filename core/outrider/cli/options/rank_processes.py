"""``--tensor-parallel``, ``--data-parallel`` and ``--expert-parallel``: ranks as child processes of a command, or as
processes of torchrun.

A command on several ranks starts itself once per rank, with the environment variables of torchrun, and waits. Rank 0 reads
the input and prints the report. The follower ranks repeat its decisions and print nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options.option_values import option, whole
from outrider.cli.terminal.environment import open_backend, rank_environment, rank_variables
from outrider.cli.terminal.report import CommandReport, SilentExit
from outrider.cli.terminal.stopping import Stopped
from outrider.device.errors import ConfigError, DeviceError, OutriderError
from outrider.registry.children import end_with_pipe

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs don't list it

    from outrider.device import Backend
    from outrider.engine.engine import Engine
    from outrider.engine.ranks.heartbeats import KeyValueStore, RankWatch
    from outrider.engine.ranks.ranks import Ranks

    JoinRanks = Callable[[str | None], Ranks | None]
    """Opens the backend with this name on each rank and joins the ranks; returns None for one rank."""

TensorParallelOption = Annotated[
    int,
    option(
        "--tensor-parallel",
        value=whole(1),
        help="Split each layer's heads and the vocabulary among N devices of this host, or among the ranks of torchrun.",
    ),
]
DataParallelOption = Annotated[
    int,
    option(
        "--data-parallel",
        value=whole(1),
        help="Run this many groups of devices, each with requests of its own; all groups share each layer's MLP.",
    ),
]
ExpertParallelOption = Annotated[
    bool,
    option(
        "--expert-parallel",
        help="Divide a mixture's experts among all ranks. Default: each rank has a slice of every expert.",
    ),
]

_POLL_S = 0.05
_STOPPED_CHECKS = 80
"""Checks in a row, ``_POLL_S`` apart, after which a stopped rank counts as lost: 4 s."""
_GRACE_S = 1.5
"""Seconds that ranks have to end by themselves after one rank has failed."""
_STORE_S = 30.0
_SAY_S = 3.0
_SILENCE_S = 5.5
"""Seconds that a rank of a command waits for another rank's report of the failure; longer than the silence after which
:class:`RankWatch` reports a rank as lost.
"""
_SILENT_EXIT_CODE = 70
"""Exit code of a rank whose failure another rank or the starting command reports."""


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The rank of a process, by the environment variables of torchrun. ``local``: its number on this host. ``agent``:
    torchrun started the process, for the ``attempt``-th time; torchrun restarts lost ranks, which meet in the same store.
    """

    rank: int
    world: int
    local: int
    address: str
    port: int
    store_is_elsewhere: bool
    pipe: int | None
    agent: bool = False
    attempt: int = 0

    @classmethod
    def from_environment(cls) -> RankPlacement | None:
        """Return the placement of this process, or None if it isn't one of several ranks.

        Raises :class:`ConfigError` if ``RANK`` is set and the variables that accompany it are missing or unreadable.
        """
        found = rank_environment()
        if found is None:
            return None
        try:
            return cls(
                rank=int(found["RANK"]),
                world=int(found["WORLD_SIZE"]),
                local=int(found.get("LOCAL_RANK", found["RANK"])),
                address=found["MASTER_ADDR"],
                port=int(found["MASTER_PORT"]),
                store_is_elsewhere=found.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                pipe=int(found["OUTRIDER_RANK_PIPE"]) if "OUTRIDER_RANK_PIPE" in found else None,
                agent="TORCHELASTIC_RUN_ID" in found,
                attempt=int(found.get("TORCHELASTIC_RESTART_COUNT", "0")),
            )
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"RANK is set, as torchrun does, but what comes with it can't be read ({error}); expected numbers in RANK, "
                "WORLD_SIZE, LOCAL_RANK and MASTER_PORT, and a host in MASTER_ADDR"
            ) from None

    def connect(self, *, serves: bool = False, seconds: float = _STORE_S) -> Store:
        """Connect to the key-value store where all ranks meet, and return it. ``serves``: create the store in this process.
        Raises torch's error if there is no store within ``seconds``.
        """
        from datetime import timedelta

        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch's stubs don't list it

        store = TCPStore(
            self.address, self.port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=seconds)
        )
        # The store keeps the messages of earlier attempts.
        return PrefixStore(f"outrider/attempt {self.attempt}", store) if self.attempt else store


def open_rank(join: JoinRanks | None, backend: str | None) -> tuple[Ranks | None, Backend, bool]:
    """Return the joined ranks (None for a single process), this rank's backend, and True if this process reports progress."""
    ranks = None if join is None else join(backend)
    return (None, open_backend(backend), True) if ranks is None else (ranks, ranks.backend, ranks.leads)


class Joined:
    """The ranks that a command runs on, as a scope. ``ranks`` is None for a single process and before :meth:`join`.

    ``expert``: the ranks divide experts.
    """

    def __init__(self, tensor: int, data: int, *, expert: bool = False) -> None:
        self._options: dict[str, Any] = {"tensor": tensor, "data": data, "expert": expert}
        self._watch: RankWatch | None = None
        self._key_value_store: KeyValueStore
        self.ranks: Ranks | None = None
        self.place = RankPlacement.from_environment() if tensor * data > 1 else None

    def __enter__(self) -> Joined:
        return self

    def join(self, backend: str | None) -> Ranks | None:
        """Open the device of this rank and join the other ranks, once for all engines of a command. Returns None in a single
        process. The device has the rank's number on this host, or is the only one of the backend.

        Raises :class:`ConfigError` if the name has a device number, and if the options ask for another number of ranks than
        were started.
        """
        place = self.place
        if place is None or self._watch is not None:
            return self.ranks
        from outrider.engine.ranks.heartbeats import KeyValueStore, RankWatch
        from outrider.engine.ranks.ranks import ParallelConfig, Ranks

        parallel = ParallelConfig(**self._options)
        if place.world != parallel.world:
            raise ConfigError(
                f"--tensor-parallel {parallel.tensor} and --data-parallel {parallel.data} are {parallel.world} ranks, and "
                f"this process is one of {place.world}; start as many"
            )
        device = open_backend(backend, local=place.local)
        if place.pipe is not None:
            end_with_pipe(place.pipe)
        store = place.connect(serves=place.rank == 0 and not place.store_is_elsewhere)
        self._key_value_store = KeyValueStore(place.connect(), "outrider")
        self.ranks = ranks = Ranks(device, parallel, rank=place.rank, store=store)
        if place.pipe is None:  # no process watches the other ranks: silence means loss
            ranks.failure_wait_s = _SILENCE_S
        starter = os.getppid() if place.agent else None
        self._watch = RankWatch(ranks, self._key_value_store, speaks=place.pipe is None and place.rank == 0, starter=starter)
        self._watch.start()
        return ranks

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        del kind, traceback
        if self.ranks is None or self._watch is None or self.place is None:
            if self.place is not None and isinstance(error, OutriderError) and _said_elsewhere(self.place, error):
                raise SilentExit(1) from error
            return
        self._watch.stop(failed=error is not None)
        from outrider.engine.ranks.heartbeats import first_rank_is_lost
        from outrider.engine.ranks.records import RanksFailed

        speaks = error is not None and self.place.rank == 0 and not _of_the_ranks(error)
        first = ""
        with suppress(Exception):  # the receiver may have ended
            if speaks:
                self._key_value_store.announce_first_rank_prints()
            elif error is not None:
                first = self.ranks.report_failure(error)
        self.ranks.close()
        if self.place.agent and first_rank_is_lost(first):
            raise RanksFailed(first) from error
        if error is None or speaks or (self.place.pipe is None and self.place.rank == 0):
            return
        if _of_the_ranks(error) or self.place.pipe is None:
            raise SilentExit(_SILENT_EXIT_CODE) from error  # the starter of the ranks reports the failure, or rank 0


def _said_elsewhere(place: RankPlacement, error: OutriderError) -> bool:
    """Return True if another rank has already announced the same error, so that this rank need not print it. Ranks announce
    errors that precede their first connection, such as a wrong option, in the store of torchrun.
    """
    if not place.agent or not place.store_is_elsewhere:
        return False
    key = hashlib.sha256(f"{type(error).__name__}: {error}".encode()).hexdigest()
    try:
        count: int = place.connect(seconds=_SAY_S).add(f"outrider/said/{key}", 1)
    except RuntimeError:
        return False
    return count > 1


def _of_the_ranks(error: BaseException) -> bool:
    """Return True if a rank failed, and False for an error of the user's input."""
    if not isinstance(error, Exception) or isinstance(error, typer.Exit | typer.Abort):
        return False
    return isinstance(error, DeviceError) or not isinstance(error, OutriderError)


def check_expert_parallel(expert: bool, tensor: int, data: int) -> None:
    """Raise :class:`ConfigError` if ``--expert-parallel`` was given for a single rank."""
    if expert and tensor * data == 1:
        raise ConfigError(
            "--expert-parallel divides experts among ranks, and there is one rank; give --tensor-parallel or --data-parallel"
        )


def run_on_ranks(
    arguments: Sequence[str] | None, tensor: int, data: int, *, expert: bool = False, json_output: bool
) -> CommandReport | None:
    """Run the command on ``tensor`` x ``data`` ranks and return their report. Returns None in a rank and for a single
    process.

    ``expert``: the ranks divide the experts. ``json_output``: the report is for scripts. Raises :class:`ConfigError` if the
    command was called from Python, where there is no command line to start again.
    """
    check_expert_parallel(expert, tensor, data)
    if tensor * data == 1 or RankPlacement.from_environment() is not None:
        return None
    if arguments is None:
        raise ConfigError("this command was called from Python; start ranks with torchrun, or run the command in a shell")
    from outrider.engine.ranks.ranks import ParallelConfig

    world = ParallelConfig(tensor=tensor, data=data, expert=expert).world
    with ExitStack() as stack:
        return _Processes(stack, world, arguments, json_output=json_output).wait_for_report()


@contextmanager
def first_rank(
    load_engine: Callable[..., Engine],
    tensor: int,
    data: int,
    *,
    expert: bool = False,
    follow: Callable[[Engine, int], None] | None = None,
) -> Generator[Engine]:
    """Yield the engine of rank 0, in this process. The other ranks are child processes in the scope. If one rank ends, all
    ranks end.

    ``load_engine`` loads the engine of one rank. It is pickled for each child, and gets the keyword argument ``join``, which
    returns the ranks for the name of a backend; a single process passes none. ``follow`` runs a child's engine, see
    :func:`~outrider.engine.ranks.processes.start_ranks`.
    """
    check_expert_parallel(expert, tensor, data)
    if tensor * data == 1:
        yield load_engine()
        return
    from outrider.engine.ranks.processes import start_ranks
    from outrider.engine.ranks.ranks import ParallelConfig

    parallel = ParallelConfig(tensor=tensor, data=data, expert=expert)
    load = partial(_load_follower, load_engine)
    with ExitStack() as stack:

        def join(backend: str | None) -> Ranks:
            return start_ranks(stack, open_backend(backend), parallel, load, follow=follow, ends_process=True)

        yield stack.enter_context(closing(load_engine(join=join)))


def _load_follower(load_engine: Callable[..., Engine], ranks: Ranks) -> Engine:
    return load_engine(join=lambda backend: ranks)


class _Processes:
    """The ranks of this host as child processes of a command. All have ended when ``stack`` is closed."""

    def __init__(self, stack: ExitStack, world: int, arguments: Sequence[str], *, json_output: bool) -> None:
        from outrider.engine.ranks.heartbeats import KeyValueStore
        from outrider.engine.ranks.processes import ChildRanks, create_rank_store

        self._stack = stack
        self._json = json_output
        self._files: dict[int, IO[bytes]] = {}
        """The output of rank 0 if the report is for scripts, and the errors of each other rank."""
        self._children = ChildRanks(first=0, stopped_checks=_STOPPED_CHECKS)
        self._processes = self._children.processes
        store = create_rank_store()
        self._key_value_store = KeyValueStore(store, "outrider")
        # The operating system closes the pipe when this process ends, and each rank ends itself then.
        read, write = os.pipe()
        stack.callback(os.close, write)
        stack.callback(self._children.wait_or_kill)
        try:
            for rank in range(world):
                self._processes.append(self._start(arguments, rank, world, store.port, read))
        finally:
            os.close(read)

    def _start(self, arguments: Sequence[str], rank: int, world: int, port: int, pipe: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "outrider.cli.main", *arguments]
        environment = rank_variables(rank=rank, world=world, port=port, pipe=pipe)
        if rank or self._json:
            self._files[rank] = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  (the stack closes it)
        file, null = self._files.get(rank), subprocess.DEVNULL
        streams: dict[str, Any] = {"stdin": null, "stdout": null, "stderr": file} if rank else {"stdout": file}
        return subprocess.Popen(command, env=environment, pass_fds=(pipe,), start_new_session=True, **streams)

    def wait_for_report(self) -> CommandReport:
        """Wait for all ranks and return the report of rank 0. Raises :class:`RanksFailed` if rank 0 has no report."""
        try:
            while any(process.poll() is None for process in self._processes):
                lost = self._children.find_lost()
                if lost is not None or self._key_value_store.failure is not None:
                    return self._report_lost_rank(lost)
                time.sleep(_POLL_S)
        except Stopped as asked:
            self._processes[0].send_signal(signal.SIGTERM if str(asked) == "terminated" else signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._processes[0].wait(_GRACE_S)
                return self._reported()
            raise
        lost = self._children.find_lost()
        return self._reported() if lost is None else self._report_lost_rank(lost)

    def _report_lost_rank(self, lost: tuple[int, str] | None) -> CommandReport:
        """End the ranks after a failure, and return the report of rank 0 or raise :class:`RanksFailed`. ``lost``: the rank
        whose process has failed, and a message.
        """
        from outrider.engine.ranks.records import RanksFailed

        words = ""
        if lost is not None:
            rank, how = lost
            words = f"{how}: {self._last_words(rank)}"
            if (self._processes[rank].returncode or 0) <= 0:  # the rank has reported no failure itself
                self._key_value_store.publish_failure(f"{how}; {self._key_value_store.last_progress(rank)}")
        hangs = (self._key_value_store.failure or "").startswith("rank 0 hangs")  # rank 0 won't report
        until = time.monotonic() + _GRACE_S * (not hangs)
        while self._processes[0].poll() is None and (time.monotonic() < until or self._key_value_store.first_rank_prints):
            time.sleep(_POLL_S)
        first = self._processes[0].poll()
        self._children.wait_or_kill()
        if first is not None and first > 0 and first != _SILENT_EXIT_CODE:
            return self._reported()
        raise RanksFailed(f"{self._key_value_store.failure or words}; the other ranks were ended")

    def _last_words(self, rank: int) -> str:
        if rank == 0:
            return "see above"
        file = self._files[rank]
        file.seek(0)
        return file.read()[-2000:].decode(errors="replace").strip() or "it said nothing"

    def _reported(self) -> CommandReport:
        code = self._processes[0].returncode
        data: dict[str, object] = {}
        if self._json:
            self._files[0].seek(0)
            data = json.loads(self._files[0].read() or "{}")
        return CommandReport(data=data, render=lambda console: None, exit_code=code)
