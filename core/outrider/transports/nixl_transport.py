"""The transport ``nixl``: one-sided writes of NIXL over UCX, between host memory and device memory."""

from __future__ import annotations

import base64
import json
import logging
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import numpy as np
from torch import Tensor

from outrider.device import Backend, CapabilityError, ConfigError, Fence
from outrider.transports.link import Link, LinkDown, PageTransfer, Transport

PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl")
"""Import names of the wheels nixl-cu13 and nixl-cu12, and of a build from source, in order of preference."""
_HOST_MEMORY, _DEVICE_MEMORY = "DRAM", "VRAM"
_LOOPBACK_PREFIX, _LOOPBACK_DEVICE = "127.", "lo"


class NixlTransport(Transport):
    """A factory of links over NIXL. Each side of a link has its own NIXL agent.

    ``devices`` are network devices by UCX's names, separated by commas. By default, processes of one host use the loopback
    device, and UCX chooses otherwise. ``errors`` is UCX's error handling, ``peer`` or ``none``. With ``none``, UCX may use
    faster paths within one host, but only the peer's connection reports that the peer is dead.
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

    def open(
        self, regions: Sequence[Tensor], backend: Backend, *, accepts: bool, host: str, states: Sequence[Tensor] = ()
    ) -> NixlLink:
        """Create an agent and register the regions with it. Both sides connect in the same way: ``accepts`` is ignored."""
        del accepts
        devices = self._devices or (_LOOPBACK_DEVICE if host.startswith(_LOOPBACK_PREFIX) else "")
        return NixlLink(self._api, regions, backend, states, devices=devices, errors=self._errors)


class NixlLink(Link):
    """One side of a link, with one NIXL agent. The agent numbers the blocks of all regions, region after region."""

    def __init__(
        self,
        api: Any,
        regions: Sequence[Tensor],
        backend: Backend,
        states: Sequence[Tensor],
        *,
        devices: str,
        errors: str,
    ) -> None:
        super().__init__(NixlTransport.name, regions, backend, states)
        on_host = {region.device.type == "cpu" for region in self.regions}
        if len(on_host) != 1 or backend.control is not None:
            raise CapabilityError(f"nixl can't register memory of {backend.label}: it has no address")
        self._memory = _HOST_MEMORY if on_host.pop() else _DEVICE_MEMORY
        self._name = uuid.uuid4().hex
        self._peer = ""
        self._down: str | None = None
        """Reason why the link is down. None while it is up; an empty string after :meth:`close`."""
        self._unfinished: list[_NixlTransfer] = []
        try:
            self._agent = api.nixl_agent(self._name, api.nixl_agent_config(backends=[]))
            self._agent.create_backend(
                "UCX", {"ucx_error_handling_mode": errors, **({"ucx_devices": devices} if devices else {})}
            )
            self._registered = self._agent.register_memory(self._spans(), self._memory)
            if self._registered is None:
                raise CapabilityError("nixl registers no such memory")
        except CapabilityError:
            raise
        except Exception as error:  # NIXL has an error class for each status
            raise CapabilityError(f"nixl can't register {len(self.regions)} regions of {backend.label}: {error}") from error
        self._local_descriptors: Any = None
        self._peer_descriptors: Any = None

    def notices(self) -> list[bytes]:
        """Return the notices that the agent has received from the other side. The agent's thread makes progress."""
        self._check_up()
        with self._guard("asking for notices"):
            notices_by_sender: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return [notice for sender, notices in notices_by_sender.items() if sender == self._peer for notice in notices]

    def close(self) -> None:
        """Release the running transfers, deregister the memory and end the agent. May be called twice."""
        if self._down == "":
            return
        for transfer in self._unfinished:
            transfer.release()
        self._unfinished.clear()
        if self._agent is not None:
            for handle in (self._local_descriptors, self._peer_descriptors):
                if handle is not None:
                    with suppress(Exception):
                        self._agent.release_dlist_handle(handle)
            if self._peer:
                with suppress(Exception):
                    self._agent.remove_remote_agent(self._peer)
            with suppress(Exception):
                self._agent.deregister_memory(self._registered)
        self._agent = self._local_descriptors = self._peer_descriptors = None
        self._down = ""

    def _region_addresses(self) -> list[list[int]]:
        """Return [address, device index, bytes from block to block] of each region. Host memory has index 0."""
        return [
            [region.data_ptr(), max(region.get_device(), 0), region.stride(0) * region.element_size()]
            for region in self.regions
        ]

    def _counts(self, blocks: int, rows: int) -> list[int]:
        """Return the number of blocks of each region on a side with ``blocks`` blocks of pages and ``rows`` of states."""
        return [blocks] * len(self.block_bytes) + [rows] * len(self.row_bytes)

    def _spans(self) -> list[tuple[int, int, int, str]]:
        """Return (address, bytes, device index, label) of the memory of all regions. Regions that overlap are one span."""
        spans: list[tuple[int, int, int, str]] = []
        counts, sizes = self._counts(self.blocks, self.rows), (*self.block_bytes, *self.row_bytes)
        for (address, device, stride), count, size in sorted(zip(self._region_addresses(), counts, sizes, strict=True)):
            start, end = address, address + (count - 1) * stride + size
            if spans and spans[-1][2] == device and start < sum(spans[-1][:2]):
                last = spans.pop()
                start, end = last[0], max(sum(last[:2]), end)
            spans.append((start, end - start, device, ""))
        return spans

    def _offer(self) -> bytes:
        text = {
            "name": self._name,
            "memory": self._memory,
            "regions": self._region_addresses(),
            "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(),
        }
        return json.dumps(text).encode()

    def _connect(self, address: bytes) -> None:
        try:
            fields = json.loads(address)
            name, memory, regions = str(fields["name"]), fields["memory"], fields["regions"]
            numbers = [number for region in regions for number in region]
            has_memory = memory in (_HOST_MEMORY, _DEVICE_MEMORY)
            if not has_memory or len(regions) != len(self.regions) or len(numbers) != 3 * len(regions):
                raise ValueError("the regions are others")
            if not all(type(number) is int and 0 <= number < 1 << 64 for number in numbers):
                raise ValueError("an address is out of range")
            metadata = base64.b64decode(fields["metadata"], validate=True)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"the other side's NIXL address can't be read: {error}") from None
        with self._guard("connecting"):
            added = self._agent.add_remote_agent(metadata)
            self._peer = added.decode() if isinstance(added, bytes) else str(added)
            if self._peer != name:
                raise LinkDown("the other side's NIXL agent has another name than it says")
            local = self._make_descriptors(self._region_addresses(), self._counts(self.blocks, self.rows))
            self._local_descriptors = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, self._memory)
            remote = self._make_descriptors(regions, self._counts(self.peer_blocks, self.peer_rows))
            self._peer_descriptors = self._agent.prep_xfer_dlist(self._peer, remote, memory)

    def _make_descriptors(self, regions: list[list[int]], counts: list[int]) -> Any:
        """Return (address, bytes, device index) of each block, as a uint64 array [all blocks of all regions, 3]."""
        parts = []
        for (address, device, stride), count, size in zip(regions, counts, (*self.block_bytes, *self.row_bytes), strict=True):
            part = np.empty((count, 3), dtype=np.uint64)
            part[:, 0] = np.uint64(address) + np.arange(count, dtype=np.uint64) * np.uint64(stride)
            part[:, 1], part[:, 2] = size, device
            parts.append(part)
        return np.concatenate(parts)

    def _write(self, local_blocks: list[int], peer_blocks: list[int], notice: bytes, read: Fence | None) -> PageTransfer:
        del read
        self._check_up()
        with self._guard("starting a transfer"):
            handle = self._agent.make_prepped_xfer(
                "WRITE",
                self._local_descriptors,
                self._descriptor_indices(local_blocks, self.blocks, self.rows),
                self._peer_descriptors,
                self._descriptor_indices(peer_blocks, self.peer_blocks, self.peer_rows),
                notice,
            )
            state = self._agent.transfer(handle)
        transfer = _NixlTransfer(self, handle, state)
        self._unfinished.append(transfer)
        return transfer

    def _descriptor_indices(self, numbers: list[int], blocks: int, rows: int) -> Any:
        """Return the descriptor index of each of the block ``numbers`` in each region of a side with ``blocks`` blocks of
        pages and ``rows`` of states.
        """
        starts = accumulate(self._counts(blocks, rows), initial=0)
        parts = zip(starts, self._split(numbers, blocks), strict=False)
        return np.concatenate([np.asarray(part, dtype=np.int32) + np.int32(start) for start, part in parts])

    def _check_up(self) -> None:
        if self._down is not None:
            raise LinkDown(f"this link is down: {self._down or 'it was closed'}")

    def state_of(self, handle: Any) -> str:
        """Return NIXL's name of a transfer's state. Raises :class:`LinkDown`."""
        self._check_up()
        with self._guard("asking for a transfer"):
            state: str = self._agent.check_xfer_state(handle)
        return state

    @contextmanager
    def _guard(self, action: str) -> Generator[None]:
        """Turn NIXL's errors into :class:`LinkDown` within the scope, and mark the link as down."""
        try:
            yield
        except LinkDown:
            raise
        except Exception as error:
            raise self.fail(f"{action}: {type(error).__name__}: {error}") from error

    def fail(self, why: str) -> LinkDown:
        """Mark the link as down, and return the error to raise. The first reason is kept."""
        self._down = self._down if self._down is not None else why
        return LinkDown(f"this link is down: {why}")

    def finish(self, transfer: _NixlTransfer) -> None:
        """Release the agent's handle of a transfer that is over."""
        self._unfinished.remove(transfer)
        transfer.release()

    def release(self, handle: Any) -> None:
        """Return the handle of a transfer to NIXL. Errors are ignored: the link may be down."""
        with suppress(Exception):
            self._agent.release_xfer_handle(handle)


class _NixlTransfer(PageTransfer):
    def __init__(self, link: NixlLink, handle: Any, state: str) -> None:
        self._link, self._handle, self._state = link, handle, state

    def done(self) -> bool:
        """Return True once the transfer is over, and release its handle then.

        Raises :class:`LinkDown` if the transfer failed.
        """
        if self._state == "DONE":
            if self._handle is not None:
                self._link.finish(self)
            return True
        self._state = self._link.state_of(self._handle)
        if self._state == "ERR":
            raise self._link.fail("a transfer failed")
        return self._state == "DONE" and self.done()

    def release(self) -> None:
        """Release the handle of the transfer. May be called twice."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._link.release(handle)
