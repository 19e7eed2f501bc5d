"""What the record and the loop rely on, wherever payloads are kept."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from stenograph.errors import TraceError
from stenograph.traces.payloads import Holder, MemoryPayloads, Payloads
from stenograph.traces.sqlite import SqliteTraceStore
from stenograph.types import Payload
from support.payloads import is_there, opaque

SESSION = Holder("session", "steno_1")
REQUEST = Holder("request", "call")
SAMPLE = Holder("sample", "step-000001")
CHECKPOINT = Holder("checkpoint", "step-000001")
HOLDERS = (SESSION, REQUEST, SAMPLE, CHECKPOINT)
OPAQUE = opaque(b"anything at all")

Factory = Callable[[pytest.FixtureRequest], Payloads]


def memory(request: pytest.FixtureRequest) -> Payloads:
    return MemoryPayloads()


def sqlite(request: pytest.FixtureRequest) -> Payloads:
    store = SqliteTraceStore(request.getfixturevalue("tmp_path") / "traces.db")
    request.addfinalizer(store.close)
    return store.payloads


@pytest.fixture(params=[memory, sqlite], ids=lambda factory: factory.__name__)
def payloads(request: pytest.FixtureRequest) -> Payloads:
    factory: Factory = request.param
    return factory(request)


@pytest.mark.parametrize(
    "value",
    [
        OPAQUE,
        np.arange(24, dtype=np.uint16).reshape(4, 2, 3),
        np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3).T,  # not in C order
        np.zeros((0, 2, 2), np.int32),
    ],
    ids=lambda value: f"{value.dtype}{list(value.shape)}",
)
def test_what_was_put_is_read_back_as_it_was_and_cannot_be_written_to(payloads: Payloads, value: np.ndarray) -> None:
    payload = payloads.put(value, SESSION)
    assert (payload.dtype, payload.shape) == (value.dtype.name, value.shape)
    held = payloads.get(payload)
    assert np.array_equal(held, value)
    assert held.dtype == value.dtype
    with pytest.raises(ValueError, match="read-only"):
        held[...] = 0


def test_equal_values_are_payloads_of_their_own(payloads: Payloads) -> None:
    one, other = payloads.put(OPAQUE, SESSION), payloads.put(OPAQUE, SAMPLE)
    assert payloads.release([SESSION]) == [one.id]
    assert payloads.get(other).tobytes() == OPAQUE.tobytes()


@pytest.mark.parametrize(
    "order", list(itertools.permutations(HOLDERS)), ids=lambda order: "-".join(h.kind for h in order)
)
def test_the_last_lease_frees_whatever_the_order(payloads: Payloads, order: tuple[Holder, ...]) -> None:
    payload = payloads.put(OPAQUE, order[2])
    for holder in (order[0], order[1], order[3]):
        payloads.lease([payload], holder)
    for holder in order[:-1]:
        assert payloads.release([holder]) == []
        assert payloads.get(payload).tobytes() == OPAQUE.tobytes()
    assert payloads.release([order[-1]]) == [payload.id]
    assert not is_there(payloads, payload)
    assert payloads.release(order) == []


def test_a_holder_has_one_lease_however_often_it_takes_it(payloads: Payloads) -> None:
    payload = payloads.put(OPAQUE, SESSION)
    payloads.lease([payload, payload], SESSION)
    payloads.lease([payload], SESSION)
    assert payloads.release([SESSION]) == [payload.id]


def test_unknown_and_repeated_holders_are_ignored(payloads: Payloads) -> None:
    assert payloads.release([]) == []
    assert payloads.release([SESSION, SAMPLE]) == []  # nothing was ever put
    one, two = payloads.put(OPAQUE, SESSION), payloads.put(OPAQUE, SESSION)
    other = payloads.put(OPAQUE, Holder("session", "steno_2"))
    namesake = Holder("sample", SESSION.name)
    assert sorted(payloads.release([Holder("session", "unknown"), namesake, SESSION, SESSION])) == sorted(
        [one.id, two.id]
    )
    assert is_there(payloads, other)


def test_what_was_freed_is_told_with_its_name_and_the_remedy(payloads: Payloads) -> None:
    payload = payloads.put(OPAQUE, SESSION)
    payloads.release([SESSION])
    for use in (lambda: payloads.get(payload), lambda: payloads.lease([payload], SAMPLE)):
        with pytest.raises(TraceError, match=rf"payload {payload.id} .* was freed .* lease it before"):
            use()


def test_leases_are_taken_all_or_none(payloads: Payloads) -> None:
    there, gone = payloads.put(OPAQUE, SESSION), payloads.put(OPAQUE, REQUEST)
    payloads.release([REQUEST])
    with pytest.raises(TraceError, match=gone.id):
        payloads.lease([there, gone], SAMPLE)
    assert payloads.release([SESSION]) == [there.id]


def test_a_holder_that_was_released_may_hold_again(payloads: Payloads) -> None:
    payload = payloads.put(OPAQUE, SESSION)
    payloads.lease([payload], SAMPLE)
    payloads.release([SAMPLE])
    payloads.lease([payload], SAMPLE)
    assert payloads.release([SESSION]) == []
    assert payloads.release([SAMPLE]) == [payload.id]


def test_a_crash_ends_the_leases_of_what_dies_with_its_process_and_no_others(payloads: Payloads) -> None:
    crashed = [holder for holder in HOLDERS if not holder.outlives_process]
    assert crashed == [REQUEST, SAMPLE]
    in_vain, recorded = payloads.put(OPAQUE, REQUEST), payloads.put(OPAQUE, REQUEST)
    payloads.lease([recorded], SESSION)
    payloads.lease([recorded], SAMPLE)
    assert payloads.release(crashed) == [in_vain.id]
    assert is_there(payloads, recorded)
    payloads.lease([recorded], CHECKPOINT)
    assert payloads.release([SESSION]) == []
    assert payloads.release([CHECKPOINT]) == [recorded.id]


def test_of_holders_that_let_go_at_once_one_frees(payloads: Payloads) -> None:
    held = [payloads.put(OPAQUE, SESSION) for _ in range(50)]
    holders = [Holder("request", str(n)) for n in range(16)]
    for holder in holders:
        payloads.lease(held, holder)
    payloads.release([SESSION])
    with ThreadPoolExecutor(len(holders)) as threads:
        freed = list(threads.map(lambda holder: payloads.release([holder]), holders))
    assert sorted(itertools.chain.from_iterable(freed)) == sorted(payload.id for payload in held)


def test_who_leases_while_another_lets_go_either_holds_it_or_is_told(payloads: Payloads) -> None:
    for n in range(50):
        payload, late = payloads.put(OPAQUE, SESSION), Holder("sample", str(n))

        def lease(payload: Payload = payload, late: Holder = late) -> bool:
            try:
                payloads.lease([payload], late)
            except TraceError:
                return False
            return True

        with ThreadPoolExecutor(2) as threads:
            leased, freed = threads.submit(lease), threads.submit(payloads.release, [SESSION])
        assert (freed.result() == []) == leased.result() == is_there(payloads, payload)
        assert payloads.release([late]) == ([payload.id] if leased.result() else [])


def test_what_is_freed_in_memory_is_gone_at_once() -> None:
    payloads, value = MemoryPayloads(), np.ones(1000)
    payload, alive = payloads.put(value, SESSION), weakref.ref(value)
    del value
    assert alive() is not None
    gc.disable()  # nothing waits for the garbage collector
    try:
        assert payloads.release([SESSION]) == [payload.id]
        assert alive() is None
    finally:
        gc.enable()
