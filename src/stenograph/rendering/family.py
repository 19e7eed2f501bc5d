"""Model families of the `renderers` library: recorded ids are only ever continued, never rendered again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
from renderers import ParsedResponse, ParsedToolCall, Renderer, ToolCallParseStatus

from stenograph.errors import RequestError, boundary
from stenograph.rendering.arguments import raw_value
from stenograph.rendering.base import StreamParser
from stenograph.rendering.messages import message_dicts, tool_dicts
from stenograph.rendering.stream import BufferedStream
from stenograph.types import Conversation, Ids, Message, Reply, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# These read more of the prompt than what follows its last stop token: Harmony and Inkling look for the header of
# the message being written, Gemma 4 for an open tool response. A custom renderer may read anything.
_READ_WHOLE_PROMPT = frozenset({"gpt-oss", "inkling", "gemma4", "custom"})


class FamilyRendering:
    """`Rendering` over one hand-written renderer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, renderer: Renderer) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._name: str = renderer.config.name
        self._stop = tuple(renderer.get_stop_token_ids())

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stop

    def render(self, conversation: Conversation) -> Ids:
        with boundary(RequestError, f"render the messages as {self._name}"):
            messages: list[Any] = message_dicts(conversation)
            tools: Any = tool_dicts(conversation.tools)
            return _array(self._renderer.render_ids(messages, tools=tools, add_generation_prompt=True))

    def extend(self, conversation: Conversation, num_known: int, prompt_ids: Ids, output_ids: Ids) -> Ids | None:
        tail = self._tail(prompt_ids)
        output = output_ids.tolist()
        with boundary(RequestError, f"render the new messages as {self._name}"):
            messages: list[Any] = message_dicts(conversation, num_known)
            tools: Any = tool_dicts(conversation.tools)
            bridged = self._renderer.bridge_to_next_turn(tail, output, messages, tools=tools)
        if bridged is None:
            return None
        known = tail + output
        ids = bridged.token_ids
        # A bridge cuts what was sampled after an end token; then it does not continue what was recorded.
        return _array(ids[len(known) :]) if ids[: len(known)] == known else None

    def parse(self, output_ids: Ids, prompt_ids: Ids, conversation: Conversation) -> Reply:
        ids = output_ids.tolist()
        tools: Any = tool_dicts(conversation.tools)
        try:
            parsed = self._renderer.parse_response(ids, tools=tools, prompt_ids=self._tail(prompt_ids))
        except Exception:  # thirty parsers read what a model wrote at random: any failure of theirs means plain text
            return Reply(self._tokenizer.decode(self._until_stop(ids)).strip())
        return self._reply(self._until_stop(ids), parsed)

    def stream(self, prompt_ids: Ids, conversation: Conversation) -> StreamParser:
        return BufferedStream(lambda ids: self.parse(ids, prompt_ids, conversation))

    def decode(self, ids: Ids) -> str:
        return self._tokenizer.decode(ids.tolist())

    def encode_reply(self, reply: Reply) -> Ids:
        asked = Conversation((Message("user", "."),))
        answered = Conversation((*asked.messages, reply.message()))
        prompt = self.render(asked)
        messages: list[Any] = message_dicts(answered)
        ids = _array(self._renderer.render_ids(messages))
        num_shared = len(prompt)
        if not np.array_equal(ids[:num_shared], prompt):
            num_shared = int(np.argmin(ids[:num_shared] == prompt[: len(ids)]))
        ends = np.flatnonzero(np.isin(ids, self._stop))
        return ids[num_shared : int(ends[-1]) + 1 if len(ends) and ends[-1] >= num_shared else len(ids)]

    def encode_text(self, text: str) -> Ids:
        return _array(self._tokenizer.encode(text, add_special_tokens=False))

    def _tail(self, prompt_ids: Ids) -> list[int]:
        """What the family's parser may look at: from the last stop token on, so that a turn costs what is new in it."""
        if self._name in _READ_WHOLE_PROMPT:
            return prompt_ids.tolist()
        end, size = len(prompt_ids), 64
        while end > 0:
            start = max(0, end - size)
            hits = np.flatnonzero(np.isin(prompt_ids[start:end], self._stop))
            if len(hits):
                return prompt_ids[start + int(hits[-1]) :].tolist()
            end, size = start, size * 2
        return prompt_ids.tolist()

    def _until_stop(self, ids: list[int]) -> list[int]:
        return next((ids[:i] for i, token in enumerate(ids) if token in self._stop), ids)

    def _reply(self, ids: list[int], parsed: ParsedResponse) -> Reply:
        calls: list[ToolCall] = []
        content = parsed.content
        end = 0  # of the call before, in ids
        for attempt in parsed.tool_calls:
            call = _tool_call(attempt)
            if call is not None:
                calls.append(call)
            else:
                content = self._with_raw(content, ids, end, attempt)
            end = attempt.token_span[1] if attempt.token_span is not None else end
        return Reply(content.strip(), (parsed.reasoning_content or "").strip(), tuple(calls))

    def _with_raw(self, content: str, ids: list[int], end: int, attempt: ParsedToolCall) -> str:
        """`content` and then the text of a call that did not parse, with what stands between them."""
        if attempt.token_span is None:
            return f"{content}\n{attempt.raw}"
        start, stop = attempt.token_span
        before = self._tokenizer.decode(ids[end:start])
        if end == 0:  # the text before the first call is the content already, less the space after it
            before = before[len(before.rstrip()) :]
        return content + before + self._tokenizer.decode(ids[start:stop])


def _tool_call(attempt: ParsedToolCall) -> ToolCall | None:
    if attempt.status != ToolCallParseStatus.OK or not isinstance(attempt.name, str):
        return None
    raw = raw_value(attempt.raw, "arguments") if isinstance(attempt.raw, str) else None
    if raw is not None and _means(raw, attempt.arguments):
        return ToolCall("", attempt.name, raw)
    if isinstance(attempt.arguments, str):
        return ToolCall("", attempt.name, attempt.arguments)
    return ToolCall("", attempt.name, json.dumps(attempt.arguments or {}, ensure_ascii=False, separators=(",", ":")))


def _means(raw: str, arguments: object) -> bool:
    """Whether the sliced text is what the family's own parser read: a tag-style call may contain JSON of its own."""
    try:
        return json.loads(raw) == arguments
    except (ValueError, RecursionError):
        return False


def _array(ids: list[int]) -> Ids:
    return np.asarray(ids, dtype=np.int32)
