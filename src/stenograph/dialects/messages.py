"""Anthropic Messages: pure functions, request -> conversation and turn -> response or SSE events.

Reasoning is shown as a thinking block whether or not `thinking` was asked for: what the model goes on from must come
back. Its signature is a seal with the reasoning in it, for clients that are not shown the text (`display: "omitted"`).

`input` must be an object: a call's arguments that are none are told as `{"_raw": "<the text>"}` and read back from it.
In a stream they go out as the model wrote them, which a client may fail to parse.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, TypeGuard

import orjson

from stenograph.dialects.base import Answered, Decode, HttpError, Kind, Request, Writer, failure, own_session
from stenograph.dialects.fields import Fields, invalid, read_body, shown, typed
from stenograph.dialects.minted import seal, unseal
from stenograph.errors import RequestError
from stenograph.types import Conversation, Message, Tool, ToolCall

_DATE = re.compile(r"_\d{8}$")  # what ends the type of a tool of Anthropic's
_RAW = "_raw"  # what holds a call's arguments where they are no object


@dataclass(frozen=True, slots=True)
class MessagesRequest(Request):
    """What this protocol asks beyond the others."""

    hide_thinking: bool = False

    def writer(self, name: str, created: int, decode: Decode) -> Writer:
        return MessagesWriter(self, name)


# --- request -> records ------------------------------------------------------------------------------------------


def parse_request(body: bytes) -> MessagesRequest:
    """Read a request body. Raises RequestError (400) that names the field."""
    fields = read_body(body)
    if fields.values.get("max_tokens") is None:
        raise invalid("max_tokens", "is missing")
    return _request(fields)


def parse_count(body: bytes) -> MessagesRequest:
    """Read the body of a request to count its tokens, which needs no `max_tokens`."""
    return _request(read_body(body))


def count(num_tokens: int) -> bytes:
    """The body that answers `parse_count`."""
    return orjson.dumps({"input_tokens": num_tokens})


def _request(fields: Fields) -> MessagesRequest:
    notes: list[str] = []
    tools = _tools(fields, notes) if _may_call(fields, notes) else ()
    messages, continues = _messages(fields, notes)
    return MessagesRequest(
        conversation=Conversation(messages, tools, continues),
        asked=_asked(fields),
        model=fields.text("model") or "",
        stream=fields.flag("stream"),
        grammar=_grammar(fields),
        session=own_session(fields.values.get("session_id")),
        notes=tuple(dict.fromkeys(notes)),
        hide_thinking=fields.object("thinking").text("display") == "omitted",
    )


def _asked(fields: Fields) -> dict[str, Any]:
    top_k = fields.integer("top_k", -1)
    asked = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 1e-9, 1),
        "top_k": None if top_k is None else max(top_k, 0),
        "max_tokens": fields.integer("max_tokens", 1),
        "stop": fields.texts("stop_sequences") or None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _grammar(fields: Fields) -> Mapping[str, Any] | None:
    wanted = fields.object("output_config").object("format")
    if not wanted.values:
        wanted = fields.object("output_format")  # where it stood before
    if not wanted.values:
        return None
    if wanted.values.get("type") != "json_schema":
        raise invalid(f"{wanted.path}type", f'must be "json_schema", got {shown(wanted.values.get("type"))}')
    schema = wanted.schema("schema")
    if schema is None:
        raise invalid(f"{wanted.path}schema", "is missing")
    return schema


def _may_call(fields: Fields, notes: list[str]) -> bool:
    """Whether tools go into the prompt: nothing here can stop a model that sees them from calling one."""
    choice = fields.object("tool_choice")
    kind = choice.values.get("type", "auto")
    if kind not in ("auto", "none"):
        raise invalid("tool_choice.type", f'must be "auto" or "none", got {shown(kind)}; no call can be enforced here')
    if choice.flag("disable_parallel_tool_use"):
        notes.append("ignored:disable_parallel_tool_use")
    return kind == "auto"


def _tools(fields: Fields, notes: list[str]) -> tuple[Tool, ...]:
    """The tools that a client runs. Deferred ones are among them: added later, they would change the prompt's start."""
    tools = []
    for tool in fields.objects("tools"):
        kind, schema = tool.text("type") or "custom", tool.schema("input_schema")
        if schema is not None:
            tools.append(Tool(tool.name("name"), tool.get("description", str, "a text") or "", schema))
        elif kind == "custom":
            raise invalid(f"{tool.path}input_schema", "is missing")
        else:  # known by its type alone: Anthropic's servers know the rest, or run it
            notes.append("left_out:" + _DATE.sub("", kind))
    return tuple(tools)


def _messages(fields: Fields, notes: list[str]) -> tuple[tuple[Message, ...], bool]:
    """The messages, and whether the last is the beginning of the answer."""
    messages: list[Message] = []
    if system := _text(fields, "system"):
        messages.append(Message("system", system))
    given = fields.objects("messages")
    if not given:
        raise invalid("messages", "must hold at least one message")
    for message in given:
        match message.text("role"):
            case "user":
                messages += _user(message)
            case "assistant":
                messages.append(_assistant(message, notes))
            case "system" | "developer":  # no chat template in use tells the two apart
                messages.append(Message("system", _text(message, "content")))
            case _:
                told = f"must be one of user, assistant, system, got {shown(message.values.get('role'))}"
                raise invalid(f"{message.path}role", told)
    continues = messages[-1].role == "assistant"
    if continues:
        _check_begun(messages[-1], f"{given[-1].path}content")
    return tuple(messages), continues


