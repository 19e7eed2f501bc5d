"""vLLM's own server as an engine: every prompt id that it echoes and every token that it sends is checked."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import aiohttp
import numpy as np
import orjson

from stenograph.config import EngineConfig
from stenograph.engines.base import Capabilities, Chunk, Generate, PauseMode, WeightSource
from stenograph.engines.http import CONNECT_TIMEOUT_S, HEADERS, KEEP_ALIVE_S, answer, ask, quoted, read_json
from stenograph.engines.vllm_events import Reader, read_events, read_tokens
from stenograph.errors import ContextOverflow, EngineError, EngineUnavailable

_PAUSE_MODES: dict[PauseMode, str] = {"finish": "wait", "abort": "abort", "keep": "keep"}  # in vLLM's words
_DRAIN_TIMEOUT_S = 0.05


class VllmEngine:
    """Generates by `POST /v1/completions`, from ids to ids.

    `rollout_logprobs` are what `engine.logprobs_mode` says the server was started with. Its weights are those that it
    was started with, policy version 0. `pause`, `resume`, `sleep` and `wake` are addresses of its development mode.
    """

    def __init__(self, server: str, model: str, capabilities: Capabilities, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.model = model  # as the server calls it
        self.capabilities = capabilities
        self._session = session
        self._open: set[aiohttp.ClientResponse] = set()

    @classmethod
    async def connect(cls, config: EngineConfig) -> VllmEngine:
        """Ask the server what it serves, on the event loop that is to generate. Raises EngineError."""
        assert config.url is not None  # the config's validator saw to it
        server = config.url.removesuffix("/v1")
        key = config.api_key
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_TIMEOUT_S),  # a turn takes as long as it takes
            read_bufsize=2**18,
            headers=HEADERS | ({"authorization": f"Bearer {key.get_secret_value()}"} if key is not None else {}),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        try:
            model, length = _served(await ask(session, "GET", f"{server}/v1/models"))
            lengths = [n for n in (config.context_length, length) if n is not None]
            if not lengths:
                raise EngineError(f"{server} does not tell its max_model_len; set engine.context_length")
            capabilities = Capabilities(
                context_length=min(lengths),
                logprobs_mode=config.logprobs_mode,
                constrained=await _knows_structured_outputs(session, server),
                seeded=True,
            )
        except BaseException:
            await session.close()
            raise
        return cls(server, model, capabilities, session)

    async def is_paused(self) -> bool:
        """Asks the server. One that has no such address, or does not answer, is not known to be paused."""
        try:
            told = read_json(await ask(self._session, "GET", f"{self.server}/is_paused"))
        except EngineError:
            return False
        return isinstance(told, dict) and told.get("is_paused") is True

    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        """Raises ContextOverflow, EngineUnavailable where nothing was generated, EngineError for any answer unsound."""
        self._check_open()
        prompt = orjson.dumps(np.ascontiguousarray(request.ids), option=orjson.OPT_SERIALIZE_NUMPY)
        reader = Reader(prompt, request.ids)
        async with self._answered(self._body(request, prompt)) as response:
            # What came with the end of a stop string is none of the turn.
            apart = bool(request.sampling.stop)
            async with aclosing(read_events(response.content.iter_any(), apart=apart)) as together:
                async for events in together:
                    for chunk in reader.read(events):
                        if chunk.finish_reason is not None:  # the turn is whole, whatever becomes of the connection
                            await _drain(response)
                            yield chunk
                            return
                        yield chunk
                    if reader.done:
                        break
        if not reader.echoed:  # so vLLM answers a request that was aborted before its first token
            raise EngineUnavailable("the engine ended its stream before the first token; try again", retry_after_s=1)
        raise EngineError(f"the engine's stream ended after {reader.num_ids} tokens without a finish reason")

    async def tokenize(self, text: str) -> list[int] | None:
        """The server's own ids of `text`, special tokens in it recognised; None where it has no /tokenize."""
        body = orjson.dumps({"model": self.model, "prompt": text, "add_special_tokens": False})
        try:
            said = await ask(self._session, "POST", f"{self.server}/tokenize", body)
        except EngineError as e:
            if e.status == 404:
                return None
            raise
        return read_tokens(said)

    async def pause(self, mode: PauseMode) -> None:
        await self._control(f"/pause?mode={_PAUSE_MODES[mode]}")

    async def resume(self) -> None:
        await self._control("/resume")

    async def update_weights(self, source: WeightSource, version: int) -> None:
        """A vLLM server cannot be given new weights: it serves those that it was started with."""
        raise EngineError(
            f"the weights of the vLLM server at {self.server} cannot be updated; "
            'train with engine.kind = "local", or start a server anew on a checkpoint'
        )

    async def random_state(self) -> bytes:
        """The server keeps its own to itself."""
        return b""

    async def restore_random_state(self, state: bytes) -> None:
        if state:
            raise EngineError(f"the random state of the vLLM server at {self.server} cannot be set")

    async def sleep(self) -> None:
        """Let requests in flight end, then move the weights to the host's memory and drop the cache."""
        await self.pause("finish")
        await self._control("/sleep?level=1&mode=wait")

    async def wake(self) -> None:
        """Undo `sleep`, and resume."""
        await self._control("/wake_up")
        await self.resume()

    async def health(self) -> None:
        self._check_open()
        try:
            await ask(self._session, "GET", f"{self.server}/health")
        except EngineUnavailable:
            raise
        except EngineError as e:
            raise EngineUnavailable(str(e)) from e

    async def aclose(self) -> None:
        for response in self._open:  # closing the session alone would leave their readers waiting
            response.close()
        await self._session.close()

    def _check_open(self) -> None:
        if self._session.closed:
            raise EngineUnavailable("the engine is closed")

    def _body(self, request: Generate, prompt: bytes) -> bytes:
        """What is posted; `prompt` is the JSON of the request's ids.

        Every sampling value is said: vLLM takes what is left out from the model's own generation config.
        `stop` is not: the gateway cuts stop strings itself, on the text that the agent sees.
        """
        room = self.capabilities.context_length - len(request.ids)
        if room < 1:
            raise ContextOverflow(len(request.ids), self.capabilities.context_length)
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": orjson.Fragment(prompt),
            "max_tokens": min(sampling.max_tokens, room),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(request.stop_token_ids),
            "logprobs": 0,  # the sampled token's alone
            "return_token_ids": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "stream": True,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if request.grammar is not None:
            body["structured_outputs"] = {"json": dict(request.grammar)}
        return orjson.dumps(body)

    @asynccontextmanager
    async def _answered(self, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        async with answer(self._session, "POST", f"{self.server}/v1/completions", body) as response:
            self._open.add(response)
            try:
                yield response
            finally:
                self._open.discard(response)

    async def _control(self, path: str) -> None:
        self._check_open()
        try:
            async with answer(self._session, "POST", self.server + path):
                pass
        except EngineError as e:
            if e.status != 404:
                raise
            needs = "VLLM_SERVER_DEV_MODE=1 in its environment, and for sleep with --enable-sleep-mode"
            raise EngineError(f"{self.server} has no {path.partition('?')[0]}; start vLLM with {needs}") from e


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read what follows the last token, so that the connection can serve again; where that takes long, it closes."""
    with suppress(aiohttp.ClientError, OSError):
        async with asyncio.timeout(_DRAIN_TIMEOUT_S):
            async for _ in response.content.iter_any():
                pass


async def _knows_structured_outputs(session: aiohttp.ClientSession, server: str) -> bool:
    """Whether a schema is kept to: servers before 0.11 know another field, and ignore this one without a word."""
    try:
        answer = read_json(await ask(session, "GET", f"{server}/version"))
    except EngineError:
        return False
    version = re.match(r"(\d+)\.(\d+)", str(answer.get("version"))) if isinstance(answer, dict) else None
    return version is not None and (int(version[1]), int(version[2])) >= (0, 11)


def _served(data: bytes) -> tuple[str, int | None]:
    """The name that the server gives its model, and its longest context where it tells; adapters have a parent."""
    match read_json(data):
        case {"data": list() as cards}:
            for card in cards:
                match card:
                    case {"id": str(name)} if card.get("parent") is None:
                        length = card.get("max_model_len")
                        return name, length if type(length) is int and length > 0 else None
    raise EngineError(f"the engine's /v1/models names no model: {quoted(data)}; is it a vLLM server?")
