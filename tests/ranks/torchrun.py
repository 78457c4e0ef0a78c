"""torchrun as it's used: agents on one host, or two of them that stand for two hosts, and the ranks that they start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from killing import children
from namespaces import INTERFACE, EmulatedHost

from proof.disaggregation import free_port

PROMPT = "def fibonacci(n):"
ENDED_S = 900.0
"""Long: on a crowded machine importing torch takes minutes."""


@dataclass
class Agents:
    """Agents of torchrun, by host. ``said``: where each writes what its ranks print, ``errors``: their errors."""

    processes: list[subprocess.Popen[str]]
    said: list[Path]
    errors: list[Path]

    def ranks(self) -> list[int]:
        """The processes that the agents have started, host by host."""
        return [rank for each in self.processes for rank in children(each.pid)]

    def wait(self) -> list[int]:
        """Exit codes."""
        return [each.wait(ENDED_S) for each in self.processes]

    def wait_for_token(self) -> None:
        """Wait until some rank has printed text: all of them work."""
        until = time.monotonic() + ENDED_S
        while not any(path.stat().st_size for path in self.said):
            assert time.monotonic() < until, self.text(self.errors)
            assert all(each.poll() is None for each in self.processes), self.text(self.errors)
            time.sleep(0.02)

    def text(self, files: list[Path]) -> str:
        """What is in the files."""
        return "".join(path.read_text() for path in files)

    def own_errors(self) -> list[str]:
        """Lines of ours that tell of an error; torchrun writes its own beside them."""
        lines = self.text(self.errors).splitlines()
        return [line for line in lines if line.startswith("outrider: ") and " tokens/s " not in line]


@contextmanager
def torchrun(
    directory: Path, hosts: int, each: int, *command: str, restarts: int = 0, emulated: Sequence[EmulatedHost] = ()
) -> Iterator[Agents]:
    """``each`` ranks on each of so many hosts, all of which are this one or ``emulated``. No process outlives the scope."""
    endpoint = f"{emulated[0].address}:29400" if emulated else f"127.0.0.1:{free_port()}"
    said, errors = ([directory / f"{kind}{host}" for host in range(hosts)] for kind in ("out", "err"))
    processes = []
    for host in range(hosts):
        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(hosts), "--nproc-per-node", str(each)]
        launch += ["--max-restarts", str(restarts), "--rdzv-backend", "c10d", "--rdzv-id", "test"]
        launch += ["--rdzv-endpoint", endpoint]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if emulated:  # all have this machine's name, by which torchrun and gloo would otherwise find their addresses
            launch += ["--rdzv-conf", f"is_host={int(host == 0)}", "--local-addr", emulated[host].address]
            launch = emulated[host].command(*launch)
            environment["GLOO_SOCKET_IFNAME"] = INTERFACE
        launch += ["-m", "outrider.cli.main", *command]
        with said[host].open("w") as out, errors[host].open("w") as err:
            processes.append(subprocess.Popen(launch, stdout=out, stderr=err, text=True, env=environment))
    agents = Agents(processes, said, errors)
    try:
        yield agents
    finally:
        left = agents.ranks()
        for number in [process.pid for process in processes if process.poll() is None] + left:
            os.kill(number, signal.SIGKILL)
        for process in processes:
            process.wait()
