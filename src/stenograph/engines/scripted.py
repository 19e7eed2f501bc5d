"""The public fake: a script instead of a model, true to the protocol down to its faults."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from stenograph.engines.base import Capabilities, Chunk, Generate, PauseMode, WeightSource
from stenograph.errors import ConfigError, ContextOverflow, EngineError, EngineUnavailable, boundary
from stenograph.rendering.base import Rendering
from stenograph.types import FinishReason, Ids, Logprobs, Reply, ToolCall

_FAULTS = ("error", "refuse", "overflow", "hang", "cut", "garbage", "counts", "slow:", "pace:")
_QUOTED = 80  # characters of a message in an error
_FIELDS = {"content", "reasoning", "tool_calls", "text", "finish_reason", "fault", "when", "once"}


@dataclass(frozen=True, slots=True)
class Line:
    """One assistant turn of a script, in ids."""

    ids: Ids
    finish_reason: FinishReason = "stop"
    fault: str | None = None
    when: str | None = None  # serves every request whose last message contains this
    once: bool = False


def load_script(path: Path, rendering: Rendering) -> list[Line]:
    """Read a JSONL script. Raises ConfigError naming the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"engine.script: cannot read {path}: {e}; give a JSONL file") from e
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"engine.script: {path} is empty; write one assistant turn a line")
    return [_read_line(line, f"{path}:{n}", rendering) for n, line in lines]


