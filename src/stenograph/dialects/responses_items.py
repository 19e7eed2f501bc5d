"""Items and tools of the Responses protocol: what one turn wrote as several items is read back as one message."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from stenograph.dialects.chat import ROLES, read_text
from stenograph.dialects.fields import Fields, invalid, shown, typed
from stenograph.dialects.minted import unseal
from stenograph.types import Message, Role, Tool, ToolCall

# --- tools -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Callee:
    """Whom a call means that the model makes by one name: a tool of the request, perhaps in a namespace."""

    name: str
    namespace: str | None = None
    custom: bool = False  # called with a text rather than with arguments


def read_tools(fields: Fields, allowed: list[Fields] | None) -> tuple[tuple[Tool, ...], dict[str, Callee], list[str]]:
    """The tools that the model is told of, whom it calls by their names, and notes on what was left out.

    Of tools that the model may call, `allowed` names those that it may call now; None means all.
    """
    tools, callees, notes = [], {}, []
    for namespace, tool in _flat(fields):
        kind = tool.values.get("type", "function")
        if kind not in ("function", "custom"):
            if _is_clients_own(tool, kind):  # left out, an agent would never learn that its only tool is gone
                told = f"the model knows no tool of type {shown(kind)}; declare it as a function with parameters"
                raise invalid(f"{tool.path}type", told)
            notes.append(_left_out(typed(kind, str, f"{tool.path}type", "a text")))
            continue
        callee = Callee(tool.name("name"), namespace, kind == "custom")
        name = qualified(namespace, callee.name)
        if callees.setdefault(name, callee) != callee:
            raise invalid(f"{tool.path}name", f"{shown(name)} would name two tools; rename one")
        description = tool.get("description", str, "a text") or ""
        parameters = _custom_parameters(tool) if callee.custom else tool.schema("parameters") or {}
        tools.append(Tool(name, description, parameters))
    if allowed is not None:
        names = {one.text("name") for one in allowed}
        tools = [tool for tool in tools if tool.name in names or callees[tool.name].name in names]
    return tuple(tools), callees, notes


_CLIENTS_OWN = ("local_shell", "apply_patch", "computer", "computer_use_preview")


def _is_clients_own(tool: Fields, kind: Any) -> bool:
    """Whether a tool that OpenAI's models know by its type alone is run by the client; a server runs the others."""
    if kind == "shell":
        return tool.object("environment").text("type") not in ("container_auto", "container_reference")
    return kind in _CLIENTS_OWN


def qualified(namespace: str | None, name: str) -> str:
    """A tool's name in the prompt; it is never taken apart again, for the request's own tools say whom it means."""
    return f"{namespace}__{name}" if namespace else name


def _flat(fields: Fields) -> Iterator[tuple[str | None, Fields]]:
    """Each tool with its namespace. Those that an item adds are among them: told later, they would tear the prompt."""
    items = fields.objects("input") if isinstance(fields.values.get("input"), list) else []
    added = [item for item in items if item.values.get("type") == "additional_tools"]
    for tool in (tool for given in (fields, *added) for tool in given.objects("tools")):
        if tool.values.get("type") == "namespace":
            namespace = tool.name("name")
            yield from ((namespace, inner) for inner in tool.objects("tools"))
        else:
            yield None, tool


def _custom_parameters(tool: Fields) -> dict[str, Any]:
    """Chat templates know functions alone: a tool that takes a text is one with a single text parameter."""
    wanted = tool.object("format")
    definition = wanted.get("definition", str, "a text")
    told = f"follows this {wanted.text('syntax') or ''} grammar:\n{definition}" if definition else "free text"
    parameter = {"type": "string", "description": told}
    return {"type": "object", "properties": {"input": parameter}, "required": ["input"]}


def _custom_arguments(text: str) -> str:
    return orjson.dumps({"input": text}).decode()


