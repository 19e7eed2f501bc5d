"""Model families of the `renderers` library: recorded ids are only ever continued, never rendered again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from renderers import ParsedResponse, ParsedToolCall, Renderer, ToolCallParseStatus
from renderers.reasoning import prompt_ends_in_reasoning

from stenograph.errors import RequestError, boundary
from stenograph.rendering.arguments import compact, is_name, raw_arguments
from stenograph.rendering.base import StreamParser
from stenograph.rendering.detokenize import Detokenizer
from stenograph.rendering.formats import FORMATS, build_grammar
from stenograph.rendering.harmony import Harmony, HarmonyStream
from stenograph.rendering.messages import (
    ASK,
    begun_message,
    ends_reasoning,
    find_placement,
    message_dicts,
    opening,
    tool_dicts,
)
from stenograph.rendering.stream import BufferedStream, Grammar, MarkerStream, State
from stenograph.rendering.tokenizer import longest_token, plain_tokenizer
from stenograph.types import Conversation, Ids, Message, Reply, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# These read more of the prompt than what follows its last stop token: Harmony and Inkling look for the header of
# the message being written, Gemma 4 for an open tool response. A custom renderer may read anything.
_READ_WHOLE_PROMPT = frozenset({"gpt-oss", "inkling", "gemma4", "custom"})


class FamilyRendering:
    """`Rendering` over one hand-written renderer.

    `retaining` is the same one that keeps all reasoning: it bridges a new question where there is none to drop, which
    a renderer that keeps it for a tool cycle only refuses unseen.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, renderer: Renderer, retaining: Renderer | None, name: str
    ) -> None:
        self._tokenizer = plain_tokenizer(tokenizer)
        self._renderer = renderer
        self._retaining = retaining
        self._name = name
        self._format = FORMATS.get(name)
        self._stop = tuple(renderer.get_stop_token_ids())
        self._placement = find_placement(lambda messages: self._render_text(messages, generation=True))
        self._longest_token = longest_token(tokenizer)
        self._detokenizer = Detokenizer(tokenizer)
        self._grammar: Grammar | None = None
        self._harmony: Harmony | None = None
        if Detokenizer.supports(tokenizer):
            if name == "gpt-oss":
                self._harmony = Harmony.of(tokenizer, self._stop)
            elif self._format is not None:
                thinks = not self._format.by_option or self._thinks_by_option()
                self._grammar = build_grammar(self._format, tokenizer, self._stop, thinks=thinks)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stop

    @property
    def longest_token(self) -> int:
        return self._longest_token

    @property
    def extends_flat(self) -> bool:
        return self._name not in _READ_WHOLE_PROMPT

    def render(self, conversation: Conversation) -> Ids:
        with boundary(RequestError, f"render the messages as {self._name}"):
            messages = self._dicts(conversation)
            tools: Any = tool_dicts(conversation.tools)
            return _array(self._renderer.render_ids(messages, tools=tools, add_generation_prompt=True))

    def extend(self, conversation: Conversation, num_known: int, prompt_ids: Ids, output_ids: Ids) -> Ids | None:
        tail = self._tail(prompt_ids)
        known = tail + output_ids.tolist()
        start = self._turn_start(tail)
        renderer = self._renderer
        if self._retaining is not None and not ends_reasoning(conversation.messages, num_known, self._placement):
            renderer = self._retaining
        with boundary(RequestError, f"render the new messages as {self._name}"):
            messages = self._dicts(conversation, num_known)
            tools: Any = tool_dicts(conversation.tools)
            bridged = renderer.bridge_to_next_turn(known[:start], known[start:], messages, tools=tools)
        if bridged is None:
            return None
        ids = bridged.token_ids
        # A bridge cuts what was sampled after an end token; then it does not continue what was recorded.
        return _array(ids[len(known) :]) if ids[: len(known)] == known else None

    def begin_reply(self, conversation: Conversation, prompt_ids: Ids) -> Ids:
        message = begun_message(conversation)
        thinks = self._in_reasoning(self._tail(prompt_ids))
        with boundary(RequestError, f"render the begun message as {self._name}"):
            text: str | None = None
            if thinks == self._in_reasoning(self.render(Conversation((ASK,))).tolist()):
                text = opening(self._render_reply, message.reasoning)
        if text is None:
            # Some prompts open reasoning that the family's own rendering of a reply leaves out.
            text = f"{message.reasoning}\n{self._reasoning_end}\n\n" if thinks else ""
        elif thinks and message.reasoning not in text:  # a family may print none of earlier turns
            text = message.reasoning + text
        return self.encode_text(text + message.content.lstrip())

    @property
    def streams(self) -> bool:
        """Whether text is shown while it arrives."""
        return self._grammar is not None or self._harmony is not None

    def parse(self, output_ids: Ids, prompt_ids: Ids, conversation: Conversation) -> Reply:
        ids = self._until_stop(output_ids.tolist())
        tail = self._tail(prompt_ids)
        tools: Any = tool_dicts(conversation.tools)
        if self._format is not None and self._format.rescinds is not None:
            rescinded, start = self._read_ahead(ids, tail)
            if rescinded:
                return self._plain_reply(ids, tail, start)
        try:
            parsed = self._renderer.parse_response(output_ids.tolist(), tools=tools, prompt_ids=tail)
            if not parsed.reasoning_complete and self._name == "inkling":
                # Its parser drops the content before reasoning that was cut off.
                end = self._tokenizer.encode("<|end_message|>", add_special_tokens=False)
                parsed = self._renderer.parse_response([*ids, *end], tools=tools, prompt_ids=tail)
            return self._reply(ids, parsed)
        except Exception:  # these parsers read what a model wrote at random: any failure of theirs means plain text
            return self._plain_reply(ids, tail, self._read_ahead(ids, tail)[1])

    def stream(self, prompt_ids: Ids, conversation: Conversation) -> StreamParser:
        def parse(ids: Ids) -> Reply:
            return self.parse(ids, prompt_ids, conversation)

        return self._reader(self._tail(prompt_ids), parse) or BufferedStream(parse)

    def decode(self, ids: Ids) -> str:
        return self._text(ids.tolist())

    def encode_reply(self, reply: Reply) -> Ids:
        asked = Conversation((ASK,))
        prompt = self.render(asked)
        with boundary(RequestError, f"render a reply as {self._name}"):
            ids = _array(self._renderer.render_ids(self._dicts(Conversation((ASK, reply.message())))))
        size = min(len(ids), len(prompt))
        differs = np.flatnonzero(ids[:size] != prompt[:size])
        num_shared = int(differs[0]) if len(differs) else size
        thinks = self._in_reasoning(self._tail(prompt))
        if reply.reasoning and not thinks and num_shared < len(prompt):  # the prompt has closed it
            return self.encode_reply(replace(reply, reasoning=""))
        turn = ids[num_shared:]
        ends = np.flatnonzero(np.isin(turn, self._stop))
        # Some families end a turn with the token that opens the next one.
        turn = turn[: ends[-1] + 1] if len(ends) else np.append(turn, np.int32(self._stop[0]))
        if not thinks:
            return turn
        # Some leave out of a reply the reasoning that their prompt opens, or its end.
        text, end = self.decode(turn), self._reasoning_end
        before = f"{reply.reasoning}\n{end}\n\n" if end not in text else ""
        before = before or (reply.reasoning if reply.reasoning not in text else "")
        return np.concatenate([self.encode_text(before), turn]) if before else turn

    def encode_text(self, text: str) -> Ids:
        return _array(self._tokenizer.encode(text, add_special_tokens=False))

    def _tail(self, prompt_ids: Ids) -> list[int]:
        """What the family's parser may look at: from the last stop token on, so that a turn costs what is new in it."""
        if self._name in _READ_WHOLE_PROMPT:
            return prompt_ids.tolist()
        end, size = len(prompt_ids), 64
        while end > 0:
            start = max(0, end - size)
            ids = prompt_ids[start:end].tolist()
            last = next((i for i in range(len(ids) - 1, -1, -1) if ids[i] in self._stop), None)
            if last is not None:
                return prompt_ids[start + last :].tolist()
            end, size = start, size * 2
        return prompt_ids.tolist()

    def _turn_start(self, tail: list[int]) -> int:
        """Where the turn begins for a bridge: behind the prompt, or where one does not look there for what is begun."""
        if self._format is None or not self._format.by_option:
            return len(tail)
        header = self._tokenizer.encode(self._format.header, add_special_tokens=False)[-1]
        return len(tail) - tail[::-1].index(header) if header in tail else len(tail)

    @property
    def _reasoning_end(self) -> str:
        return self._format.reasoning[1] if self._format is not None and self._format.reasoning is not None else ""

    def _in_reasoning(self, tail: list[int]) -> bool:
        """Whether the prompt leaves the model in the middle of its reasoning."""
        form = self._format
        if form is None or form.reasoning is None:
            return False
        if form.by_option:
            return self._thinks_by_option()
        return prompt_ends_in_reasoning(
            self._tokenizer,
            tail,
            open_marker=form.reasoning[0],
            close_marker=form.reasoning[1],
            stop_ids=frozenset(self._stop),
            assistant_prefix=form.header,
            initial_only=not form.in_channels,
        )

    def _thinks_by_option(self) -> bool:
        return bool(getattr(getattr(self._renderer, "config", None), "enable_thinking", True))

    def _dicts(self, conversation: Conversation, start: int = 0) -> list[Any]:
        named = self._format is not None and self._format.named_ids
        return message_dicts(conversation, start, placement=self._placement, named_ids=named)

    def _render_reply(self, reply: Message | None) -> str:
        """A stand-in question with `reply`, or with the generation prompt."""
        return self._render_text((ASK, reply) if reply else (ASK,), generation=reply is None)

    def _render_text(self, messages: Sequence[Message], *, generation: bool) -> str:
        dicts: list[Any] = message_dicts(Conversation(tuple(messages)))
        return self._text(self._renderer.render_ids(dicts, add_generation_prompt=generation))

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))

    def _until_stop(self, ids: list[int]) -> list[int]:
        return next((ids[:i] for i, token in enumerate(ids) if token in self._stop), ids)

    def _reply(self, ids: list[int], parsed: ParsedResponse) -> Reply:
        calls: list[ToolCall] = []
        content = parsed.content
        end = num_malformed = 0  # `end`: of the call before, in ids
        for attempt in parsed.tool_calls:
            call = _tool_call(attempt)
            if call is not None:
                calls.append(call)
            else:
                content = self._with_raw(content, ids, end, attempt)
                num_malformed += 1
            end = attempt.token_span[1] if attempt.token_span is not None else end
        return Reply(content.strip(), (parsed.reasoning_content or "").strip(), tuple(calls), num_malformed)

    def _reader(self, tail: list[int], parse: Callable[[Ids], Reply]) -> MarkerStream | None:
        if self._harmony is not None:
            return HarmonyStream(self._detokenizer, self._harmony, tail, parse)
        if self._grammar is not None:
            return MarkerStream(self._detokenizer, self._grammar, self._in_reasoning(tail), parse)
        return None

    def _read_ahead(self, ids: list[int], tail: list[int]) -> tuple[bool, int]:
        """Whether the parser would take text back, and how many tokens are read before all is held."""
        reader = self._reader(tail, lambda _: Reply())
        if reader is None:
            return False, 0
        reader.feed(_array(ids))
        return reader.state is State.RESCINDED, reader.num_read

    def _plain_reply(self, ids: list[int], tail: list[int], start: int) -> Reply:
        """What a failed parser leaves: everything from `start` on is text."""
        parsed = self._renderer.parse_response(ids[:start], prompt_ids=tail) if start else ParsedResponse("")
        failed = ParsedToolCall("", token_span=(start, len(ids)), status=ToolCallParseStatus.MALFORMED_STRUCTURE)
        return self._reply(ids, replace(parsed, tool_calls=[failed]))

    def _with_raw(self, content: str, ids: list[int], end: int, attempt: ParsedToolCall) -> str:
        """`content` and then the text of a call that did not parse, with what stands between them."""
        if attempt.token_span is None:
            return f"{content}\n{attempt.raw}"
        start, stop = attempt.token_span
        before = self._text(ids[end:start])
        if end == 0:  # the text before the first call is the content already, less the space after it
            content, before = content.rstrip(), before[len(before.rstrip()) :]
        return content + before + self._text(ids[start:stop])


def _tool_call(attempt: ParsedToolCall) -> ToolCall | None:
    if attempt.status != ToolCallParseStatus.OK or not is_name(attempt.name):
        return None
    arguments = attempt.arguments
    raw = raw_arguments(attempt.raw, arguments)
    if raw is None:
        raw = arguments if isinstance(arguments, str) else compact(arguments or {})
    return ToolCall("", attempt.name, raw)


def _array(ids: list[int]) -> Ids:
    return np.asarray(ids, dtype=np.int32)
