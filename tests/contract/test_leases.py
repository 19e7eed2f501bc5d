"""A session's turns hold their payloads, an export holds its own, and each is freed once, with the last of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from stenograph.errors import TraceError
from stenograph.traces.experts import routed_experts
from stenograph.traces.memory import MemoryTraceStore
from stenograph.traces.payloads import Holder
from stenograph.traces.session import Opening
from stenograph.traces.sqlite import SqliteTraceStore
from stenograph.traces.store import TraceStore
from stenograph.types import Payload, Turn
from support.payloads import is_there, opaque
from support.turns import make_turn

REQUEST = Holder("request", "call")
EXPORT = Holder("sample", "export")


def holding(payload: Payload, *context: int) -> Turn:
    """A turn with a token for each byte of `payload`."""
    return replace(make_turn(context or [1], range(2, 2 + payload.shape[0])), experts=payload)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TraceStore]:
    store = MemoryTraceStore() if request.param == "memory" else SqliteTraceStore(tmp_path / "traces.db")
    store.open(Opening("s"))
    with closing(store):
        yield store


def taken(store: TraceStore, said: bytes, session: str = "s", *context: int) -> Payload:
    """Take a turn as the gateway does: put by the request, committed, let go of."""
    payload = store.payloads.put(opaque(said), REQUEST)
    store.commit(session, None, holding(payload, *context))
    store.payloads.release([REQUEST])
    return payload


def test_a_commit_takes_the_lease_over_and_the_sessions_release_ends_it(store: TraceStore) -> None:
    payload = taken(store, b"ab")
    assert store.payloads.get(payload).tobytes() == b"ab"
    assert store.release(["unknown", "s", "s"]) == ["s"]
    assert not is_there(store.payloads, payload)
    assert store.release(["s"]) == []


@pytest.mark.parametrize("export_first", [True, False])
def test_an_export_outlives_its_session_and_a_session_its_export(store: TraceStore, export_first: bool) -> None:
    payload = taken(store, b"ab")
    (sample,) = store.samples("s", holder=EXPORT)
    ends: list[Callable[[], object]] = [lambda: store.payloads.release([EXPORT]), lambda: store.release(["s"])]
    first, last = ends if export_first else reversed(ends)
    first()
    routed = routed_experts(sample, store.payloads.get)
    assert routed is not None
    assert routed[0].tobytes() == b"ab\0"  # by input token: the prompt, then all sampled but the last
    last()
    assert not is_there(store.payloads, payload)
    with pytest.raises(TraceError, match=f"payload {payload.id} .* was freed"):
        routed_experts(sample, store.payloads.get)


def test_samples_that_nobody_holds_end_with_their_session(store: TraceStore) -> None:
    payload = taken(store, b"ab")
    store.samples("s")
    store.release(["s"])
    assert not is_there(store.payloads, payload)


def test_what_an_export_lets_go_of_is_still_there_for_the_next(store: TraceStore) -> None:
    payloads = [taken(store, b"ab")]
    for said in (b"cd", b"ef"):  # the same prompt again: a rollout that is tried anew in its session
        store.samples("s", holder=EXPORT)
        payloads.append(taken(store, said))
        assert store.payloads.release([EXPORT]) == []
    samples = store.samples("s", holder=EXPORT)
    assert [routed_experts(sample, store.payloads.get) is not None for sample in samples] == [True] * 3
    assert store.release(["s"]) == ["s"]
    assert sorted(store.payloads.release([EXPORT])) == sorted(payload.id for payload in payloads)


def test_releasing_one_session_leaves_what_another_holds(store: TraceStore) -> None:
    store.open(Opening("waiting"))
    done, waiting = taken(store, b"ab"), taken(store, b"cd", "waiting")
    store.release(["s"])
    assert (is_there(store.payloads, done), is_there(store.payloads, waiting)) == (False, True)
    assert len(store.samples("waiting")) == 1


def test_a_commit_that_fails_leaves_no_lease_behind(store: TraceStore) -> None:
    first, second = (store.payloads.put(opaque(said), REQUEST) for said in (b"ab", b"cd"))
    turn = holding(first)
    store.commit("s", None, turn)
    with pytest.raises(TraceError, match="recorded already"):
        store.commit("s", turn.id, holding(second), turn)
    store.seal("s")
    with pytest.raises(TraceError, match="is sealed"):
        store.commit("s", None, holding(second))
    assert store.payloads.release([REQUEST]) == [second.id]
    assert is_there(store.payloads, first)


def test_a_turn_whose_payload_was_freed_is_not_recorded(store: TraceStore) -> None:
    gone = store.payloads.put(opaque(b"ab"), REQUEST)
    store.payloads.release([REQUEST])
    there = store.payloads.put(opaque(b"cd"), REQUEST)
    with pytest.raises(TraceError, match=f"payload {gone.id} .* was freed"):
        store.commit("s", None, holding(there), holding(gone))
    assert store.get("s").num_turns == 0
    assert store.payloads.release([REQUEST]) == [there.id]


def test_one_that_does_not_fit_is_told_by_its_handle_and_nothing_is_leased(store: TraceStore) -> None:
    payload = store.payloads.put(opaque(b"abc"), REQUEST)
    store.commit("s", None, replace(make_turn([], [2, 3]), experts=payload))
    with pytest.raises(TraceError, match="3 rows of experts for 2 tokens after 0 others"):
        store.samples("s", holder=EXPORT)
    store.release(["s"])
    assert store.payloads.release([REQUEST]) == [payload.id]


def test_a_turn_that_cannot_be_written_leaves_no_lease_behind(tmp_path: Path) -> None:
    with closing(SqliteTraceStore(tmp_path / "traces.db")) as store:
        store.open(Opening("s"))
        payload = store.payloads.put(opaque(b"ab"), REQUEST)
        with pytest.raises(TraceError, match="cannot be written"):
            store.commit("s", None, replace(holding(payload), notes=(object(),)))
        assert store.payloads.release([REQUEST]) == [payload.id]


def test_a_session_that_was_let_go_from_memory_holds_what_it_held(tmp_path: Path) -> None:
    with closing(SqliteTraceStore(tmp_path / "traces.db", memory_bytes=0)) as store:
        for session in ("s", "other"):
            store.open(Opening(session))
        first, second = taken(store, b"ab"), taken(store, b"cd", "other")
        assert [sample.experts[0].payload for sample in store.samples("s")] == [first]
        assert store.payloads.get(first).tobytes() == b"ab"
        store.samples("other")  # which makes room again
        store.release(["s"])
        assert (is_there(store.payloads, first), is_there(store.payloads, second)) == (False, True)


SESSIONS = ("s0", "s1")
OTHERS = [Holder("request", "call"), Holder("sample", "export"), Holder("checkpoint", "step")]


class Leases(RuleBasedStateMachine):
    """A store against a plain model of who holds what: only what nobody holds is gone, and it was freed once."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryTraceStore()
        self.values: dict[Payload, bytes] = {}
        self.holders: dict[Payload, set[Holder]] = {}
        self.recorded: dict[str, list[Payload]] = {}  # by session that is there
        self.sealed: set[str] = set()
        self.freed: list[str] = []
        for session in SESSIONS:
            self.store.open(Opening(session))
            self.recorded[session] = []

    payloads: Bundle[Payload] = Bundle("payloads")

    @rule(session=st.sampled_from(SESSIONS))
    def open(self, session: str) -> None:
        if session not in self.recorded:
            self.store.open(Opening(session))
            self.recorded[session] = []

    @rule(target=payloads, value=st.binary(min_size=1, max_size=3), holder=st.sampled_from(OTHERS))
    def put(self, value: bytes, holder: Holder) -> Payload:
        return self._put(value, holder)

    @rule(leased=st.lists(payloads, max_size=3), holder=st.sampled_from(OTHERS))
    def lease(self, leased: list[Payload], holder: Holder) -> None:
        if self._all_there(leased):
            self.store.payloads.lease(leased, holder)
            self._hold(leased, holder)
        else:
            with pytest.raises(TraceError):
                self.store.payloads.lease(leased, holder)

    @rule(session=st.sampled_from(SESSIONS))
    def seal(self, session: str) -> None:
        if session in self.recorded:
            self.store.seal(session)
            self.sealed.add(session)

    @rule(session=st.sampled_from(SESSIONS), siblings=st.lists(payloads, min_size=1, max_size=2))
    def commit(self, session: str, siblings: list[Payload]) -> None:
        turns = [holding(payload) for payload in siblings]
        if session in self.recorded and session not in self.sealed and self._all_there(siblings):
            self.store.commit(session, None, *turns)
            self._hold(siblings, Holder("session", session))
            self.recorded[session] += siblings
        else:
            with pytest.raises(TraceError):
                self.store.commit(session, None, *turns)

    @rule(target=payloads, session=st.sampled_from(SESSIONS), value=st.binary(min_size=1, max_size=3))
    def take(self, session: str, value: bytes) -> Payload:
        """As the gateway does, whether the commit succeeds or not."""
        payload = self._put(value, REQUEST)
        self.commit(session, [payload])
        self.release([REQUEST])
        return payload

    @rule(session=st.sampled_from(SESSIONS), holder=st.sampled_from(OTHERS))
    def export(self, session: str, holder: Holder) -> None:
        if session in self.recorded:
            samples = self.store.samples(session, holder=holder)
            assert [sample.experts[0].payload for sample in samples] == self.recorded[session]
            self._hold(self.recorded[session], holder)

    @rule(holders=st.just(OTHERS) | st.lists(st.sampled_from(OTHERS), max_size=4))
    def release(self, holders: list[Holder]) -> None:
        expected = self._let_go(holders)
        freed = self.store.payloads.release(holders)
        assert set(freed) == expected
        self.freed += freed

    @rule(sessions=st.just([*SESSIONS]) | st.lists(st.sampled_from((*SESSIONS, "unknown")), max_size=4))
    def release_sessions(self, sessions: list[str]) -> None:
        known = [name for name in dict.fromkeys(sessions) if name in self.recorded]
        self.freed += self._let_go([Holder("session", name) for name in known])
        assert self.store.release(sessions) == known
        for name in known:
            del self.recorded[name]
            self.sealed.discard(name)

    @invariant()
    def what_is_held_is_there_and_nothing_else(self) -> None:
        for payload, holders in self.holders.items():
            assert is_there(self.store.payloads, payload) == bool(holders)
            assert not holders or self.store.payloads.get(payload).tobytes() == self.values[payload]
        assert sorted(self.freed) == sorted(payload.id for payload, holders in self.holders.items() if not holders)

    def teardown(self) -> None:
        """At the end of it all nothing stays behind."""
        self.release_sessions([*SESSIONS])
        self.what_is_held_is_there_and_nothing_else()
        self.release(OTHERS)
        assert not any(is_there(self.store.payloads, payload) for payload in self.values)

    def _put(self, value: bytes, holder: Holder) -> Payload:
        payload = self.store.payloads.put(opaque(value), holder)
        self.values[payload], self.holders[payload] = value, {holder}
        return payload

    def _all_there(self, payloads: Sequence[Payload]) -> bool:
        return all(self.holders[payload] for payload in payloads)

    def _hold(self, payloads: Sequence[Payload], holder: Holder) -> None:
        for payload in payloads:
            self.holders[payload].add(holder)

    def _let_go(self, holders: Sequence[Holder]) -> set[str]:
        """What that frees."""
        there = {payload for payload, held in self.holders.items() if held}
        for held in self.holders.values():
            held.difference_update(holders)
        return {payload.id for payload in there if not self.holders[payload]}


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