def _custom_input(arguments: str) -> str | None:
    """The text that a custom tool is called with; None where the model wrote no such call."""
    try:
        called = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return None
    match called:
        case {"input": str(text)} if len(called) == 1:
            return text
        case _:
            return None


# A custom tool's call that holds no text is told by its raw arguments. Its id says so, for that comes back always.
_RAW = "_raw"
_RAW_ID = re.compile(rf"call_[0-9a-f]{{16}}_[0-9]+{_RAW}")


def _called_id(item: Fields) -> tuple[str, bool]:
    """A call's id, and whether the item holds raw arguments in the place of a text."""
    wire = item.text("call_id") or ""
    return (wire.removesuffix(_RAW), True) if _RAW_ID.fullmatch(wire) else (wire, False)


def _left_out(kind: str) -> str:
    return f"left_out:{kind[:64]}"


# --- items -> messages -------------------------------------------------------------------------------------------

_ROLES: dict[str, Role] = {name: role for name, role in ROLES.items() if role != "tool"}
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_REFUSED = f"must be one of {', '.join(_PARTS)}, got {{}}; images, files and audio are not supported"
# Names as the gateway gives them to its calls: ids of other servers' items must not be taken for ours.
_OURS = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]{16})(?:_[0-9]+)?")

Stage = Literal["reasoning", "content", "call"]


@dataclass(frozen=True, slots=True)
class Input:
    """The messages that `input` makes, and notes on the items that were left out.

    `references` names the stored response whose reply stands at a position, where items were sent by their ids alone.
    """

    messages: list[Message]
    notes: list[str]
    references: dict[int, str]


def read_input(fields: Fields) -> Input:
    value = fields.get("input", (str, list), "a text or a list of items")
    if isinstance(value, str):
        return Input([Message("user", value)], [], {})
    transcript = _Transcript()
    for item in fields.objects("input"):
        _read_item(item, transcript)
    made = transcript.messages
    messages = [one.message() if isinstance(one, _Said) else one for one in made]
    references = {i: one.turn for i, one in enumerate(made) if isinstance(one, _Said) and one.turn and one.is_referred}
    return Input(messages, transcript.notes, references)


@dataclass(slots=True)
class _Said:
    """An assistant's message in the making; `turn` names the turn of ours that wrote it, where an id shows that."""

    turn: str | None
    is_referred: bool = False  # to items that are stored, by their ids
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        return Message("assistant", "".join(self.content), "".join(self.reasoning), tuple(self.calls))


@dataclass(slots=True)
class _Transcript:
    """Messages in the making. What a turn wrote are items in a row: reasoning, a message, calls."""

    messages: list[Message | _Said] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _last: _Said | None = None  # further items may belong to it
    _in_a_row: bool = False

    def add(self, message: Message) -> None:
        self.messages.append(message)
        self._in_a_row = False  # ids may still say that what follows belongs to the last turn: a further parallel call

    def said(self, item: Fields, stage: Stage, turn: str | None = None) -> _Said:
        """The message that an assistant's item belongs to."""
        ours = _OURS.fullmatch(item.text("id") or "")
        turn = ours[1] if ours else turn
        if self._last is None or not self._goes_on(self._last, stage, turn):
            self._last = _Said(turn)
            self.messages.append(self._last)
        self._last.turn = self._last.turn or turn
        self._in_a_row = True
        return self._last

    def _goes_on(self, last: _Said, stage: Stage, turn: str | None) -> bool:
        if turn is not None and last.turn is not None:
            return turn == last.turn
        # Without ids it is the order that tells: a turn reasons first, says one message, calls last.
        return self._in_a_row and (stage == "call" or not (last.content or last.calls))


