"""A stand-in for vLLM's server, in a process of its own: its addresses, its JSON, its ways to fail; a script, no model.

Run it with `--script FILE`; it prints {"url"} when it listens. It tokenizes as the built-in tokenizer does. `--version`
makes it another vLLM, `--api-key` guards it as it guards vLLM, and `--without PATH` takes an address away.

FILE is JSONL, one answer a line, in the order of the requests; past the end: 500. All fields but `ids` are optional:

    ids             the sampled ids; cut at the request's max_tokens, which makes the finish "length"
    logprobs        one per id (NaN and null are sent as they stand)
    finish_reason   "stop"
    per_event       ids per event of the stream: 1
    delay_s         before the headers
    pace_s          before each event
    done_s          before what follows the last
    piece           bytes per write to the socket
    echo            what is echoed instead of the prompt: "missing", "short", "other", or a value
    fault           "hang"     nothing is ever answered
                    "status"   `status` with `headers` and `body` (a text, or JSON)
                    "reset"    the connection is reset after half of the events
                    "cut"      the connection ends after half of the events, without HTTP's last chunk
                    "close"    the answer ends after half of the events, as HTTP ends one
                    "error"    vLLM's error object after half of the events, then [DONE]
                    "data"     `data` (texts, one event each) after half of the events, then [DONE]
                    "counts"   the last event has a log-probability too few
                    "no_done"  the answer ends without [DONE]
                    "open"     after the finish nothing follows, nor does the answer end

The stand-in's own addresses: `POST /fake/script` {"lines", "loop"} replaces the script, forgets what was seen and
resumes; `GET /fake/seen` lists the requests: {"path", "query", "headers", "body", "end": "open"|"answered"|"left"}.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

Line = dict[str, Any]
PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
BYTES = (*PRINTABLE, *sorted(set(range(0x100)) - set(PRINTABLE)))  # by id: as byte-level tokenizers order them


class Server:
    def __init__(self, lines: list[Line], options: argparse.Namespace) -> None:
        self.model, self.max_model_len, self.version = options.model, options.max_model_len, options.version
        self.api_key, self.without = options.api_key, options.without
        self.play(lines, loop=False)

    def play(self, lines: list[Line], *, loop: bool) -> None:
        self.lines, self.loop, self.cursor = lines, loop, 0
        self.seen: list[dict[str, Any]] = []
        self.running, self.thawed, self.aborted = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.running.set()
        self.thawed.set()
        self.in_flight = 0
        self.sleeping = False

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**28, middlewares=[self.watch])
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_get("/version", lambda _: self.said({"version": self.version}))
        app.router.add_post("/v1/load_lora_adapter", lambda _: self.said({"status": "loaded"}))
        app.router.add_get("/health", self.health)
        app.router.add_post("/pause", self.pause)
        app.router.add_post("/resume", self.resume)
        app.router.add_get("/is_paused", lambda _: self.said({"is_paused": not self.running.is_set()}))
        app.router.add_post("/sleep", self.sleep)
        app.router.add_post("/wake_up", self.wake_up)
        app.router.add_post("/fake/script", self.script)
        app.router.add_get("/fake/seen", lambda _: self.said(self.seen))
        return app

    @web.middleware
    async def watch(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path.startswith("/fake/"):
            return await handler(request)
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        entry = {"path": request.path, "query": request.query_string, "headers": headers, "end": "left"}
        entry["body"] = json.loads(body) if body else None
        self.seen.append(entry)
        entry["end"] = "open"
        try:
            answer = self.barred(request) or await handler(request)
        except BaseException:  # cancelled: the client went away
            entry["end"] = "left"
            raise
        entry["end"] = "answered"
        return answer

    def barred(self, request: web.Request) -> web.Response | None:
        if request.path in self.without:
            return web.json_response({"detail": "Not Found"}, status=404)
        guarded = self.api_key is not None and request.path.startswith("/v1")
        if guarded and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return None

    async def said(self, body: Any, status: int = 200) -> web.Response:
        return web.json_response(body, status=status)

    async def models(self, request: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "created": 0, "owned_by": "vllm", "root": self.model}
        adapter = {**card, "id": "adapter", "parent": self.model}
        base = {**card, "parent": None, "max_model_len": self.max_model_len}
        return await self.said({"object": "list", "data": [adapter, base]})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if wrong := self.wrong_model(body):
            return await self.said(error(wrong, 404), 404)
        tokens = [BYTES.index(byte) for byte in body["prompt"].encode()]
        return await self.said({"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens})

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.sleeping else 200)

    async def pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            return await self.said({"error": f"unknown mode {mode}"}, 400)
        self.running.clear()
        if mode == "abort":
            self.aborted.set()
        if mode == "keep":
            self.thawed.clear()
        while mode != "keep" and self.in_flight:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        return await self.said({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        self.aborted.clear()
        self.thawed.set()
        self.running.set()
        return await self.said({"status": "resumed"})

    async def sleep(self, request: web.Request) -> web.Response:
        self.sleeping = True
        return web.Response()

    async def wake_up(self, request: web.Request) -> web.Response:
        self.sleeping = False
        return web.Response()

    async def script(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.play(body["lines"], loop=body.get("loop", False))
        return await self.said({"num_lines": len(self.lines)})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if wrong := self.wrong(body):
            status, message = wrong
            return await self.said(error(message, status), status)
        await self.running.wait()
        if self.cursor >= len(self.lines):
            return await self.said(error("script exhausted", 500), 500)
        line = self.lines[self.cursor]
        self.cursor = (self.cursor + 1) % len(self.lines) if self.loop else self.cursor + 1
        await asyncio.sleep(line.get("delay_s", 0))
        if line.get("fault") == "hang":
            await asyncio.Event().wait()
        if line.get("fault") == "status":
            said, headers = line.get("body", ""), line.get("headers", {})
            text = said if isinstance(said, str) else json.dumps(said)
            return web.Response(text=text, status=line["status"], headers=headers)
        self.in_flight += 1
        try:
            return await self.stream(request, body, line)
        finally:
            self.in_flight -= 1

    def wrong_model(self, body: Any) -> str | None:
        named = body.get("model", self.model)
        return f"The model `{named}` does not exist." if named != self.model else None

    def wrong(self, body: Any) -> tuple[int, str] | None:
        prompt, max_tokens = body.get("prompt"), body.get("max_tokens", 16)
        if wrong := self.wrong_model(body):
            return 404, wrong
        if not prompt or not all(type(id) is int and id >= 0 for id in prompt):
            return 400, "Either prompt or prompt_embeds must be provided and non-empty."
        if len(prompt) + max_tokens > self.max_model_len:
            return 400, f"This model's maximum context length is {self.max_model_len} tokens."
        if not body.get("stream"):
            return 400, "the stand-in only streams"
        return None

    async def stream(self, request: web.Request, body: dict[str, Any], line: Line) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        fault, piece = line.get("fault"), line.get("piece", 2**30)
        events = list(self.events(body, line))
        cut_at = (len(events) + 1) // 2 if fault in ("reset", "cut", "close", "error", "data") else len(events)

        async def send(data: str) -> None:
            event = f"data: {data}\n\n".encode()
            for at in range(0, len(event), piece):
                await response.write(event[at : at + piece])

        for event in events[:cut_at]:
            await asyncio.sleep(line.get("pace_s", 0))
            await self.thawed.wait()
            if self.aborted.is_set():  # what was sampled stands; the last event says that there will be no more
                await send(self.event(body, [], [], "abort", echo=None))
                break
            await send(event)
        await asyncio.sleep(line.get("done_s", 0))
        if fault == "open":
            await asyncio.Event().wait()
        transport = request.transport
        if fault in ("reset", "cut") and transport is not None:
            await asyncio.sleep(0.05)  # what was sent arrives first
            if fault == "reset":
                linger = struct.pack("ii", 1, 0)
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            transport.abort()
            return response
        if fault == "error":
            await send(json.dumps(error("EngineCore encountered an issue", 500)))
        for data in line.get("data", []):
            await send(data)
        if fault not in ("close", "no_done"):
            await send("[DONE]")
        await response.write_eof()
        return response

    def events(self, body: dict[str, Any], line: Line) -> Iterator[str]:
        ids, finish = line["ids"], line.get("finish_reason", "stop")
        logprobs = line.get("logprobs", [-0.125 * (1 + i % 8) for i in range(len(ids))])
        if len(ids) >= body["max_tokens"]:
            ids, logprobs, finish = ids[: body["max_tokens"]], logprobs[: body["max_tokens"]], "length"
        step = line.get("per_event", 1)
        for at in range(0, max(len(ids), 1), step):
            last = at + step >= len(ids)
            numbers = logprobs[at : at + step]
            if last and line.get("fault") == "counts":
                numbers = numbers[:-1]
            echo = echoed(body["prompt"], line.get("echo")) if at == 0 and body.get("return_token_ids") else None
            yield self.event(body, ids[at : at + step], numbers, finish if last else None, echo)

    def event(self, body: dict[str, Any], ids: list[int], logprobs: list[Any], finish: str | None, echo: Any) -> str:
        texts = [f"<{id}>" for id in ids]
        shown = {
            "text_offset": [0] * len(ids),
            "token_logprobs": logprobs,
            "tokens": texts,
            "top_logprobs": [{text: logprob} for text, logprob in zip(texts, logprobs, strict=False)],
        }
        choice = {"index": 0, "text": "".join(texts), "logprobs": shown if body.get("logprobs") is not None else None}
        choice |= {"finish_reason": finish, "stop_reason": None, "prompt_token_ids": echo}
        choice |= {"token_ids": ids if body.get("return_token_ids") else None}
        whole = {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": self.model, "choices": [choice]}
        return json.dumps(whole, separators=(",", ":"))


def echoed(prompt: list[int], echo: Any) -> Any:
    match echo:
        case None:
            return prompt
        case "missing":
            return None
        case "short":
            return prompt[:-1]
        case "other":
            return [*prompt[:-1], prompt[-1] + 1]
        case _:
            return echo


def error(message: str, status: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--script", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--max-model-len", type=int, default=200_000)
    parser.add_argument("--version", default="0.11.0")
    parser.add_argument("--api-key")
    parser.add_argument("--without", action="append", default=[], metavar="PATH")
    options = parser.parse_args()
    text = options.script.read_text() if options.script else ""
    server = Server([json.loads(line) for line in text.splitlines()], options)
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(json.dumps({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
