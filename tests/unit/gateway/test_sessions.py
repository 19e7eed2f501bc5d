"""Keys open what is theirs, for as long as it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from stenograph.errors import RequestError, TraceError
from stenograph.gateway.sessions import KEY_PREFIX, Session, Sessions
from stenograph.traces.memory import MemoryTraceStore
from stenograph.traces.sqlite import SqliteTraceStore
from support.listening import new_call


def sessions(require_keys: bool = True) -> Sessions:
    return Sessions(MemoryTraceStore(), admin_key="admin", require_keys=require_keys, ttl_s=60)


def opened(sessions: Sessions) -> Session:
    return sessions.open(traced=True, ttl_s=None, metadata={})


async def test_the_key_of_a_session_that_is_gone_opens_nothing() -> None:
    held = sessions(require_keys=False)
    session = opened(held)
    await held.close(session)
    with pytest.raises(RequestError) as caught:
        held.authorise(session.api_key, None)
    assert caught.value.status == 401
    assert held.authorise(None, None) is held.untraced
    assert held.authorise("any", None) is held.untraced


async def test_what_is_deleted_while_it_is_sealed_is_not_found() -> None:
    held = sessions()
    session = opened(held)
    session.start(new_call("hello"), asyncio.sleep(60))
    async with asyncio.TaskGroup() as group:
        sealing = group.create_task(_refused(held, session))
        await asyncio.sleep(0)
        closing = group.create_task(held.close(session))
    assert (sealing.result(), closing.result()) == (404, [session.id])


async def _refused(held: Sessions, session: Session) -> int:
    with pytest.raises(RequestError) as caught:
        await held.seal(session, 30, None, None)
    return caught.value.status


def test_of_two_keys_the_one_that_opens_what_is_wanted_is_chosen() -> None:
    held = sessions()
    mine, other = opened(held), opened(held)
    stale, unknown = KEY_PREFIX + "0" * 32, "sk-unknown"
    assert held.choose([], None) is None
    assert held.choose([stale, mine.api_key], None) == mine.api_key
    assert held.choose([other.api_key, mine.api_key], mine.id) == mine.api_key
    assert held.choose([other.api_key, mine.api_key], None) == other.api_key
    assert held.choose([mine.api_key, "admin"], held.untraced.id) == "admin"
    assert held.choose([unknown, other.api_key], mine.id) == other.api_key


def test_where_no_key_is_needed_one_of_a_session_that_is_gone_counts_all_the_same() -> None:
    held = sessions(require_keys=False)
    stale = KEY_PREFIX + "0" * 32
    for keys in (["any", stale], [stale, "any"]):
        with pytest.raises(RequestError) as caught:
            held.authorise(held.choose(keys, None), None)
        assert caught.value.status == 401


async def test_what_ends_with_the_gateway_may_be_tried_again() -> None:
    held = sessions()
    session = opened(held)
    call = new_call("hello")
    session.start(call, asyncio.sleep(60))
    await held.aclose()
    assert isinstance(call.error, RequestError)
    assert (call.error.status, call.error.retry) == (503, True)
    with pytest.raises(RequestError) as caught:
        session.require_open()
    assert (caught.value.status, caught.value.retry) == (503, True)


async def test_what_ends_with_its_session_may_not_be_tried_again() -> None:
    held = sessions()
    session = opened(held)
    call = new_call("hello")
    session.start(call, asyncio.sleep(60))
    await held.close(session)
    assert isinstance(call.error, RequestError)
    assert (call.error.status, call.error.retry) == (409, False)


async def test_a_session_of_a_process_that_is_gone_expires_too(tmp_path: Path) -> None:
    for ttl_s in (0.01, 60.0):
        with closing(SqliteTraceStore(tmp_path / "traces.db")) as store:
            held = Sessions(store, admin_key="admin", require_keys=True, ttl_s=60)
            session = held.open(traced=True, ttl_s=ttl_s, metadata={})
            await held.aclose()
        with closing(SqliteTraceStore(tmp_path / "traces.db")) as store:
            held = Sessions(store, admin_key="admin", require_keys=True, ttl_s=60)
            await asyncio.sleep(0.02)
            await held.expire(0)
            info = store.get(session.id)
            assert (info.state, info.status) == (("sealed", "expired") if ttl_s < 1 else ("open", None))
            store.release([session.id])


class Full(MemoryTraceStore):
    """Has no room for the first seal."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = 0

    def seal(
        self,
        session: str,
        reward: float | None = None,
        status: str | None = None,
        turn_rewards: Sequence[float] = (),
    ) -> None:
        if not self.refused:
            self.refused += 1
            raise TraceError("the disk is full")
        super().seal(session, reward, status, turn_rewards)


async def test_an_expiry_that_could_not_be_written_is_tried_again() -> None:
    held = Sessions(Full(), admin_key="admin", require_keys=True, ttl_s=60)
    session = held.open(traced=True, ttl_s=0.001, metadata={})
    await asyncio.sleep(0.01)
    for state in ("open", "sealed"):
        await held.expire(0)
        assert (held.store.get(session.id).state, session.state) == (state, "sealed")
