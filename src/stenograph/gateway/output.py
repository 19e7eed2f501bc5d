"""What an engine has sampled of one turn, and what of it the agent may see: what was shown stands."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np

from stenograph.engines.base import Chunk
from stenograph.errors import EngineError, EngineUnavailable, boundary
from stenograph.rendering.base import Delta, Rendering
from stenograph.traces.arguments import is_object
from stenograph.types import Conversation, EndedBy, FinishReason, Ids, Message, Reply, Sampling, Turn


class Aborted(EngineUnavailable):
    """The engine gave the generation up."""

    def __init__(self) -> None:
        super().__init__("the engine aborted the generation; try again", retry_after_s=1)


class Unsound(EngineError):
    """The engine sent what could not be recorded truly; `num_tokens` of it were sampled all the same."""

    def __init__(self, told: str, num_tokens: int) -> None:
        super().__init__(f"the engine sent {told}")
        self.num_tokens = num_tokens


@dataclass(frozen=True, slots=True)
class Finished:
    """How a turn ended. `shown` is `reply` less what the agent had begun itself."""

    reply: Reply
    shown: Reply
    finish_reason: FinishReason
    ended_by: EndedBy
    notes: tuple[str, ...]


class Output:
    """Collects one turn's chunks. `begun` is the reply's beginning where the agent wrote it, `begun_ids` its ids."""

    def __init__(
        self,
        rendering: Rendering,
        prompt_ids: Ids,
        conversation: Conversation,
        sampling: Sampling,
        show: Callable[[Delta], None],
        begun: Message | None = None,
        begun_ids: Ids | None = None,
    ) -> None:
        self._parser = rendering.stream(prompt_ids, conversation)
        self.sampling = sampling
        self._stop = _StopStrings(sampling.stop)
        self._show = show
        self._begun = begun
        # Prefill and output are read as one text, so that white space between them survives. What a parser makes of
        # the prefill need not be the text that it is: there may be markers in it.
        read = Reply() if begun_ids is None else rendering.parse(begun_ids, prompt_ids, conversation)
        spelled = begun is not None and read.content == begun.content.strip()
        self._skip_content = _Skip(begun.content.lstrip() if begun is not None and spelled else read.content)
        self._skip_reasoning = _Skip(read.reasoning)
        self._ids, self._logprobs = array("i"), array("f")  # a chunk's own arrays take far more than what is in them
        self._experts: list[np.ndarray] = []
        self._content = self._reasoning = ""
        self._finish_reason: FinishReason | None = None
        self.num_tokens = 0
        self.num_reasoning = 0
        self.versions: list[tuple[int, int]] = []
        if begun_ids is not None:
            self._emit(self._parser.feed(begun_ids))

    def take(self, chunk: Chunk) -> bool:
        """Add a chunk; True when a stop string ends the turn here."""
        if len(chunk.ids):
            if not self.versions or self.versions[-1][1] != chunk.version:
                self.versions.append((self.num_tokens, chunk.version))
            self._ids.frombytes(chunk.ids.astype(np.int32, copy=False).tobytes())
            self._logprobs.frombytes(chunk.logprobs.astype(np.float32, copy=False).tobytes())
            if chunk.experts is not None:
                self._experts.append(chunk.experts)
            self.num_tokens += len(chunk.ids)
            self._emit(self._parser.feed(chunk.ids))
        if chunk.finish_reason is not None:
            self._finish_reason = chunk.finish_reason
        return self._stop.found is not None

    def again(self, turn: Turn) -> Finished:
        """Take what a turn sampled, token by token, and finish."""
        for n in range(len(turn.output_ids)):
            if self.take(Chunk(turn.output_ids[n : n + 1], turn.rollout_logprobs[n : n + 1], 0)):
                break
        self._finish_reason = turn.finish_reason
        return self.finish()

    def finish(self) -> Finished:
        """Show what was held back and is text, and say how the turn ended."""
        if self._stop.found is None:
            self._emit(self._parser.finish())
        if self._stop.found is None:
            self._emit_text(self._stop.release())
        if self._stop.found is not None:
            shown = Reply(self._content, self._reasoning)
            return Finished(self._whole(shown), shown, "stop", "stop", ())
        assert self._finish_reason is not None  # nothing becomes a turn that its engine did not end
        reply = self._parser.reply
        shown = replace(reply, content=self._content, reasoning=self._reasoning)
        content, reasoning = self._skip_content.taken + self._content, self._skip_reasoning.taken + self._reasoning
        same = (content.strip(), reasoning.strip()) == (reply.content, reply.reasoning)
        notes = () if same else ("parser_disagrees",)
        notes += ("malformed_call",) if reply.num_malformed_calls else ()
        notes += ("malformed_arguments",) if any(not is_object(call.arguments) for call in reply.tool_calls) else ()
        ended_by: EndedBy = "eos" if self._finish_reason == "stop" else self._finish_reason
        return Finished(self._whole(shown), shown, self._finish_reason, ended_by, notes)

    @property
    def stopped_by(self) -> str | None:
        return self._stop.found

    @property
    def ids(self) -> Ids:
        return np.array(self._ids, np.int32)

    @property
    def logprobs(self) -> np.ndarray:
        return np.array(self._logprobs, np.float32)

    @property
    def experts(self) -> np.ndarray | None:
        """In the smallest type that holds them: there are as many as layers times experts for each token."""
        if not self._experts:
            return None
        experts = np.concatenate(self._experts)
        low, high = (int(experts.min()), int(experts.max())) if experts.size else (0, 0)
        types = (np.uint8, np.uint16, np.int32)
        return experts.astype(next(one for one in types if np.iinfo(one).min <= low and high <= np.iinfo(one).max))

    def _whole(self, shown: Reply) -> Reply:
        """The message as it comes back: with what the agent began, as the agent wrote it."""
        if self._begun is None:
            return shown
        content, reasoning = self._begun.content.lstrip(), self._begun.reasoning
        return replace(shown, content=content + shown.content, reasoning=reasoning + shown.reasoning)

    def _emit(self, delta: Delta) -> None:
        reasoning = self._skip_reasoning.cut(delta.reasoning)
        if reasoning:
            self._reasoning += reasoning
            self.num_reasoning = self.num_tokens
            self._show(Delta(reasoning=reasoning))
        self._emit_text(self._stop.feed(self._skip_content.cut(delta.content)))

    def _emit_text(self, content: str) -> None:
        if content:
            self._content += content
            self._show(Delta(content))


class _Skip:
    """Takes a known beginning off a text that arrives in pieces, as far as it is there; the rest is the model's."""

    def __init__(self, text: str) -> None:
        self._left = text
        self.taken = ""

    def cut(self, piece: str) -> str:
        if not self._left:
            return piece
        pairs = zip(self._left, piece, strict=False)
        same = next((i for i, (known, came) in enumerate(pairs) if known != came), min(len(self._left), len(piece)))
        self.taken += piece[:same]
        self._left = self._left[same:] if same == len(piece) else ""
        return piece[same:]


