"""An engine that costs next to nothing: vLLM's addresses, the prompt's ids echoed as the bytes that came, one reply.

Prints {"url"} when it listens. `--reply` is a JSON list of ids, sent `--per-event` at a time, `--pace` seconds apart;
its first id changes from answer to answer, so that no two are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from typing import Any

import msgspec
import orjson
import uvloop
from aiohttp import web

NUM_FIRST = 1000  # ids that a reply may begin with


class Asked(msgspec.Struct):
    prompt: msgspec.Raw
    return_token_ids: bool = False


class FakeEngine:
    def __init__(self, reply: list[int], per_event: int, pace_s: float) -> None:
        self._pace_s = pace_s
        self._events = [_event(reply[at : at + per_event]) for at in range(per_event, len(reply), per_event)]
        self._events += [_event([], "stop") + b"data: [DONE]\n\n"]
        self._first = reply[:per_event]
        self._counter = itertools.count()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "parent": None, "max_model_len": 1_000_000}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        asked = msgspec.json.decode(await request.read(), type=Asked)
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        ids = [self._first[0] + next(self._counter) % NUM_FIRST, *self._first[1:]]
        await response.write(_event(ids, echo=bytes(asked.prompt) if asked.return_token_ids else b"null"))
        for event in self._events:
            if self._pace_s:
                await asyncio.sleep(self._pace_s)
            await response.write(event)
        return response


def _event(ids: list[int], finish_reason: str | None = None, echo: bytes = b"null") -> bytes:
    logprobs: dict[str, Any] = {"token_logprobs": [-0.125] * len(ids), "tokens": [], "top_logprobs": []}
    choice = {"index": 0, "text": "", "logprobs": logprobs, "finish_reason": finish_reason, "stop_reason": None}
    choice |= {"token_ids": ids, "prompt_token_ids": orjson.Fragment(echo)}
    body = {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": "fake", "choices": [choice]}
    return b"data: " + orjson.dumps(body) + b"\n\n"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reply", required=True)
    parser.add_argument("--per-event", type=int, default=8)
    parser.add_argument("--pace", type=float, default=0.0)
    args = parser.parse_args()
    engine = FakeEngine(json.loads(args.reply), args.per_event, args.pace)
    app = web.Application(client_max_size=2**28)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_post("/v1/completions", engine.completions)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
