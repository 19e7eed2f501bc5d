"""The life of a turn: prepared, generated, committed; whoever waits for it learns of the commit and not before."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stenograph.config import SamplingConfig
from stenograph.engines.base import Chunk, Engine, Generate
from stenograph.errors import EngineError, EngineUnavailable, TraceError, boundary
from stenograph.gateway.sampling import resolve
from stenograph.gateway.sessions import Session
from stenograph.rendering.base import Delta, Rendering
from stenograph.traces.store import TraceStore
from stenograph.traces.tree import Match
from stenograph.types import Conversation, EndedBy, FinishReason, Ids, Message, Reply, Sampling, Turn

Show = Callable[[Delta], None]


@dataclass(frozen=True, slots=True)
class Committed:
    """A turn that is in the record (or, untraced, that needs none)."""

    turn: Turn
    num_prompt: int


@dataclass(frozen=True, slots=True)
class _Prepared:
    parent: str | None
    messages: tuple[Message, ...]  # those that the parent does not know
    context_ids: Ids
    prompt_ids: Ids
    sampling: Sampling
    notes: tuple[str, ...]


class Turns:
    """Answers conversations: renders them, has them sampled, records what came."""

    def __init__(self, engine: Engine, rendering: Rendering, store: TraceStore, sampling: SamplingConfig) -> None:
        self._engine = engine
        self.rendering = rendering
        self._store = store
        self._sampling = sampling

    async def take(
        self, session: Session, conversation: Conversation, asked: Mapping[str, Any], show: Show
    ) -> Committed:
        """Run one turn to its commit. `show` gets text that the agent may see on the way.

        Raises RequestError, EngineError or TraceError; nothing is recorded then.
        """
        started_s, clock = time.time(), time.monotonic()
        prepared = self._prepare(session, conversation, asked)
        output = _Output(self.rendering, prepared.prompt_ids, conversation, prepared.sampling.stop, show)
        request = Generate(
            ids=prepared.prompt_ids,
            sampling=prepared.sampling,
            session=session.id,
            stop_token_ids=self.rendering.stop_token_ids,
            last_message=conversation.messages[-1].content,
        )
        async with aclosing(_checked(self._engine.generate(request), prepared.sampling)) as chunks:
            async for chunk in chunks:
                if output.take(chunk):
                    break
        reply, ended_by, noticed = output.finish(self.rendering)
        turn = Turn(
            id="turn_" + secrets.token_hex(8),
            context_ids=prepared.context_ids,
            output_ids=output.ids,
            rollout_logprobs=output.logprobs,
            versions=tuple(output.versions),
            finish_reason=output.finish_reason,
            ended_by=ended_by,
            sampling=prepared.sampling,
            logprobs_mode=self._engine.capabilities.logprobs_mode,
            messages=prepared.messages,
            tools=conversation.tools,
            reply=_mint_call_ids(reply),
            notes=prepared.notes + noticed,
            started_s=started_s,
            seconds=time.monotonic() - clock,
        )
        if session.traced:
            with boundary(TraceError, "record the turn"):
                self._store.commit(session.id, prepared.parent, turn)
        return Committed(turn, len(prepared.prompt_ids))

    def _prepare(self, session: Session, conversation: Conversation, asked: Mapping[str, Any]) -> _Prepared:
        """Continue the deepest recorded turn where its ids can be kept, else render from the start: a fork."""
        match = self._store.tree(session.id).match(conversation) if session.traced else None
        parent, messages = None, conversation.messages
        if match is None:
            context_ids = prompt_ids = self.rendering.render(conversation)
        else:
            recorded = self._store.tree(session.id).path_ids(match.turn)
            context_ids, prompt_ids = self._continue(session, conversation, match, recorded)
            if len(context_ids) < len(prompt_ids):
                parent, messages = match.turn, messages[match.num_known :]
        sampling, notes = resolve(asked, self._sampling, self._engine.capabilities, len(prompt_ids))
        return _Prepared(parent, messages, context_ids, prompt_ids, sampling, notes)

    def _continue(self, session: Session, conversation: Conversation, match: Match, recorded: Ids) -> tuple[Ids, Ids]:
        """What comes after `recorded`, and the whole prompt; both are the whole where it cannot be continued."""
        output_ids = self._store.tree(session.id).turns[match.turn].output_ids
        split = len(recorded) - len(output_ids)
        context_ids = self.rendering.extend(conversation, match.num_known, recorded[:split], output_ids)
        if context_ids is not None:
            return context_ids, np.concatenate([recorded, context_ids])
        rendered = self.rendering.render(conversation)
        # The template was free to rewrite what was said; where it did not, the recorded branch goes on all the same.
        if len(rendered) > len(recorded) and np.array_equal(rendered[: len(recorded)], recorded):
            return rendered[len(recorded) :], rendered
        return rendered, rendered


class _Output:
    """What the engine has sampled so far, and what of it the agent may see."""

    def __init__(
        self, rendering: Rendering, prompt_ids: Ids, conversation: Conversation, stop: tuple[str, ...], show: Show
    ) -> None:
        self._parser = rendering.stream(prompt_ids, conversation)
        self._stop = _StopStrings(stop)
        self._show = show
        self._prompt_ids, self._conversation = prompt_ids, conversation
        self._ids: list[Ids] = []
        self._logprobs: list[np.ndarray] = []
        self._num_ids = 0
        self._content = self._reasoning = ""
        self.versions: list[tuple[int, int]] = []
        self.finish_reason: FinishReason = "stop"

    def take(self, chunk: Chunk) -> bool:
        """Add a chunk; True when a stop string ends the turn here."""
        if len(chunk.ids):
            if not self.versions or self.versions[-1][1] != chunk.version:
                self.versions.append((self._num_ids, chunk.version))
            self._ids.append(chunk.ids)
            self._logprobs.append(chunk.logprobs)
            self._num_ids += len(chunk.ids)
            self._emit(self._parser.feed(chunk.ids))
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
        return self._stop.found

    def finish(self, rendering: Rendering) -> tuple[Reply, EndedBy, tuple[str, ...]]:
        """The reply, how it ended, and notes. What was shown stands: the record says what the agent saw."""
        if not self._stop.found:
            self._emit(self._parser.finish())
        if not self._stop.found:
            self._emit(Delta(content=self._stop.release()), filtered=True)
        if self._stop.found:
            self.finish_reason = "stop"
            return Reply(self._content, self._reasoning), "stop", ()
        reply = rendering.parse(self.ids, self._prompt_ids, self._conversation)
        ended_by: EndedBy = "eos" if self.finish_reason == "stop" else self.finish_reason
        if (reply.content, reply.reasoning) == (self._content, self._reasoning):
            return reply, ended_by, ()
        shown = replace(reply, content=self._content, reasoning=self._reasoning)
        return shown, ended_by, ("parser_disagrees",)

    @property
    def ids(self) -> Ids:
        return np.concatenate(self._ids).astype(np.int32, copy=False) if self._ids else np.empty(0, np.int32)

    @property
    def logprobs(self) -> np.ndarray:
        joined = np.concatenate(self._logprobs) if self._logprobs else np.empty(0)
        return joined.astype(np.float32, copy=False)

    def _emit(self, delta: Delta, *, filtered: bool = False) -> None:
        content = delta.content if filtered else self._stop.feed(delta.content)
        self._content += content
        self._reasoning += delta.reasoning
        if content or delta.reasoning:
            self._show(Delta(content, delta.reasoning))


class _StopStrings:
    """Cuts visible text at the first stop string; holds back what may still become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        if not self._stops:
            return text
        text = self._held + text
        cut = min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=-1)
        if cut >= 0:
            self.found, self._held = True, ""
            return text[:cut]
        held = max(
            (n for stop in self._stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])),
            default=0,
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def release(self) -> str:
        text, self._held = self._held, ""
        return text