class _StopStrings:
    """Cuts visible text at the first stop string; holds back what may still become one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str) -> str:
        if not self._stops or not text:
            return text
        text = self._held + text
        cut, found = min(((at, stop) for stop in self._stops if (at := text.find(stop)) >= 0), default=(-1, None))
        if found is not None:
            self.found, self._held = found, ""
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


async def checked(
    chunks: AsyncGenerator[Chunk, None], max_tokens: int, wants_experts: bool
) -> AsyncGenerator[Chunk, None]:
    """Pass chunks on while they are a sound answer. Raises EngineError for one that could not be recorded truly.

    Whatever else an engine raises is an EngineError too, also a cancellation that nobody here asked for.
    """
    num_ids = 0
    finish_reason: FinishReason | None = None
    try:
        with boundary(EngineError, "sample"):
            async with aclosing(chunks) as source:
                async for chunk in source:
                    num_ids += len(chunk.ids)
                    _check(chunk, num_ids, max_tokens, wants_experts)
                    yield chunk
                    finish_reason = chunk.finish_reason
                    if finish_reason is not None:
                        break
    except asyncio.CancelledError as e:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise EngineError(f"the engine cancelled the generation after {num_ids} tokens") from e
    if finish_reason is None:
        raise EngineError(f"the engine's stream ended after {num_ids} tokens without a finish reason")
    if finish_reason == "abort":  # after what was sampled until then was passed on
        raise Aborted


def _check(chunk: Chunk, num_ids: int, max_tokens: int, wants_experts: bool) -> None:
    num_new = len(chunk.ids)
    num_rows = 0 if chunk.experts is None else len(chunk.experts)
    begins = num_ids == num_new  # the first tokens may come with rows of the prompt
    if num_new != len(chunk.logprobs):
        told = f"{len(chunk.logprobs)} logprobs for {num_new} tokens; start the engine with logprobs on"
    elif not np.isfinite(chunk.logprobs).all():
        told = "a logprob that is no number; is the temperature too close to 0?"
    elif num_ids > max_tokens:
        told = f"{num_ids} tokens, {max_tokens} were asked"
    elif wants_experts and (num_rows < num_new or (num_rows > num_new and not begins)):
        told = f"{num_rows} rows of routed experts for {num_new} tokens; start the engine so that it returns them"
        told += ", or set engine.experts = false"
    else:
        return
    raise Unsound(told, num_new)
