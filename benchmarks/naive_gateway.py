"""The gateway that one would write first: every turn renders and encodes all of its session, and pickles it once.

Chat completions alone, streamed or whole; no keys, no matching of what was sampled before. Prints {"url"} when it
listens; a session is named in the path: /NAME/v1/chat/completions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
from typing import Any

import aiohttp
import uvloop
from aiohttp import web
from renderers import Qwen3RendererConfig, Renderer, create_renderer
from transformers import AutoTokenizer


class NaiveGateway:
    def __init__(self, renderer: Renderer, engine: str, client: aiohttp.ClientSession) -> None:
        self._renderer, self._engine, self._client = renderer, engine, client
        self._stored: dict[str, bytes] = {}

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        ids = self._renderer.render_ids(body["messages"], add_generation_prompt=True)
        stream = None
        if body.get("stream"):
            stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await stream.prepare(request)
        output: list[int] = []
        logprobs: list[float] = []
        asked = {"model": "fake", "prompt": ids, "max_tokens": 4096, "stream": True, "return_token_ids": True}
        async with self._client.post(f"{self._engine}/v1/completions", json=asked) as answer:
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                choice = json.loads(line[6:])["choices"][0]
                assert choice["prompt_token_ids"] in (None, ids)
                output += choice["token_ids"]
                logprobs += choice["logprobs"]["token_logprobs"]
                if stream is not None and choice["token_ids"]:
                    text = self._renderer.parse_response(choice["token_ids"]).content
                    await stream.write(_event({"delta": {"role": "assistant", "content": text}}))
        content = self._renderer.parse_response(output).content
        session = {"messages": body["messages"], "ids": ids + output, "logprobs": logprobs, "num_prompt": len(ids)}
        self._stored[request.match_info["session"]] = pickle.dumps(session)
        if stream is None:
            message = {"role": "assistant", "content": content}
            return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
        await stream.write(_event({"delta": {}, "finish_reason": "stop"}) + b"data: [DONE]\n\n")
        return stream


def _event(choice: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "finish_reason": None, **choice}]}).encode() + b"\n\n"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a folder with a tokenizer")
    parser.add_argument("--engine", required=True, help="the engine's address")
    args = parser.parse_args()
    renderer = create_renderer(AutoTokenizer.from_pretrained(args.model), Qwen3RendererConfig())
    async with aiohttp.ClientSession(read_bufsize=2**24) as client:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/{session}/v1/chat/completions", NaiveGateway(renderer, args.engine, client).chat)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
