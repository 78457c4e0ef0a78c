"""NIXL: one-sided writes and reads by UCX, between host memory and device memory, over whatever network there is."""

from __future__ import annotations

import base64
import json
import logging
import uuid
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from torch import Tensor

from outrider.device import Backend, CapabilityError, ConfigError, Fence
from outrider.transports.link import Link, LinkDown, Transfer, Transport

PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl")
"""What the wheels import as: nixl-cu13, nixl-cu12, and builds of one's own."""
_HOST, _DEVICE = "DRAM", "VRAM"
_LOOPBACK, _LOOPBACK_DEVICE = "127.", "lo"


class NixlTransport(Transport):
    """Links of NIXL agents, an agent for each. ``devices``: network devices by UCX's names, separated by commas; none: the
    loopback device between processes of one host, else what UCX chooses. ``errors``: UCX's error handling, ``peer`` or
    ``none``; with ``none`` UCX may take faster ways on one host, and the death of a peer is told by its connection alone.
    """

    name = "nixl"

    def __init__(self, devices: str = "", errors: str = "peer") -> None:
        if errors not in ("peer", "none"):
            raise ConfigError(f"nixl's errors is {errors!r}; expected peer or none")
        package = next((name for name in PACKAGES if find_spec(name) is not None), None)
        if package is None:
            raise CapabilityError("the transport nixl needs NIXL: pip install 'outrider[nixl]'")
        try:
            self._api = import_module(f"{package}._api")
        except ImportError as error:
            raise CapabilityError(f"{package} is installed and can't be imported: {error}") from error
        logging.getLogger("nixl").setLevel(logging.WARNING)
        self._devices, self._errors = devices, errors

    def open(self, regions: Sequence[Tensor], backend: Backend, *, accepts: bool, host: str) -> NixlLink:
        """Register the regions with an agent of their own."""
        del accepts
        devices = self._devices or (_LOOPBACK_DEVICE if host.startswith(_LOOPBACK) else "")
        return NixlLink(self._api, regions, backend, devices=devices, errors=self._errors)


