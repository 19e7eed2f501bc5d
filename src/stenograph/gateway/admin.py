"""The session addresses: open, read, seal and release what agents wrote."""

from __future__ import annotations

import secrets
from dataclasses import asdict
from typing import Any

import orjson
from aiohttp import web

from stenograph.config import SelectConfig
from stenograph.errors import RequestError, TooManyRewards
from stenograph.gateway import bodies
from stenograph.gateway.sessions import Session, Sessions
from stenograph.traces.export import sample_row, tree_row
from stenograph.traces.payloads import Holder


class SessionRoutes:
    """Answers /sessions and what is below it; the admin key is needed for all of it."""

    def __init__(self, sessions: Sessions, select: SelectConfig, seal_timeout_s: float) -> None:
        self._sessions = sessions
        self._select = select
        self._seal_timeout_s = seal_timeout_s
        self.public_url = ""

    async def handle(self, request: web.Request, path: str, key: str | None) -> web.Response:
        self._sessions.require_admin(key)
        parts = path.split("/")[2:]
        match request.method, parts:
            case "POST", []:
                return self._open(await _body(request))
            case "GET", [id]:
                return _json(self._info(self._sessions.find(id)))
            case "DELETE", [id]:
                return _json({"released": await self._release(id)})
            case "POST", [id, "seal"]:
                return await self._seal(self._sessions.find(id), await _body(request))
            case "GET", [id, "tree" | "samples" | "drift" | "ledger" as what]:
                return _json(self._read(what, self._traced(id), request.query.get("ids") == "1"))
        raise RequestError(f"{request.method} {path} is not an address of this gateway", status=404, retry=False)

    def _open(self, body: dict[str, Any]) -> web.Response:
        _check_fields(body, "traced", "ttl_s", "metadata")
        traced, ttl_s, metadata = body.get("traced", True), body.get("ttl_s"), body.get("metadata", {})
        if not isinstance(traced, bool):
            raise RequestError(f"traced: must be true or false, got {traced!r}")
        if ttl_s is not None and not (_is_number(ttl_s) and ttl_s > 0):
            raise RequestError(f"ttl_s: must be a positive number of seconds, got {ttl_s!r}")
        if not isinstance(metadata, dict):
            raise RequestError(f"metadata: must be an object, got {metadata!r}")
        try:
            orjson.dumps(metadata)
        except orjson.JSONEncodeError as e:
            raise RequestError("metadata: nested too deeply; flatten it") from e
        session = self._sessions.open(traced=traced, ttl_s=ttl_s, metadata=metadata)
        opened = {"id": session.id, "api_key": session.api_key, "base_url": f"{self.public_url}/s/{session.id}"}
        return _json(opened, status=201)

    def _info(self, session: Session) -> dict[str, Any]:
        info = {"id": session.id, "state": session.state}
        info |= {"num_turns": session.num_turns, "num_tokens": session.num_tokens}
        info |= {"policy_versions": None, "metadata": session.metadata}
        if session.traced:
            held = self._sessions.store.get(session.id)
            info |= {"num_turns": held.num_turns, "num_tokens": held.num_tokens}
            info |= {"policy_versions": held.policy_versions}
        return info

    async def _seal(self, session: Session, body: dict[str, Any]) -> web.Response:
        _check_fields(body, "reward", "status", "turn_rewards")
        reward, status, turn_rewards = body.get("reward"), body.get("status"), _numbers(body, "turn_rewards")
        if reward is not None and not _is_number(reward):
            raise RequestError(f"reward: must be a number, got {reward!r}")
        if status is not None and not isinstance(status, str):
            raise RequestError(f"status: must be a text, got {status!r}")
        try:
            await self._sessions.seal(session, self._seal_timeout_s, reward, status, turn_rewards)
        except TooManyRewards as e:
            raise RequestError(str(e), param="turn_rewards", retry=False) from e
        return _json(self._info(session))

    async def _release(self, id: str) -> list[str]:
        try:
            session = self._sessions.find(id)
        except RequestError:
            return []
        return await self._sessions.close(session)

    def _read(self, what: str, session: str, with_ids: bool) -> object:
        store = self._sessions.store
        match what:
            case "tree":
                return tree_row(store.tree(session), with_ids)
            case "samples":
                return self._samples(session)
            case "drift":
                return [asdict(record) for record in store.drift(session)]
        return asdict(store.ledger(session))

    def _samples(self, session: str) -> list[dict[str, Any]]:
        store, exported = self._sessions.store, Holder("sample", secrets.token_hex(8))
        try:
            samples = store.samples(session, self._select, exported)
            return [sample_row(sample, store.payloads.get) for sample in samples]
        finally:
            store.payloads.release([exported])

    def _traced(self, id: str) -> str:
        if not self._sessions.find(id).traced:
            raise RequestError(f"session {id} is untraced: nothing of it is recorded", status=404, retry=False)
        return id


def _check_fields(body: dict[str, Any], *known: str) -> None:
    """A misspelt field would be a reward that is lost, or a record of what was to have none."""
    unknown = [name for name in body if name not in known]
    if unknown:
        raise RequestError(f"{unknown[0]}: unknown field; known: {', '.join(known)}", param=unknown[0])


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(body: dict[str, Any], name: str) -> list[float]:
    given = body.get(name)
    if given is not None and not (isinstance(given, list) and all(map(_is_number, given))):
        raise RequestError(f"{name}: must be a list of numbers, got {given!r:.300}")
    return [float(number) for number in given or ()]


async def _body(request: web.Request) -> dict[str, Any]:
    raw = await bodies.read(request)
    try:
        body = orjson.loads(raw) if raw else {}
    except orjson.JSONDecodeError as e:
        raise RequestError(f"the body is not JSON: {e}") from e
    if not isinstance(body, dict):
        raise RequestError("the body must be an object")
    return body


def _json(payload: object, status: int = 200) -> web.Response:
    body = orjson.dumps(payload, option=orjson.OPT_SERIALIZE_NUMPY)
    return web.Response(body=body, status=status, content_type="application/json")
