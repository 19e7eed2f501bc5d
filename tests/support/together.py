"""Gateways over one journal, on the test's own loop: each has an engine and a store of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

from stenograph.config import Config
from stenograph.engines.base import Engine
from stenograph.gateway.forwarding import private_address
from stenograph.gateway.server import Gateway
from stenograph.traces.sqlite import SqliteTraceStore
from support.listening import Client, Session, client_of, rendering, tidy


@asynccontextmanager
async def gateway(journal: Path, engine: Engine, admin_key: str = "admin", **settings: Any) -> AsyncIterator[Client]:
    values = {"engine": {"kind": "scripted", "script": "-"}, "gateway": {"port": 0, **settings}}
    config = Config.model_validate(values)
    with private_address() as address, closing(SqliteTraceStore(journal, address=address)) as store:
        async with client_of(Gateway(config, engine, rendering(), store, admin_key, "model", address)) as client:
            yield client


@asynccontextmanager
async def gateways(
    journal: Path, new_engine: Callable[[], Engine], **settings: Any
) -> AsyncIterator[tuple[Client, Client]]:
    """Two of them."""
    async with tidy(), AsyncExitStack() as stack:
        first = await stack.enter_async_context(gateway(journal, new_engine(), **settings))
        yield first, await stack.enter_async_context(gateway(journal, new_engine(), **settings))


def at(client: Client, session: Session) -> Session:
    """A session, asked at another gateway."""
    return Session(client, session.id, session.api_key)
