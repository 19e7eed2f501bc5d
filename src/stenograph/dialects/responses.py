"""OpenAI Responses: pure functions, request -> conversation and turn -> response or events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson
from msgspec import Raw

from stenograph.dialects.base import Answered, Decode, HttpError, Request, Writer, failure, own_session
from stenograph.dialects.chat import (
    allowed_tools,
    continues_last,
    ignored_parallel,
    logprob_rows,
    openai_error,
    read_format,
    refuse_top_logprobs,
)
from stenograph.dialects.fields import Fields, invalid
from stenograph.dialects.hints import read_hints
from stenograph.dialects.minted import seal
from stenograph.dialects.responses_items import (
    Callee,
    call_item,
    message_item,
    read_input,
    read_tools,
    reasoning_item,
    summary_part,
    text_part,
)
from stenograph.dialects.sampling import ignored, read_sampling, refuse_choices, refuse_constraints
from stenograph.dialects.seen import Seen, read_again
from stenograph.types import Conversation, Message, ToolCall


@dataclass(frozen=True, slots=True)
class ResponsesRequest(Request):
    """What this protocol asks beyond the others. `echo` are the request's fields that its response repeats."""

    callees: Mapping[str, Callee] = field(default_factory=dict)
    echo: Mapping[str, orjson.Fragment] = field(default_factory=dict)
    logprobs: bool = False
    encrypted: bool = False

    def writer(self, name: str, created: int, decode: Decode) -> Writer:
        return ResponsesWriter(self, name, created, decode)


# --- request -> records ------------------------------------------------------------------------------------------


class _Body(msgspec.Struct):
    """The parts of a body that come again."""

    input: list[Raw] | str = ""
    instructions: Raw = Raw()
    tools: Raw = Raw()


def parse_request(body: bytes, seen: Seen | None = None) -> ResponsesRequest:
    """Read a request body. Raises RequestError (400) that names the field."""
    fields = read_again(body, seen, _Body)
    _refuse(fields)
    begin = fields.whole("instructions", _begin)
    given = read_input(fields)
    said = given.messages
    previous = fields.get("previous_response_id", str, "a response's id")
    if not said and previous is None:
        raise invalid("input", "must hold at least one message, or an item that makes one")
    allowed = allowed_tools(fields)
    tools = fields.whole("tools", read_tools, *given.added)
    include = fields.texts("include")
    return ResponsesRequest(
        conversation=Conversation((*begin, *said), tools.only(allowed), continues_last(fields, said)),
        asked=read_sampling(fields, stop="stop", max_tokens=("max_output_tokens",)),
        model=fields.text("model") or "",
        stream=fields.flag("stream"),
        grammar=read_format(fields.object("text").object("format")),
        session=own_session(fields.values.get("session_id")),
        previous=previous,
        store=fields.values.get("store") is None or fields.flag("store"),
        num_instructions=len(begin),
        references={len(begin) + i: name for i, name in given.references.items()},
        notes=tuple(dict.fromkeys([*_ignored(fields), *tools.notes, *given.notes])),
        hints=read_hints(fields),
        callees=tools.callees,
        echo=_ECHOED | {name: fields.whole(name, _echo, name) for name in _ECHOED if name in fields.values},
        logprobs="message.output_text.logprobs" in include,
        encrypted="reasoning.encrypted_content" in include,
    )


def _begin(fields: Fields) -> tuple[Message, ...]:
    instructions = fields.get("instructions", str, "a text")
    return (Message("system", instructions),) if instructions else ()


def _refuse(fields: Fields) -> None:
    """What would change the answer and is not done here."""
    refuse_top_logprobs(fields)
    if fields.flag("background"):
        raise invalid("background", "must be false; responses are made while their client waits")
    if fields.values.get("conversation") is not None:
        raise invalid("conversation", "is not kept here; send the items, or use previous_response_id")
    if fields.values.get("prompt") is not None:
        raise invalid("prompt", "names a template, and none are kept here; send its text as instructions and input")
    refuse_choices(fields)
    refuse_constraints(fields, "text.format")


