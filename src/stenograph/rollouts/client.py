"""The gateway's session addresses, over HTTP: rollouts know a gateway by its URL alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from stenograph.agents.base import SessionHandle
from stenograph.errors import JudgeError, RolloutError, boundary


class GatewayClient:
    """`async with GatewayClient(url, admin_key) as gateway`."""

    def __init__(self, url: str, admin_key: str, *, model: str = "stenograph") -> None:
        self._url = url
        self._model = model
        self._headers = {"authorization": f"Bearer {admin_key}", "content-type": "application/json"}
        self._client: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> GatewayClient:
        self._client = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None),  # sealing may take as long as gateway.seal_timeout_s says
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()

    async def open(self, *, traced: bool, metadata: Mapping[str, Any]) -> SessionHandle:
        opened = await self._call("POST", "/sessions", {"traced": traced, "metadata": metadata})
        with boundary(RolloutError, "read the session that the gateway opened"):
            return SessionHandle(opened["id"], opened["base_url"], opened["api_key"], self._model)

    async def num_turns(self, session: str) -> int:
        """How many are recorded by now; of an untraced session, how many were answered."""
        info = await self._call("GET", f"/sessions/{session}")
        with boundary(RolloutError, f"read how many turns session {session} has"):
            return int(info["num_turns"])

    async def seal(
        self, session: str, *, reward: float | None, status: str, turn_rewards: Sequence[float] = ()
    ) -> None:
        """After this nothing commits any more: what was in flight has ended.

        Raises JudgeError where the gateway refuses what was judged, as it does more `turn_rewards` than turns.
        """
        judged: dict[str, Any] = {"reward": reward, "status": status}
        if turn_rewards:
            judged["turn_rewards"] = turn_rewards
        await self._call("POST", f"/sessions/{session}/seal", judged, refused=JudgeError)

    async def release(self, sessions: Iterable[str]) -> list[str]:
        """Delete sessions; unknown and repeated ids are ignored, and nothing is sent for none. Returns those released.

        One that fails leaves the others alone; the first error is raised when all were tried.
        """
        deleting = [self._call("DELETE", f"/sessions/{session}") for session in dict.fromkeys(sessions)]
        answers = await asyncio.gather(*deleting, return_exceptions=True)
        released: list[str] = []
        with boundary(RolloutError, "read what the gateway released"):
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
                released += answer["released"]
        return released

    async def _call(
        self, method: str, path: str, body: object = None, *, refused: type[RolloutError] = RolloutError
    ) -> Any:
        """Raises `refused` where the body is (400)."""
        if self._client is None:
            raise RolloutError("the gateway client is not open; use it with `async with`")
        with boundary(RolloutError, f"{method} {path} on the gateway"):
            data = None if body is None else orjson.dumps(body)
            async with self._client.request(method, self._url + path, data=data) as response:
                answer = await response.read()
                if response.status >= 400:
                    error = refused if response.status == 400 else RolloutError
                    raise error(f"the gateway answered {response.status} to {method} {path}: {_told(answer)}")
            return orjson.loads(answer)


def _told(answer: bytes) -> str:
    """What an error says, or the beginning of whatever came in its place."""
    with suppress(ValueError, KeyError, TypeError):
        return str(orjson.loads(answer)["error"]["message"])
    return repr(answer[:300])
