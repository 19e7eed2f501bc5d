"""Heavy values behind handles: one is there while somebody holds a lease on it, and is freed once, with the last."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from stenograph.errors import PayloadFreed
from stenograph.types import Payload


@dataclass(frozen=True, slots=True)
class Holder:
    """Whose leases they are: `name` is a session's id, a call's name, or what a sample's or checkpoint's owner says."""

    kind: Literal["session", "request", "sample", "checkpoint"]
    name: str

    @property
    def outlives_process(self) -> bool:
        """Whether its leases are still good after a crash: those of requests and samples die with their process."""
        return self.kind in ("session", "checkpoint")


Read = Callable[[Payload], NDArray[Any]]  # `Payloads.get`, or another that raises TraceError for what was freed


class Payloads(Protocol):
    """Every method may be called from any thread. A holder has one lease on a payload, however often it takes it."""

    def put(self, value: NDArray[Any], holder: Holder) -> Payload:
        """Keep `value`, to which nobody writes from now on, leased to `holder`."""
        ...

    def get(self, payload: Payload) -> NDArray[Any]:
        """The value, read-only. Raises TraceError where it was freed."""
        ...

    def lease(self, payloads: Iterable[Payload], holder: Holder) -> None:
        """Lease all to `holder`, or none: raises TraceError where one was freed."""
        ...

    def release(self, holders: Iterable[Holder]) -> list[str]:
        """End all leases of `holders`; unknown and repeated ones are ignored. Returns the ids of what that freed."""
        ...


class MemoryPayloads:
    """Payloads that live and die with their process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, NDArray[Any]] = {}
        self._holders: dict[str, set[Holder]] = {}  # by payload, never empty
        self._leased: dict[Holder, dict[str, None]] = {}  # the same the other way round, in the order of leasing

    def put(self, value: NDArray[Any], holder: Holder) -> Payload:
        payload = new_payload(value)
        value = value.view()
        value.flags.writeable = False
        with self._lock:
            self._values[payload.id] = value
            self._add(payload.id, holder)
        return payload

    def get(self, payload: Payload) -> NDArray[Any]:
        with self._lock:
            self._check(payload)
            return self._values[payload.id]

    def lease(self, payloads: Iterable[Payload], holder: Holder) -> None:
        payloads = list(payloads)
        with self._lock:
            for payload in payloads:
                self._check(payload)
            for payload in payloads:
                self._add(payload.id, holder)

    def release(self, holders: Iterable[Holder]) -> list[str]:
        holders = list(holders)
        with self._lock:
            freed = []
            for holder in holders:
                for payload in self._leased.pop(holder, ()):
                    self._holders[payload].discard(holder)
                    if not self._holders[payload]:
                        del self._holders[payload], self._values[payload]
                        freed.append(payload)
            return freed

    def _add(self, payload: str, holder: Holder) -> None:
        self._holders.setdefault(payload, set()).add(holder)
        self._leased.setdefault(holder, {})[payload] = None

    def _check(self, payload: Payload) -> None:
        if payload.id not in self._values:
            raise freed(payload)


def new_payload(value: NDArray[Any]) -> Payload:
    """A handle of its own for `value`."""
    return Payload(f"payload_{secrets.token_hex(8)}", value.dtype.name, value.shape)


@contextmanager
def leased(payloads: Payloads, taken: Sequence[Payload], holder: Holder) -> Iterator[None]:
    """Lease `taken` to `holder` if the block succeeds, and not at all if it fails.

    Raises TraceError before it where one was freed; after it that cannot be, for they are held meanwhile.
    """
    committing = Holder("request", secrets.token_hex(8))
    payloads.lease(taken, committing)
    try:
        yield
        payloads.lease(taken, holder)
    finally:
        payloads.release([committing])


def freed(payload: Payload) -> PayloadFreed:
    """What is told of a payload that is not there any more."""
    told = f"payload {payload.id} ({payload.dtype}, shape {list(payload.shape)}) was freed with its last lease"
    return PayloadFreed(f"{told}; lease it before its session is released, as samples(session, select, holder) does")
