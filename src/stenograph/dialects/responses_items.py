"""Items and tools of the Responses protocol: what one turn wrote as several items is read back as one message."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import orjson

from stenograph.dialects.chat import ROLES, read_texts
from stenograph.dialects.fields import Fields, Joined, invalid, shown, typed
from stenograph.dialects.minted import turn_id, unseal
from stenograph.types import Message, Role, Tool, ToolCall

# --- tools -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Callee:
    """Whom a call means that the model makes by one name: a tool of the request, perhaps in a namespace."""

    name: str
    namespace: str | None = None
    custom: bool = False  # called with a text rather than with arguments


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools that the model is told of, whom it calls by their names, and notes on what was left out."""

    tools: tuple[Tool, ...]
    callees: Mapping[str, Callee]
    notes: tuple[str, ...]

    def only(self, allowed: list[Fields] | None) -> tuple[Tool, ...]:
        """Of the tools that the model may call, those that `allowed` names; None means all."""
        if allowed is None:
            return self.tools
        names = {one.text("name") for one in allowed}
        return tuple(tool for tool in self.tools if tool.name in names or self.callees[tool.name].name in names)


def read_tools(fields: Fields, *added: PlacedTools) -> Tools:
    """The tools in `fields`, and those that items of `input` add: told later, they would tear the prompt."""
    tools: list[Tool] = []
    callees: dict[str, Callee] = {}
    notes: list[str] = []
    for namespace, tool in _flat(fields, *(Fields(item.values, f"input[{i}].") for i, item in added)):
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
    return Tools(tuple(tools), callees, tuple(notes))


_CLIENTS_OWN = ("local_shell", "apply_patch", "computer", "computer_use_preview")


def _is_clients_own(tool: Fields, kind: Any) -> bool:
    """Whether a tool that OpenAI's models know by its type alone is run by the client; a server runs the others."""
    if kind == "shell":
        return tool.object("environment").text("type") not in ("container_auto", "container_reference")
    return kind in _CLIENTS_OWN


def qualified(namespace: str | None, name: str) -> str:
    """A tool's name in the prompt; it is never taken apart again, for the request's own tools say whom it means."""
    return f"{namespace}__{name}" if namespace else name


def _flat(*given: Fields) -> Iterator[tuple[str | None, Fields]]:
    """Each tool with its namespace."""
    for tool in (tool for fields in given for tool in fields.objects("tools")):
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

# Frameworks that know no reasoning item for a model send a message of its reasoning, before the one that it said.
_THOUGHT = re.compile(r"\s*<(think(?:ing)?)>.*</\1>\s*", re.DOTALL)

Stage = Literal["reasoning", "thought", "content", "call"]


@dataclass(frozen=True, slots=True, eq=False)
class _Said:
    """What one item tells of an assistant's message.

    `turn` names the turn of ours that wrote it, where an id shows that; `is_referred`: to what is stored, by that id.
    """

    stage: Stage
    turn: str | None
    texts: tuple[str, ...] = ()
    call: ToolCall | None = None
    is_referred: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _AddedTools:
    """An item that adds tools; they are read among the request's own."""

    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _LeftOut:
    note: str


PlacedTools = tuple[int, _AddedTools]  # and where in `input` the item stands
_Item = Message | _Said | _AddedTools | _LeftOut


Once = Callable[..., Message]  # as `Fields.once`


def read_input(fields: Fields) -> Transcript:
    value = fields.get("input", (str, list), "a text or a list of items")
    if isinstance(value, str):
        return Transcript([Message("user", value)])
    transcript = fields.fold("input", _read_item, Transcript, lambda one, item: one.add(item, fields.once))
    transcript.end_reply(fields.once)
    return transcript


def _assistant(*parts: _Said) -> Message:
    content = Joined.of([text for part in parts if part.stage in ("thought", "content") for text in part.texts])
    return Message(
        role="assistant",
        content=content.text,
        joints=content.joints,
        reasoning="".join(text for part in parts if part.stage == "reasoning" for text in part.texts),
        tool_calls=tuple(part.call for part in parts if part.call is not None),
        turn=next((turn_id(part.turn) for part in parts if part.turn), None),
    )


_IN_THE_MAKING = Message("assistant")  # in the place of a reply that may go on


@dataclass(slots=True)
class _Reply:
    """An assistant's message in the making, the one at `position`."""

    position: int
    parts: list[_Said] = field(default_factory=list)
    turn: str | None = None
    is_referred: bool = False
    has_spoken: bool = False  # or called

    def add(self, part: _Said) -> None:
        self.parts.append(part)
        self.turn = self.turn or part.turn
        self.is_referred |= part.is_referred
        self.has_spoken |= part.stage == "content" or part.call is not None