async def _checked(chunks: AsyncGenerator[Chunk, None], sampling: Sampling) -> AsyncGenerator[Chunk, None]:
    """Pass chunks on while they are a sound answer. Raises EngineError for one that could not be recorded truly."""
    num_ids, finished = 0, False
    async with aclosing(chunks) as source:
        async for chunk in source:
            num_ids += len(chunk.ids)
            if len(chunk.ids) != len(chunk.logprobs):
                told = f"{len(chunk.logprobs)} logprobs for {len(chunk.ids)} tokens; start the engine with logprobs on"
                raise EngineError(f"the engine sent {told}")
            if not np.isfinite(chunk.logprobs).all():
                raise EngineError("the engine sent a logprob that is no number; is the temperature too close to 0?")
            if num_ids > sampling.max_tokens:
                raise EngineError(f"the engine sent {num_ids} tokens, {sampling.max_tokens} were asked")
            if chunk.finish_reason == "abort":
                raise EngineUnavailable("the engine aborted the generation; try again", retry_after_s=1)
            yield chunk
            if chunk.finish_reason is not None:
                finished = True
                break
    if not finished:
        raise EngineError(f"the engine's stream ended after {num_ids} tokens without a finish reason")


def _mint_call_ids(reply: Reply) -> Reply:
    calls = tuple(replace(call, id="call_" + secrets.token_hex(12)) for call in reply.tool_calls)
    return replace(reply, tool_calls=calls)