def _check_begun(message: Message, path: str) -> None:
    """Whether an answer can go on from `message`; the same are refused where the protocol comes from."""
    if message.tool_calls or not message.content:
        raise invalid(path, "an answer can go on from a text alone; end in one, in a tool_result or in a user's text")
    if message.content[-1].isspace():
        raise invalid(path, "final assistant content cannot end with trailing whitespace")


def _user(fields: Fields) -> list[Message]:
    """One message for each tool result and for each run of texts between them."""
    messages: list[Message] = []
    for kind, run in groupby(_blocks(fields, "content"), lambda block: block.values.get("type")):
        match kind:
            case "text":
                messages.append(Message("user", _joined([_said(block) for block in run])))
            case "tool_result":
                messages += [_result(block) for block in run]
            case _:
                raise _unknown(next(run))
    return messages or [Message("user")]


def _result(block: Fields) -> Message:
    """A tool's result. Whether it is an error is said by its text; templates know no mark for it."""
    return Message("tool", _text(block, "content"), tool_call_id=_call_id(block.name("tool_use_id")))


def _assistant(fields: Fields, notes: list[str]) -> Message:
    texts, thoughts, calls = [], [], []
    for block in _blocks(fields, "content"):
        match block.values.get("type"):
            case "text":
                texts.append(_said(block))
            case "thinking" | "redacted_thinking":
                thoughts.append(_reasoning(block))
            case "tool_use":
                calls.append(ToolCall(_call_id(block.name("id")), block.name("name"), _arguments(block)))
            case str(kind) if kind in ("server_tool_use", "mcp_tool_use") or kind.endswith("_tool_result"):
                notes.append(f"left_out:{kind}")
            case _:
                raise _unknown(block)
    # One reply is told in several blocks where its thinking interrupts its text: no separator of ours belongs there.
    return Message("assistant", "".join(texts), "".join(thoughts), tuple(calls))


def _blocks(fields: Fields, name: str) -> list[Fields]:
    """The blocks under `name`; a text is one block."""
    content = fields.values.get(name)
    if isinstance(content, str):
        return [Fields({"type": "text", "text": content}, f"{fields.path}{name}.")]
    typed(content or [], list, fields.path + name, "a text or a list of blocks")
    return fields.objects(name)


def _text(fields: Fields, name: str) -> str:
    """The text under `name`, where nothing else may stand."""
    return _joined([_said(block) for block in _blocks(fields, name)])


def _joined(texts: Sequence[str]) -> str:
    """Blocks are texts apart (a prompt's parts, a reminder behind a question), so a line's end stands between them.

    Empty ones leave no trace: clients drop them or not. One block is the same as its text.
    """
    return "\n".join(text for text in texts if text)


def _said(block: Fields) -> str:
    match block.values.get("type"):
        case "text":
            return block.get("text", str, "a text") or ""
        case "tool_reference":  # a tool that a search found; its definition stands among the tools
            return block.name("tool_name")
    raise _unknown(block)


def _reasoning(block: Fields) -> str:
    """What a block of thinking says, or what its seal holds where a client left that out; others' seals stay shut."""
    sealed = unseal(block.text("signature") or block.text("data") or "")
    return block.text("thinking") or ("" if sealed is None else sealed.reasoning)


def _arguments(block: Fields) -> str:
    """A call's arguments as text. `input` is any JSON: clients send back what they made of text that is no object."""
    value = block.values.get("input")
    if _stands_in(value):
        return value[_RAW]
    try:
        return "{}" if value is None else orjson.dumps(value).decode()
    except orjson.JSONEncodeError as e:
        raise invalid(f"{block.path}input", "is nested too deeply") from e


def _stands_in(value: object) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and value.keys() == {_RAW} and isinstance(value[_RAW], str)


def _unknown(block: Fields) -> RequestError:
    kind = block.values.get("type")
    images = "; images and documents are not supported" if kind in ("image", "document") else ""
    return invalid(f"{block.path}type", f"blocks of type {shown(kind)} cannot be read here{images}")


# Calls are named alike in every protocol's record; this one's clients know them by a prefix of their own.
def _call_id(wire: str) -> str:
    return "call_" + wire.removeprefix("toolu_") if wire.startswith("toolu_") else wire


def _wire_id(call: str) -> str:
    return "toolu_" + call.removeprefix("call_") if call.startswith("call_") else call


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
        content += [{**_tool_use(call), "input": _input(call.arguments)} for call in reply.tool_calls]
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
            events.append(self._start({**_tool_use(call), "input": {}}))
            events.append(self._delta("input_json_delta", partial_json=call.arguments))
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


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": _wire_id(call.id), "name": call.name}


def _input(arguments: str) -> orjson.Fragment | dict[str, str]:
    """Arguments as an object; the model's own spelling of it wherever it wrote one."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        value = None
    # An object that looks like the stand-in is told in one, so that it is not taken for it when it comes back.
    told_as_it_is = isinstance(value, dict) and not _stands_in(value)
    return orjson.Fragment(arguments) if told_as_it_is else {_RAW: arguments}


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
    message = told.message
    if told.overflow is not None:
        num_tokens, limit = told.overflow
        message = f"prompt is too long: {num_tokens} tokens > {limit} maximum"
    body = {"type": "error", "error": {"type": _ERROR_TYPES.get(told.kind, f"{told.kind}_error"), "message": message}}
    return HttpError(told.status, {"content-type": "application/json", **told.headers}, orjson.dumps(body))


_ERROR_TYPES: dict[Kind, str] = {"too_large": "request_too_large", "engine": "api_error", "internal": "api_error"}
