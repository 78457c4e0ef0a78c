"""The error tree.

Every error that Outrider raises on purpose is an :class:`OutriderError`; its text says what happened, where, what was
expected and what to do. The command line prints that text without a traceback.

    OutriderError:
    ├── ConfigError               a value that can't be used, or an option that doesn't exist (also a ValueError).
    ├── BackendError              finding, loading or choosing a plugin.
    │   ├── BackendNotFound       no plugin of that name.
    │   ├── BackendLoadError      installed, but can't be loaded or can't run here.
    │   ├── AmbiguousBackend      two equal candidates.
    │   └── PluginContractError   hooks missing, wrong signature, interface version out of range.
    ├── InterfaceError            the backend interface was used against its rules.
    │   ├── CapabilityError       asked for an ability that the backend doesn't declare.
    │   ├── StreamOrderError      an invalid wait: never recorded, foreign, captured elsewhere.
    │   ├── SynchronousCopyError  an asynchronous copy that the device would make synchronous.
    │   ├── StaleBufferError      a pinned buffer was read after it had been renewed.
    │   └── CaptureError          a capture failed; streams and pools are as they were before.
    ├── DeviceError               the device reported a failure; ``device_lost`` tells the two kinds apart.
    │   ├── OutOfDeviceMemory     recoverable: the device still works.
    │   ├── DeviceFault           recoverable: this operation failed, the device still works.
    │   ├── DeviceLost            sticky: nothing that is queued will finish, and no further call will work.
    │   ├── CollectiveError       recoverable: a rank of a group died, came too late or made another call.
    │   └── DeviceStuck           the host waited for a fence longer than it may; it counts as lost.
    ├── EngineStopped             an engine was used after its device was lost or stuck; lists the requests left open.
    ├── DeadlockError             nothing that is queued can ever run.
    ├── CheckpointError           a checkpoint that is truncated, incomplete, of the wrong shape or unknown.
    └── RequestError              a request that can't be served: empty, too long, unknown id.

The last two are about models and requests, not about devices. They are in :mod:`outrider.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping


class OutriderError(Exception):
    """Base of every error that Outrider raises on purpose."""


class ConfigError(OutriderError, ValueError):
    """A configuration value that can't be used, or an option that doesn't exist."""


class BackendError(OutriderError):
    """A plugin could not be found, loaded or chosen."""


class BackendNotFound(BackendError):
    """No installed plugin has the name that was asked for."""


class BackendLoadError(BackendError):
    """The plugin is installed but can't be loaded, or can't run on this machine."""


class AmbiguousBackend(BackendError):
    """Two candidates have the same priority; a name must be given."""


class PluginContractError(BackendError):
    """A plugin breaks the contract of the hooks or of the interface version."""


class InterfaceError(OutriderError):
    """The backend interface was used against its rules."""


class CapabilityError(InterfaceError):
    """An ability was asked for that the backend doesn't declare."""


class StreamOrderError(InterfaceError):
    """An invalid wait or record, such as a wait on an event that was never recorded."""


class SynchronousCopyError(InterfaceError):
    """An asynchronous copy was asked for that the device would silently make synchronous."""


class StaleBufferError(InterfaceError):
    """A pinned buffer was read under an old generation, after it had been renewed."""


class CaptureError(InterfaceError):
    """A capture failed. Streams, pools and the ambient stream are as they were before it."""


class DeviceError(OutriderError):
    """The device reported a failure.

    ``device_lost`` is True when the failure is sticky: queued work is gone and every later call fails.
    """

    device_lost: bool = False


class OutOfDeviceMemory(DeviceError):
    """An allocation didn't fit. The device still works; queued work isn't affected."""


class DeviceFault(DeviceError):
    """One operation failed. The device still works; the results of that operation are undefined."""


class DeviceLost(DeviceError):
    """A sticky fault: nothing that is queued will finish. The process must make a new backend, or end."""

    device_lost = True


class DeviceStuck(DeviceError):
    """The host waited for a fence longer than its time limit.

    The text names the fence, its generation, and for each stream the last enqueued operation and the progress. The device
    counts as lost, since it may never go on.
    """

    device_lost = True


class CollectiveError(DeviceError):
    """A collective failed: a rank of the group died, came too late, or made another call.

    The group can't be used any more; the device still works. ``group`` is the name of the group and ``rank`` this rank's
    index in the group. ``sequence`` and ``kind`` identify the failed call: 0 and ``"create_group"`` if the group was being
    created.
    """

    def __init__(self, message: str, group: str = "", rank: int = -1, sequence: int = 0, kind: str = "") -> None:
        super().__init__(message)
        self.group = group
        self.rank = rank
        self.sequence = sequence
        self.kind = kind

    def __reduce__(self) -> tuple[type[CollectiveError], tuple[str, str, int, int, str]]:
        return type(self), (str(self), self.group, self.rank, self.sequence, self.kind)


class EngineStopped(OutriderError):
    """An engine was used after its device was lost or got stuck.

    ``open_requests`` maps the id of each waiting or running request to the tokens that the host has received. Another
    engine can continue from these tokens.
    """

    def __init__(self, message: str, open_requests: Mapping[int, tuple[int, ...]]) -> None:
        super().__init__(message)
        self.open_requests = open_requests


class DeadlockError(OutriderError):
    """The queued operations can never run. The text lists each waiting stream or thread and the fence it waits for."""