class NixlLink(Link):
    """One agent. Blocks of all regions are known to it by number, region by region."""

    def __init__(self, api: Any, regions: Sequence[Tensor], backend: Backend, *, devices: str, errors: str) -> None:
        super().__init__(NixlTransport.name, regions, backend)
        on_host = {region.device.type == "cpu" for region in self.regions}
        if len(on_host) != 1 or backend.control is not None:
            raise CapabilityError(f"nixl can't register memory of {backend.label}: it has no address")
        self._memory = _HOST if on_host.pop() else _DEVICE
        self._name = uuid.uuid4().hex
        self._peer = ""
        self._down: str | None = None
        self._unfinished: list[_Transfer] = []
        try:
            self._agent = api.nixl_agent(self._name, api.nixl_agent_config(backends=[]))
            self._agent.create_backend(
                "UCX", {"ucx_error_handling_mode": errors, **({"ucx_devices": devices} if devices else {})}
            )
            self._registered = self._agent.register_memory(list(self.regions))
            if self._registered is None:
                raise CapabilityError("nixl registers no such memory")
        except CapabilityError:
            raise
        except Exception as error:  # NIXL has a class for each status
            raise CapabilityError(f"nixl can't register {len(self.regions)} regions of {backend.label}: {error}") from error
        self._ours: Any = None
        self._theirs: Any = None

    def notices(self) -> list[bytes]:
        """Ask the agent; its own thread makes progress meanwhile."""
        self._check_up()
        with self._guarded("asking for notices"):
            found: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return [notice for sender, notices in found.items() if sender == self._peer for notice in notices]

    def close(self) -> None:
        """Release what is under way, and take the memory's registration back; the agent ends."""
        if self._down == "":
            return
        for transfer in self._unfinished:
            transfer.release()
        self._unfinished.clear()
        if self._down is None or self._agent is not None:
            for handle in (self._ours, self._theirs):
                if handle is not None:
                    with suppress(Exception):
                        self._agent.release_dlist_handle(handle)
            if self._peer:
                with suppress(Exception):
                    self._agent.remove_remote_agent(self._peer)
            with suppress(Exception):
                self._agent.deregister_memory(self._registered)
        self._agent = self._ours = self._theirs = None
        self._down = ""

    def _offer(self) -> bytes:
        text = {
            "name": self._name,
            "memory": self._memory,
            "regions": [[region.data_ptr(), max(region.get_device(), 0)] for region in self.regions],
            "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(),
        }
        return json.dumps(text).encode()

    def _connect(self, address: bytes) -> None:
        try:
            read = json.loads(address)
            name, memory, regions = str(read["name"]), read["memory"], read["regions"]
            numbers = [number for pair in regions for number in pair]
            if memory not in (_HOST, _DEVICE) or len(regions) != len(self.regions) or len(numbers) != 2 * len(regions):
                raise ValueError("the regions are others")
            if not all(type(number) is int and 0 <= number < 1 << 64 for number in numbers):
                raise ValueError("an address is out of range")
            metadata = base64.b64decode(read["metadata"], validate=True)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"the other side's NIXL address can't be read: {error}") from None
        with self._guarded("connecting"):
            added = self._agent.add_remote_agent(metadata)
            self._peer = added.decode() if isinstance(added, bytes) else str(added)
            if self._peer != name:
                raise LinkDown("the other side's NIXL agent has another name than it says")
            ours = self._descriptors(
                [[region.data_ptr(), max(region.get_device(), 0)] for region in self.regions], self.blocks
            )
            self._ours = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, self._memory)
            self._theirs = self._agent.prep_xfer_dlist(self._peer, self._descriptors(regions, self.peer_blocks), memory)

    def _descriptors(self, regions: list[list[int]], blocks: int) -> Any:
        rows = np.empty((len(regions) * blocks, 3), dtype=np.uint64)
        for index, ((address, device), size) in enumerate(zip(regions, self.block_bytes, strict=True)):
            part = rows[index * blocks : (index + 1) * blocks]
            part[:, 0] = np.uint64(address) + np.arange(blocks, dtype=np.uint64) * np.uint64(size)
            part[:, 1], part[:, 2] = size, device
        return rows

    def _write(self, ours: list[int], theirs: list[int], notice: bytes, read: Fence | None) -> Transfer:
        del read
        return self._start("WRITE", ours, theirs, notice)

    def _read(self, ours: list[int], theirs: list[int]) -> Transfer:
        return self._start("READ", ours, theirs, b"")

    def _start(self, operation: str, ours: list[int], theirs: list[int], notice: bytes) -> Transfer:
        self._check_up()
        with self._guarded("starting a transfer"):
            handle = self._agent.make_prepped_xfer(
                operation,
                self._ours,
                self._everywhere(ours, self.blocks),
                self._theirs,
                self._everywhere(theirs, self.peer_blocks),
                notice,
            )
            state = self._agent.transfer(handle)
        transfer = _Transfer(self, handle, state)
        self._unfinished.append(transfer)
        return transfer

    def _everywhere(self, blocks: list[int], count: int) -> Any:
        starts = np.arange(len(self.regions), dtype=np.int32)[:, None] * np.int32(count)
        return (starts + np.asarray(blocks, dtype=np.int32)[None, :]).reshape(-1)

    def _check_up(self) -> None:
        if self._down is not None:
            raise LinkDown(f"this link is down: {self._down or 'it was closed'}")

    def _guarded(self, doing: str) -> _Guard:
        return _Guard(self, doing)

    def state_of(self, handle: Any) -> str:
        """NIXL's word for a transfer's state."""
        self._check_up()
        with self._guarded("asking for a transfer"):
            state: str = self._agent.check_xfer_state(handle)
        return state

    def fail(self, why: str) -> LinkDown:
        """The link is down from now on."""
        self._down = self._down if self._down is not None else why
        return LinkDown(f"this link is down: {why}")

    def over(self, transfer: _Transfer) -> None:
        """A transfer needs nothing any more."""
        self._unfinished.remove(transfer)
        transfer.release()

    def release(self, handle: Any) -> None:
        """Give a transfer's handle back to NIXL."""
        with suppress(Exception):
            self._agent.release_xfer_handle(handle)


class _Guard:
    """Turns what NIXL raises into :class:`LinkDown`."""

    def __init__(self, link: NixlLink, doing: str) -> None:
        self._link, self._doing = link, doing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, LinkDown):
            raise self._link.fail(f"{self._doing}: {type(error).__name__}: {error}") from error


class _Transfer(Transfer):
    def __init__(self, link: NixlLink, handle: Any, state: str) -> None:
        self._link, self._handle, self._state = link, handle, state

    def done(self) -> bool:
        """Ask NIXL until it's over."""
        if self._state == "DONE":
            if self._handle is not None:
                self._link.over(self)
            return True
        self._state = self._link.state_of(self._handle)
        if self._state == "ERR":
            raise self._link.fail("a transfer failed")
        return self._state == "DONE" and self.done()

    def release(self) -> None:
        """Allowed twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._link.release(handle)