def _read_item(item: Fields, transcript: _Transcript) -> None:
    match _kind(item):
        case "message":
            _read_message(item, transcript)
        case "reasoning":
            _read_reasoning(item, transcript)
        case "function_call":
            arguments = item.get("arguments", str, "a JSON text") or ""
            _add_call(item, transcript, item.name("name"), arguments)
        case "custom_tool_call":
            text, (_, is_raw) = item.get("input", str, "a text") or "", _called_id(item)
            _add_call(item, transcript, item.name("name"), text if is_raw else _custom_arguments(text))
        case "local_shell_call":
            _add_call(item, transcript, "local_shell", _dumped(item, "action"))
        case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
            output = _text(item.values.get("output"), f"{item.path}output")
            transcript.add(Message("tool", output, tool_call_id=_called_id(item)[0] or item.text("id")))
        case "additional_tools":
            pass  # they stand among the request's tools
        case "computer_call_output":
            raise invalid(f"{item.path}type", "must not be a screen's picture; images are not supported")
        case "item_reference":
            if not _OURS.fullmatch(item.text("id") or ""):
                told = f"refers to an item that is not stored here, {shown(item.values.get('id'))}"
                raise invalid(item.path, f'{told}; send the item itself (clients do so with "store": false)')
            transcript.said(item, "call").is_referred = True
        case kind:
            transcript.notes.append(_left_out(kind))


def _kind(item: Fields) -> str:
    kind = item.get("type", str, "a text")
    if kind is None:
        kind = "message" if "role" in item.values else "item_reference" if "id" in item.values else None
    if kind is None:
        raise invalid(f"{item.path}type", "is missing")
    return kind


def _read_message(item: Fields, transcript: _Transcript) -> None:
    role = _ROLES.get(item.text("role") or "")
    if role is None:
        told = f"must be one of {', '.join(_ROLES)}, got {shown(item.values.get('role'))}"
        raise invalid(f"{item.path}role", told)
    content = _text(item.values.get("content"), f"{item.path}content")
    if role == "assistant":
        transcript.said(item, "content").content.append(content)
    else:
        transcript.add(Message(role, content))


def _read_reasoning(item: Fields, transcript: _Transcript) -> None:
    texts = [part.get("text", str, "a text") or "" for part in item.objects("content") or item.objects("summary")]
    sealed = unseal(item.text("encrypted_content") or "")
    text = "".join(texts) or (sealed.reasoning if sealed else "")
    if text:
        transcript.said(item, "reasoning", sealed.turn if sealed else None).reasoning.append(text)
    else:
        transcript.notes.append(_left_out("reasoning"))


def _add_call(item: Fields, transcript: _Transcript, name: str, arguments: str) -> None:
    call = ToolCall(_called_id(item)[0], qualified(item.text("namespace"), name), arguments)
    transcript.said(item, "call").calls.append(call)


def _text(content: Any, path: str) -> str:
    return read_text(content, path, _PARTS, _REFUSED)


def _dumped(item: Fields, name: str) -> str:
    try:
        return orjson.dumps(item.object(name).values).decode()
    except orjson.JSONEncodeError as e:
        raise invalid(item.path + name, "is nested too deeply") from e


# --- records -> items --------------------------------------------------------------------------------------------


def reasoning_item(item_id: str, text: str, encrypted: str | None) -> dict[str, Any]:
    item = {"type": "reasoning", "id": item_id, "summary": [summary_part(text)]}
    return item if encrypted is None else {**item, "encrypted_content": encrypted}


def summary_part(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def message_item(item_id: str, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "message", "id": item_id, "status": status, "role": "assistant", "content": parts}


def text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def call_item(name: str, index: int, call: ToolCall, callee: Callee) -> dict[str, Any]:
    """A call by the turn that `name` names, in the form of the tool that it means."""
    item: dict[str, Any] = {"call_id": call.id, "name": callee.name, "status": "completed"}
    if callee.namespace is not None:
        item["namespace"] = callee.namespace
    if callee.custom:
        text = _custom_input(call.arguments)
        if text is None:
            text, item["call_id"] = call.arguments, call.id + _RAW
        return {"type": "custom_tool_call", "id": f"ctc_{name}_{index}", **item, "input": text}
    return {"type": "function_call", "id": f"fc_{name}_{index}", **item, "arguments": call.arguments}
