"""The oracle behind vLLM's addresses: an engine that outlives the gateways that ask it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from aiohttp import web

from stenograph.engines.base import Chunk, Generate
from stenograph.errors import EngineError
from stenograph.rendering import Rendering
from stenograph.types import Sampling
from support.oracle import Oracle


@asynccontextmanager
async def serving_oracle(oracle: Oracle, rendering: Rendering) -> AsyncIterator[str]:
    """Its address, for `engine.kind = "vllm"`."""

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked = Generate(
            ids=np.array(body["prompt"], np.int32),
            sampling=Sampling(max_tokens=body["max_tokens"]),
            session="",
            stop_token_ids=tuple(body["stop_token_ids"]),
        )
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        try:
            await stream.prepare(request)
            async for chunk in oracle.generate(asked):
                await stream.write(_event(chunk, body["prompt"]))
            await stream.write(b"data: [DONE]\n\n")
        except EngineError as e:
            told = {"error": {"message": str(e), "type": "InternalServerError", "code": 500}}
            await stream.write(f"data: {json.dumps(told)}\n\n".encode())
        except ConnectionError:
            pass  # its gateway is dead
        return stream

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "oracle", "max_model_len": 200_000}]})

    async def tokenize(request: web.Request) -> web.Response:
        ids = rendering.encode_text((await request.json())["prompt"]).tolist()
        return web.json_response({"count": len(ids), "max_model_len": 200_000, "tokens": ids})

    app = web.Application(client_max_size=2**28)
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/tokenize", tokenize)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _event(chunk: Chunk, prompt: list[int]) -> bytes:
    logprobs = {"token_logprobs": chunk.logprobs.astype(float).tolist()}
    choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": logprobs, "finish_reason": chunk.finish_reason}
    choice |= {"prompt_token_ids": prompt, "token_ids": chunk.ids.tolist()}
    event = {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": "oracle", "choices": [choice]}
    return f"data: {json.dumps(event)}\n\n".encode()
