"""Two hosts on one machine: network namespaces that share nothing but a pair of virtual Ethernet devices."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "veth0"
"""Network device of each host."""
_HOLD_S = 3600
_ADDRESSES = ("10.231.7.1", "10.231.7.2")


@dataclass(frozen=True)
class EmulatedHost:
    """A network namespace. ``holder``: the process that keeps it; ``address``: the only one that the other host reaches."""

    holder: int
    address: str

    def command(self, *command: str) -> list[str]:
        """``command``, to be run on this host."""
        return ["nsenter", "--target", str(self.holder), "--net", "--mount", f"--wd={Path.cwd()}", *command]


@contextmanager
def two_hosts() -> Iterator[tuple[EmulatedHost, EmulatedHost]]:
    """Two hosts, joined by a pair of veth devices. Nothing of them is left: namespaces end with their last process."""
    with ExitStack() as stack:
        holders = []
        for _ in _ADDRESSES:
            # UCX lists network devices from /sys, which shows those of the namespace that mounted it.
            hold = f"mount -t sysfs sysfs /sys && echo ready; exec sleep {_HOLD_S}"
            command = ["unshare", "--net", "--mount", "sh", "-c", hold]
            holder = subprocess.Popen(command, stdout=subprocess.PIPE)
            stack.callback(holder.wait)
            stack.callback(holder.kill)
            assert holder.stdout is not None
            stack.callback(holder.stdout.close)
            assert holder.stdout.readline() == b"ready\n"
            holders.append(holder)
        hosts = [EmulatedHost(holder.pid, address) for holder, address in zip(holders, _ADDRESSES, strict=True)]
        pair = ["ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", str(hosts[1].holder)]
        subprocess.run(hosts[0].command(*pair), check=True)
        for host in hosts:
            for words in (
                ["link", "set", "lo", "up"],
                ["address", "add", f"{host.address}/24", "dev", INTERFACE],
                ["link", "set", INTERFACE, "up"],
            ):
                subprocess.run(host.command("ip", *words), check=True)
        yield hosts[0], hosts[1]