def _ignored(fields: Fields) -> list[str]:
    """What was asked and cannot be done, though nothing breaks by it."""
    notes = ignored_parallel(fields)
    notes += ignored(fields, "context_management", "max_tool_calls", "reasoning.effort", "text.verbosity")
    return notes + (["ignored:truncation"] if fields.values.get("truncation") == "auto" else [])


_ABSENT: dict[str, Any] = {  # the fields that are repeated, as they are told of where a request has none of them
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
_ECHOED = {name: orjson.Fragment(orjson.dumps(value)) for name, value in _ABSENT.items()}


def _echo(fields: Fields, name: str) -> orjson.Fragment:
    """Written out once, for every snapshot of the response repeats it."""
    value = fields.values.get(name)
    if value is None:
        return _ECHOED[name]
    try:
        return orjson.Fragment(orjson.dumps(value))
    except orjson.JSONEncodeError as e:
        raise invalid(name, "is nested too deeply") from e


# --- records -> response -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class ResponsesWriter:
    """Writes one response. Its items are written one after the other; calls and what ends it wait for the commit."""

    request: ResponsesRequest
    name: str
    created: int
    decode: Decode
    _output: list[dict[str, Any]] = field(default_factory=list)  # items that are done
    _num_events: int = 0
    _reasoning: list[str] = field(default_factory=list)
    _begun: bool = False  # whether the message item is
    _late: list[str] = field(default_factory=list)  # reasoning that came when the message had begun

    def whole(self, answered: Sequence[Answered]) -> bytes:
        one = answered[0]
        output = [self._reasoning_item(0, one.shown.reasoning)] if one.shown.reasoning else []
        if _says(one):
            output.append(self._message_item(one))
        output += [self._call_item(n, call) for n, call in enumerate(one.shown.tool_calls)]
        return orjson.dumps(self._ended(one, output))

    def begin(self, num_prompt: int) -> bytes:
        begun = self._response("in_progress", [])
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def delta(self, choice: int, content: str, reasoning: str) -> bytes:
        events = []
        if reasoning and self._begun:
            self._late.append(reasoning)
        elif reasoning:
            if not self._reasoning:
                events += self._begin_reasoning(0)
            self._reasoning.append(reasoning)
            events.append(self._summary_delta(0, reasoning))
        if content:
            if not self._begun:
                events += self._end_reasoning(0, self._reasoning) + self._begin_message()
            delta = {"content_index": 0, "delta": content, "logprobs": []}
            events.append(self._item_event("output_text.delta", f"msg_{self.name}", **delta))
        return b"".join(events)

    def end(self, answered: Sequence[Answered]) -> bytes:
        one = answered[0]
        events = []
        if not self._begun:
            events += self._end_reasoning(0, self._reasoning)
        if _says(one):
            events += [] if self._begun else self._begin_message()
            events += self._end_message(one)
        if self._late:
            events += [*self._begin_reasoning(1), self._summary_delta(1, "".join(self._late))]
            events += self._end_reasoning(1, self._late)
        for n, call in enumerate(one.shown.tool_calls):
            events += self._call(self._call_item(n, call))
        response = self._ended(one, self._output)
        return b"".join([*events, self._event(f"response.{response['status']}", response=response)])

    def failed(self, exception: Exception) -> bytes:
        told = failure(exception)
        begun = b"" if self._num_events else self.begin(0)  # clients take no other event for the first
        detail = {"code": told.code or _ERROR_CODES.get(told.kind, "invalid_prompt"), "message": told.message}
        response = {**self._response("failed", self._output), "error": detail}
        return begun + self._event("response.failed", response=response)

    # --- the response ----------------------------------------------------------------------------------------

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"resp_{self.name}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.request.model,
            "output": output,
            "top_logprobs": 0,
            "usage": None,
            **self.request.echo,
        }

    def _ended(self, one: Answered, output: list[dict[str, Any]]) -> dict[str, Any]:
        status = _status(one)
        response = {**self._response(status, output), "usage": _usage(one)}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return response

    # --- its items -------------------------------------------------------------------------------------------

    def _reasoning_id(self, index: int) -> str:
        return f"rs_{self.name}_{index}" if index else f"rs_{self.name}"

    def _reasoning_item(self, index: int, text: str) -> dict[str, Any]:
        return reasoning_item(
            self._reasoning_id(index), text, seal(self.name, text) if self.request.encrypted else None
        )

    def _message_item(self, one: Answered) -> dict[str, Any]:
        logprobs = logprob_rows(one.turn, self.decode) if self.request.logprobs else []
        return message_item(f"msg_{self.name}", _status(one), [text_part(one.shown.content, logprobs)])

    def _call_item(self, index: int, call: ToolCall) -> dict[str, Any]:
        return call_item(self.name, index, call, self.request.callees.get(call.name, Callee(call.name)))

    # --- events ----------------------------------------------------------------------------------------------

    def _begin_reasoning(self, index: int) -> list[bytes]:
        item_id = self._reasoning_id(index)
        added = {"summary_index": 0, "part": summary_part("")}
        return [
            self._added({"type": "reasoning", "id": item_id, "summary": []}),
            self._item_event("reasoning_summary_part.added", item_id, **added),
        ]

    def _summary_delta(self, index: int, text: str) -> bytes:
        item_id = self._reasoning_id(index)
        return self._item_event("reasoning_summary_text.delta", item_id, summary_index=0, delta=text)

    def _end_reasoning(self, index: int, texts: list[str]) -> list[bytes]:
        if not texts:
            return []
        item_id, text = self._reasoning_id(index), "".join(texts)
        return [
            self._item_event("reasoning_summary_text.done", item_id, summary_index=0, text=text),
            self._item_event("reasoning_summary_part.done", item_id, summary_index=0, part=summary_part(text)),
            self._done(self._reasoning_item(index, text)),
        ]

    def _begin_message(self) -> list[bytes]:
        self._begun = True
        item_id = f"msg_{self.name}"
        return [
            self._added(message_item(item_id, "in_progress", [])),
            self._item_event("content_part.added", item_id, content_index=0, part=text_part("", [])),
        ]

    def _end_message(self, one: Answered) -> list[bytes]:
        item = self._message_item(one)
        part = item["content"][0]
        done = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
        return [
            self._item_event("output_text.done", item["id"], **done),
            self._item_event("content_part.done", item["id"], content_index=0, part=part),
            self._done(item),
        ]

    def _call(self, item: dict[str, Any]) -> list[bytes]:
        key = "input" if item["type"] == "custom_tool_call" else "arguments"
        kind = "custom_tool_call_input" if key == "input" else "function_call_arguments"
        return [
            self._added({**item, "status": "in_progress", key: ""}),
            self._item_event(f"{kind}.delta", item["id"], delta=item[key]),
            self._item_event(f"{kind}.done", item["id"], **{key: item[key], "name": item["name"]}),
            self._done(item),
        ]

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _done(self, item: dict[str, Any]) -> bytes:
        event = self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        return event

    def _item_event(self, kind: str, item_id: str, **fields: Any) -> bytes:
        return self._event(f"response.{kind}", item_id=item_id, output_index=len(self._output), **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        payload = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(payload) + b"\n\n"


def _says(one: Answered) -> bool:
    """Whether there is a message item; a turn that wrote nothing at all says an empty one."""
    return bool(one.shown.content) or not (one.shown.reasoning or one.shown.tool_calls)


def _status(one: Answered) -> str:
    return "incomplete" if one.turn.finish_reason == "length" else "completed"


def _usage(one: Answered) -> dict[str, Any]:
    num_output = len(one.turn.output_ids)
    return {
        "input_tokens": one.num_prompt,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": one.num_reasoning},
        "total_tokens": one.num_prompt + num_output,
    }


# --- errors ------------------------------------------------------------------------------------------------------


def error(exception: Exception) -> HttpError:
    return openai_error(failure(exception))


_ERROR_CODES = {
    "rate_limit": "rate_limit_exceeded",
    "overloaded": "server_error",
    "engine": "server_error",
    "internal": "server_error",
}
