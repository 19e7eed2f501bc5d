"""A session's requests are known again in that session alone, however it is named."""

from __future__ import annotations

import json

from stenograph.gateway.sessions import Session as Held
from support.listening import CHAT, Session, chat_body, listening, rendering, say

HELLO = say(rendering(), "hello there")


def has_seen(held: Held) -> bool:
    return any(held.seen.items.values())


async def test_a_session_has_seen_what_was_sent_to_it_in_any_way() -> None:
    async with listening([HELLO] * 4) as client:

        async def by_path(session: Session) -> None:
            assert (await session.ask(chat_body("hello")))[0] == 200

        async def by_key(session: Session) -> None:
            headers = {"authorization": f"Bearer {session.api_key}"}
            assert (await client.send("POST", CHAT, chat_body("hello"), headers))[0] == 200

        async def by_header(session: Session) -> None:
            assert (await client.send("POST", CHAT, chat_body("hello"), {"x-session-id": session.id}))[0] == 200

        async def by_body(session: Session) -> None:
            assert (await client.send("POST", CHAT, chat_body("hello", session_id=session.id)))[0] == 200

        for send in (by_path, by_key, by_header, by_body):
            session, other = await client.open(), await client.open()
            await send(session)
            assert has_seen(client.gateway.sessions.find(session.id)), send.__name__
            assert not has_seen(client.gateway.sessions.find(other.id))
        assert not has_seen(client.gateway.sessions.untraced)


async def test_calls_without_a_session_share_nothing() -> None:
    async with listening([HELLO] * 2) as client:
        for _ in range(2):
            assert (await client.send("POST", CHAT, chat_body("hello")))[0] == 200
        assert not has_seen(client.gateway.sessions.untraced)


async def test_counting_tokens_is_seen_too() -> None:
    async with listening([HELLO]) as client:
        session = await client.open()
        assert (await session.ask(chat_body("hello"), "/v1/messages/count_tokens"))[0] == 200
        assert has_seen(client.gateway.sessions.find(session.id))


async def test_a_sealed_session_keeps_nothing_of_what_it_has_seen() -> None:
    async with listening([HELLO]) as client:
        session = await client.open()
        await session.ask(chat_body("hello"))
        await client.json("POST", f"/sessions/{session.id}/seal", {})
        assert not has_seen(client.gateway.sessions.find(session.id))


async def test_a_body_that_cannot_be_read_is_told_of_before_the_session_that_is_not_there() -> None:
    async with listening([HELLO]) as client:
        gone = {"x-session-id": "steno_gone"}
        status, _, body = await client.send("POST", CHAT, b'{"messages": [\xff]}', gone)
        assert (status, json.loads(body)["error"]["message"][:20]) == (400, "the body is not JSON")
        assert (await client.send("POST", CHAT, chat_body("hello"), gone))[0] == 404
