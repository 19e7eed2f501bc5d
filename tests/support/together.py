"""Gateways over one journal, on the test's own loop: each has an engine and a store of its own."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp

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
        async with client_of(
            Gateway(config, engine, rendering(), store, admin_key, "model", address=address)
        ) as client:
            yield client


@asynccontextmanager
async def gateways(
    journal: Path, new_engine: Callable[[], Engine], **settings: Any
) -> AsyncIterator[tuple[Client, Client]]:
    """Two of them."""
    async with tidy(), AsyncExitStack() as stack:
        first = await stack.enter_async_context(gateway(journal, new_engine(), **settings))
        yield first, await stack.enter_async_context(gateway(journal, new_engine(), **settings))


class Spread(Client):
    """Asks at random, at any of the gateways, for sessions of the first."""

    def __init__(self, clients: Sequence[Client], http: aiohttp.ClientSession, seed: int) -> None:
        super().__init__(clients[0].gateway, http)
        self._urls = [client.url for client in clients]
        self._chance = random.Random(seed)

    @property
    def url(self) -> str:
        return self._chance.choice(self._urls)


def at(client: Client, session: Session) -> Session:
    """A session, asked at another gateway."""
    return Session(client, session.id, session.api_key)