@dataclass(slots=True)
class Transcript:
    """What the items added so far make. What a turn wrote are items in a row: reasoning, a message, calls.

    `references` names the stored response whose reply stands at a position, where items were sent by their ids alone;
    `added` are the items that add tools; `notes`, all different, tell of items that were left out.
    """

    messages: list[Message] = field(default_factory=list)
    references: dict[int, str] = field(default_factory=dict)
    added: list[PlacedTools] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    _num_items: int = 0
    _last: _Reply | None = None  # further items may belong to it
    _in_a_row: bool = False

    def copy(self) -> Transcript:
        """One that goes on by itself, whatever is added here."""
        last = self._last and replace(self._last, parts=self._last.parts.copy())
        lists = (self.messages.copy(), self.references.copy(), self.added.copy(), self.notes.copy())
        return Transcript(*lists, self._num_items, last, self._in_a_row)

    def add(self, item: _Item, once: Once) -> None:
        match item:
            case _Said():
                self._say(item, once)
            case Message():
                self.messages.append(item)
                self._in_a_row = False  # ids may still say that what follows belongs to the last turn: a parallel call
            case _AddedTools():
                self.added.append((self._num_items, item))
            case _LeftOut():
                self.notes[item.note] = None
        self._num_items += 1

    def end_reply(self, once: Once) -> None:
        """Make the last reply's message, of the parts that it has."""
        if self._last is not None:
            self.messages[self._last.position] = once(_assistant, *self._last.parts)

    def _say(self, part: _Said, once: Once) -> None:
        """Add to the message that an assistant's item belongs to."""
        last = self._last
        if last is None or not self._goes_on(last, part):
            self.end_reply(once)
            last = self._last = _Reply(len(self.messages))
            self.messages.append(_IN_THE_MAKING)
        last.add(part)
        if last.turn and last.is_referred:
            self.references[last.position] = last.turn
        self._in_a_row = True

    def _goes_on(self, last: _Reply, part: _Said) -> bool:
        if part.turn is not None and last.turn is not None:
            return part.turn == last.turn
        # Without ids it is the order that tells: a turn reasons first, says one message, calls last.
        return self._in_a_row and (part.stage == "call" or not last.has_spoken)


def _read_item(item: Fields) -> _Item:
    match _kind(item):
        case "message":
            return _read_message(item)
        case "reasoning":
            return _read_reasoning(item)
        case "function_call":
            arguments = item.get("arguments", str, "a JSON text") or ""
            return _called(item, item.name("name"), arguments)
        case "custom_tool_call":
            text, (_, is_raw) = item.get("input", str, "a text") or "", _called_id(item)
            return _called(item, item.name("name"), text if is_raw else _custom_arguments(text))
        case "local_shell_call":
            return _called(item, "local_shell", _dumped(item, "action"))
        case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
            output = Joined.of(_texts(item.values.get("output"), f"{item.path}output"))
            id = _called_id(item)[0] or item.text("id")
            return Message("tool", output.text, tool_call_id=id, joints=output.joints)
        case "additional_tools":
            return _AddedTools(item.values)
        case "computer_call_output":
            raise invalid(f"{item.path}type", "must not be a screen's picture; images are not supported")
        case "item_reference":
            if _turn(item) is None:
                told = f"refers to an item that is not stored here, {shown(item.values.get('id'))}"
                raise invalid(item.path, f'{told}; send the item itself (clients do so with "store": false)')
            return _Said("call", _turn(item), is_referred=True)
        case kind:
            return _LeftOut(_left_out(kind))


def _turn(item: Fields) -> str | None:
    """The name of the turn of ours that an item's id shows."""
    ours = _OURS.fullmatch(item.text("id") or "")
    return ours[1] if ours else None


def _kind(item: Fields) -> str:
    kind = item.get("type", str, "a text")
    if kind is None:
        kind = "message" if "role" in item.values else "item_reference" if "id" in item.values else None
    if kind is None:
        raise invalid(f"{item.path}type", "is missing")
    return kind


def _read_message(item: Fields) -> Message | _Said:
    role = _ROLES.get(item.text("role") or "")
    if role is None:
        told = f"must be one of {', '.join(_ROLES)}, got {shown(item.values.get('role'))}"
        raise invalid(f"{item.path}role", told)
    texts = _texts(item.values.get("content"), f"{item.path}content")
    content = Joined.of(texts)
    if role != "assistant":
        return Message(role, content.text, joints=content.joints)
    return _Said("thought" if _THOUGHT.fullmatch(content.text) else "content", _turn(item), tuple(texts))


def _read_reasoning(item: Fields) -> _Said | _LeftOut:
    texts = [part.get("text", str, "a text") or "" for part in item.objects("content") or item.objects("summary")]
    sealed = unseal(item.text("encrypted_content") or "")
    text = "".join(texts) or (sealed.reasoning if sealed else "")
    if not text:
        return _LeftOut(_left_out("reasoning"))
    return _Said("reasoning", _turn(item) or (sealed.turn if sealed else None), (text,))


def _called(item: Fields, name: str, arguments: str) -> _Said:
    call = ToolCall(_called_id(item)[0], qualified(item.text("namespace"), name), arguments)
    return _Said("call", _turn(item), call=call)


def _texts(content: Any, path: str) -> list[str]:
    return read_texts(content, path, _PARTS, _REFUSED)


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
