"""Keys open what is theirs, for as long as it is there."""

from __future__ import annotations

import asyncio

import pytest

from stenograph.errors import RequestError
from stenograph.gateway.sessions import Session, Sessions
from stenograph.traces.memory import MemoryTraceStore
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
