"""Anthropic Messages: pure functions, request -> conversation and turn -> response or SSE events.

Reasoning is shown as a thinking block whether or not `thinking` was asked for: what the model goes on from must come
back. Its signature is a seal with the reasoning in it, for clients that are not shown the text (`display: "omitted"`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import orjson
from msgspec import Raw

from stenograph.dialects.base import Answered, Decode, HttpError, Kind, Request, Writer, failure, own_session
from stenograph.dialects.fields import Fields, invalid, shown
from stenograph.dialects.hints import read_hints
from stenograph.dialects.messages_blocks import read_messages, tool_input, tool_use
from stenograph.dialects.messages_tools import read_tools
from stenograph.dialects.minted import seal
from stenograph.dialects.sampling import ignored, read_sampling, refuse_choices, refuse_constraints
from stenograph.dialects.seen import Seen, read_again
from stenograph.errors import RequestError
from stenograph.types import Conversation


@dataclass(frozen=True, slots=True)
class MessagesRequest(Request):
    """What this protocol asks beyond the others."""

    hide_thinking: bool = False

    def writer(self, name: str, created: int, decode: Decode) -> Writer:
        return MessagesWriter(self, name)


# --- request -> records ------------------------------------------------------------------------------------------


class _Body(msgspec.Struct):
    """The parts of a body that come again."""

    messages: list[Raw] = []
    system: Raw = Raw()
    tools: Raw = Raw()


def parse_request(body: bytes, seen: Seen | None = None) -> MessagesRequest:
    """Read a request body. Raises RequestError (400) that names the field."""
    fields = read_again(body, seen, _Body)
    if fields.values.get("max_tokens") is None:
        raise invalid("max_tokens", "is missing")
    return _request(fields)


def parse_count(body: bytes, seen: Seen | None = None) -> MessagesRequest:
    """Read the body of a request to count its tokens, which needs no `max_tokens`."""
    return _request(read_again(body, seen, _Body))


def count(num_tokens: int) -> bytes:
    """The body that answers `parse_count`."""
    return orjson.dumps({"input_tokens": num_tokens})


def _request(fields: Fields) -> MessagesRequest:
    _refuse(fields)
    notes = [f"left_out:{name}" for name in ("mcp_servers", "container") if fields.values.get(name)]
    edits = fields.object("context_management").objects("edits")
    if not all(
        (edit.text("type") or "").startswith("clear_thinking_") for edit in edits
    ):  # what is kept of it is the run's choice
        notes.append("ignored:context_management")
    notes += _ignored(fields)
    may_call = _may_call(fields, notes)
    tools, left_out_tools = fields.whole("tools", read_tools) if may_call else ((), ())
    messages, left_out, continues = read_messages(fields)
    return MessagesRequest(
        conversation=Conversation(messages, tools, continues),
        asked=read_sampling(fields, stop="stop_sequences", max_tokens=("max_tokens",)),
        model=fields.text("model") or "",
        stream=fields.flag("stream"),
        grammar=_grammar(fields),
        session=own_session(fields.values.get("session_id")),
        notes=tuple(dict.fromkeys([*notes, *left_out_tools, *left_out])),
        hints=read_hints(fields),
        hide_thinking=fields.object("thinking").text("display") == "omitted",
    )


def _refuse(fields: Fields) -> None:
    """What would change the answer and is not done here."""
    if fields.values.get("thread") is not None:
        told = "thread: none is kept here; send all messages"
        raise RequestError(told, code="thread_unsupported_request", param="thread")  # clients go on without one
    if fields.values.get("compaction") is not None:
        raise invalid("compaction", "is not done here; ask for a summary in a message")
    refuse_choices(fields)
    refuse_constraints(fields, "output_config.format")


def _ignored(fields: Fields) -> list[str]:
    """What was asked and cannot be done, though nothing breaks by it: how much a model thinks is its own."""
    when = fields.object("thinking").values.get("type")
    notes = ["ignored:thinking"] if when not in (None, "enabled", "adaptive") else []
    return notes + ignored(fields, "thinking.budget_tokens", "output_config.effort", "output_config.task_budget")


def _grammar(fields: Fields) -> Mapping[str, Any] | None:
    wanted = fields.object("output_config").object("format")
    if not wanted.values:
        wanted = fields.object("output_format")  # where it stood before
    if not wanted.values:
        return None
    if wanted.values.get("type") != "json_schema":
        raise invalid(f"{wanted.path}type", f'must be "json_schema", got {shown(wanted.values.get("type"))}')
    return wanted.required_schema("schema")


def _may_call(fields: Fields, notes: list[str]) -> bool:
    """Whether tools go into the prompt: nothing here can stop a model that sees them from calling one."""
    choice = fields.object("tool_choice")
    kind = choice.values.get("type", "auto")
    if kind not in ("auto", "none"):
        raise invalid("tool_choice.type", f'must be "auto" or "none", got {shown(kind)}; no call can be enforced here')
    if choice.flag("disable_parallel_tool_use"):
        notes.append("ignored:disable_parallel_tool_use")
    return kind == "auto"


# --- records -> response -----------------------------------------------------------------------------------------


class MessagesWriter:
    """Writes one answer; in a stream it knows which block is open."""

    __slots__ = ("_index", "_name", "_open", "_request", "_thought")

    def __init__(self, request: MessagesRequest, name: str) -> None:
        self._request = request
        self._name = name
        self._index = -1  # of the last block begun
        self._open: Literal["thinking", "text"] | None = None
        self._thought: list[str] = []  # what the open block holds

    def whole(self, answered: Sequence[Answered]) -> bytes:
        reply, content = answered[0].shown, []
        if reply.reasoning:
            thinking = "" if self._request.hide_thinking else reply.reasoning
            content.append({"type": "thinking", "thinking": thinking, "signature": seal(self._name, reply.reasoning)})
        if reply.content:
            content.append({"type": "text", "text": reply.content})
        content += [
            {**tool_use(call), "input": orjson.Fragment(tool_input(call.arguments))} for call in reply.tool_calls
        ]
        return orjson.dumps(self._message(content, *_ending(answered[0])))

    def begin(self, num_prompt: int) -> bytes:
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, _usage(num_prompt))
        return _event("message_start", message=message)

    def delta(self, choice: int, content: str, reasoning: str) -> bytes:
        events = []
        if reasoning:
            events.append(self._enter("thinking"))
            self._thought.append(reasoning)
            if not self._request.hide_thinking:
                events.append(self._delta("thinking_delta", thinking=reasoning))
        if content:
            events += [self._enter("text"), self._delta("text_delta", text=content)]
        return b"".join(events)

    def end(self, answered: Sequence[Answered]) -> bytes:
        events = [self._leave()]
        for call in answered[0].shown.tool_calls:
            events.append(self._start({**tool_use(call), "input": {}}))
            events.append(self._delta("input_json_delta", partial_json=tool_input(call.arguments)))
            events.append(_event("content_block_stop", index=self._index))
        stop, usage = _ending(answered[0])
        events.append(_event("message_delta", delta=stop, usage=usage))
        events.append(_event("message_stop"))
        return b"".join(events)

    def failed(self, exception: Exception) -> bytes:
        return b"event: error\ndata: " + error(exception).body + b"\n\n"

    def _message(self, content: list[Any], stop: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": f"msg_{self._name}", "type": "message", "role": "assistant", "model": self._request.model}
        return {**head, "content": content, **stop, "usage": usage}

    def _enter(self, kind: Literal["thinking", "text"]) -> bytes:
        """What it takes for a block of `kind` to be open."""
        if self._open == kind:
            return b""
        left = self._leave()
        self._open, self._thought = kind, []
        empty = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
        return left + self._start({"type": kind, **empty})

    def _leave(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._delta("signature_delta", signature=seal(self._name, "".join(self._thought)))
        self._open = None
        return signed + _event("content_block_stop", index=self._index)

    def _start(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, **said: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **said})


def _event(kind: str, **payload: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **payload}) + b"\n\n"


def _ending(one: Answered) -> tuple[dict[str, Any], dict[str, Any]]:
    """Why the turn ended, and its usage."""
    turn = one.turn
    if turn.finish_reason == "length":
        reason = "max_tokens"
    elif turn.reply.tool_calls:
        reason = "tool_use"  # whatever ended it, the client runs them
    else:
        reason = "end_turn" if turn.stopped_by is None else "stop_sequence"
    stop = {"stop_reason": reason, "stop_sequence": turn.stopped_by if reason == "stop_sequence" else None}
    details = {"thinking_tokens": one.num_reasoning}
    return stop, {**_usage(one.num_prompt, len(turn.output_ids)), "output_tokens_details": details}


def _usage(num_prompt: int, num_output: int = 0) -> dict[str, Any]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": num_prompt, **cached, "output_tokens": num_output}


# --- errors ------------------------------------------------------------------------------------------------------


def error(exception: Exception) -> HttpError:
    told = failure(exception)
    detail: dict[str, Any] = {"type": _ERROR_TYPES.get(told.kind, f"{told.kind}_error"), "message": told.message}
    if told.overflow is not None:
        num_tokens, limit = told.overflow
        detail["message"] = f"prompt is too long: {num_tokens} tokens > {limit} maximum"
    elif told.code is not None:
        detail["details"] = {"error_code": told.code}
    headers = {"content-type": "application/json", **told.headers}
    return HttpError(told.status, headers, orjson.dumps({"type": "error", "error": detail}))


_ERROR_TYPES: dict[Kind, str] = {"too_large": "request_too_large", "engine": "api_error", "internal": "api_error"}