class ScriptedEngine:
    """Answers by script: one cursor per session; lines with `when` stand outside of the order."""

    def __init__(self, script: list[Line], *, context_length: int = 1_000_000, seed: int = 0) -> None:
        self.capabilities = Capabilities(context_length=context_length, logprobs_mode="raw", seeded=False)
        self._ordered = [line for line in script if line.when is None]
        self._triggered = [line for line in script if line.when is not None]
        self._cursors: defaultdict[str, int] = defaultdict(int)
        self._used: set[tuple[str, int]] = set()
        self._seed = seed
        self._version = 0
        self._running = asyncio.Event()
        self._running.set()
        self._thawed = asyncio.Event()  # requests in flight go on, unless they were paused to be kept
        self._thawed.set()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._aborted = asyncio.Event()

    @property
    def server(self) -> None:
        return None

    async def is_paused(self) -> bool:
        return not self._running.is_set()

    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        await self._running.wait()
        self._in_flight += 1
        self._idle.clear()
        try:
            async with aclosing(self._answer(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def pause(self, mode: PauseMode) -> None:
        self._running.clear()
        if mode == "abort":
            self._aborted.set()
        if mode == "keep":
            self._thawed.clear()
        else:
            self._thawed.set()
            await self._idle.wait()

    async def resume(self) -> None:
        self._aborted.clear()
        self._thawed.set()
        self._running.set()

    async def update_weights(self, source: WeightSource, version: int) -> None:
        self._version = version

    async def random_state(self) -> bytes:
        """Nothing is drawn: answers follow from the script, and log-probabilities from the request."""
        return b""

    async def restore_random_state(self, state: bytes) -> None:
        if state:
            raise EngineError("a script draws nothing, and has no random state to go on from")

    async def sleep(self) -> None:
        """Nothing to give back."""

    async def wake(self) -> None:
        """Nothing was given back."""

    async def health(self) -> None:
        """A script can always be played."""

    async def aclose(self) -> None:
        self._aborted.set()
        self._thawed.set()
        self._running.set()

    def _next(self, request: Generate) -> Line:
        messages = request.conversation.messages
        last_message = messages[-1].content if messages else ""
        for n, line in enumerate(self._triggered):
            if line.when is not None and line.when in last_message:
                if not line.once:
                    return line
                if (request.session, n) not in self._used:
                    self._used.add((request.session, n))
                    return line
        cursor = self._cursors[request.session]
        if cursor >= len(self._ordered):
            raise EngineError(f"script exhausted: {self._why_exhausted(last_message)}")
        self._cursors[request.session] += 1
        return self._ordered[cursor]

    def _why_exhausted(self, last_message: str) -> str:
        reasons = [f"all {len(self._ordered)} turns are used"] if self._ordered or not self._triggered else []
        if self._triggered:
            begin = last_message if len(last_message) <= _QUOTED else last_message[:_QUOTED] + "..."
            reasons.append(f"no `when` line matches the last message, {begin!r}")
        return f"{', and '.join(reasons)}; add lines to the script"

    async def _answer(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        line = self._next(request)
        fault, _, seconds = (line.fault or "").partition(":")
        await self._fail_early(fault, request)
        if fault == "slow":
            await asyncio.sleep(float(seconds))
        ids, finish_reason = line.ids, line.finish_reason
        if len(ids) > request.sampling.max_tokens:
            ids, finish_reason = ids[: request.sampling.max_tokens], "length"
        logprobs = self._logprobs(request, ids)
        num_ids = len(ids) // 2 if fault == "cut" else len(ids)
        for i in range(num_ids):
            if self._aborted.is_set():
                yield Chunk(ids[:0], logprobs[:0], self._version, "abort")
                return
            await asyncio.sleep(float(seconds) if fault == "pace" else 0)
            await self._thawed.wait()
            last = i == len(ids) - 1
            short = last and fault == "counts"
            yield Chunk(
                ids[i : i + 1],
                logprobs[i:i] if short else logprobs[i : i + 1],
                self._version,
                finish_reason if last else None,
            )
        if len(ids) == 0:
            yield Chunk(ids, logprobs, self._version, "abort" if self._aborted.is_set() else finish_reason)

    async def _fail_early(self, fault: str, request: Generate) -> None:
        match fault:
            case "error":
                raise EngineError("scripted fault: error")
            case "refuse":
                raise EngineUnavailable("scripted fault: the connection was refused")
            case "overflow":
                raise ContextOverflow(len(request.ids), len(request.ids) - 1)
            case "garbage":
                raise EngineError("scripted fault: the engine's answer cannot be read")
            case "hang":
                await self._aborted.wait()
            case _:
                return

    def _logprobs(self, request: Generate, ids: Ids) -> Logprobs:
        """Plausible, and the same for the same script, prompt length and output."""
        generator = np.random.default_rng((self._seed, len(request.ids), len(ids)))
        return -generator.exponential(0.5, len(ids)).astype(np.float32)


def _read_line(text: str, where: str, rendering: Rendering) -> Line:
    try:
        raw = orjson.loads(text)
    except orjson.JSONDecodeError as e:
        raise ConfigError(f"{where}: not JSON: {e}") from e
    if not isinstance(raw, dict) or (unknown := set(raw) - _FIELDS):
        named = f"unknown field {sorted(unknown)[0]!r}" if isinstance(raw, dict) else "not an object"  # type: ignore[possibly-undefined]
        raise ConfigError(f"{where}: {named}; known: {', '.join(sorted(_FIELDS))}")
    fault = raw.get("fault")
    if fault is not None and not (isinstance(fault, str) and _is_fault(fault)):
        raise ConfigError(f"{where}: fault {fault!r} is none of {', '.join(_FAULTS)} (slow:S, pace:S in seconds)")
    finish_reason = raw.get("finish_reason", "stop")
    if finish_reason not in ("stop", "length"):
        raise ConfigError(f'{where}: finish_reason must be "stop" or "length", got {finish_reason!r}')
    for name in ("content", "reasoning", "text", "when"):
        if not isinstance(raw.get(name) or "", str):
            raise ConfigError(f"{where}: {name} must be a text, got {raw[name]!r}")
    ids = rendering.encode_text(raw["text"]) if raw.get("text") is not None else _encode(raw, where, rendering)
    if finish_reason == "length" and len(ids) and int(ids[-1]) in rendering.stop_token_ids:
        ids = ids[:-1]
    return Line(ids, finish_reason, fault, raw.get("when"), bool(raw.get("once", False)))


def _is_fault(fault: str) -> bool:
    name, colon, seconds = fault.partition(":")
    if not colon:
        return fault in _FAULTS
    try:
        return name + ":" in _FAULTS and 0 <= float(seconds) < float("inf")
    except ValueError:
        return False


def _encode(raw: dict[str, Any], where: str, rendering: Rendering) -> Ids:
    try:
        calls = tuple(ToolCall("", call["name"], _spelled(call["arguments"])) for call in raw.get("tool_calls") or ())
    except (KeyError, TypeError) as e:
        raise ConfigError(f'{where}: tool_calls must be a list of {{"name", "arguments"}}: {e}') from e
    if not all(isinstance(call.name, str) for call in calls):
        raise ConfigError(f"{where}: tool_calls: every name must be a text")
    with boundary(ConfigError, f"write {where} as a turn of the model"):
        return rendering.encode_reply(Reply(raw.get("content") or "", raw.get("reasoning") or "", calls))


def _spelled(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
