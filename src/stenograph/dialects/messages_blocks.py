"""Blocks of the Messages protocol: what a reply says as blocks is the same reply when they come back.

`input` must be an object: a call's arguments that are none, or that clients could not read or write again, are told as
`{"_raw": "<the text>"}`, streamed or whole, and read back from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeGuard

import orjson

from stenograph.dialects.fields import Fields, Joined, invalid, is_deeper, shown, typed
from stenograph.dialects.minted import turn_id, unseal
from stenograph.errors import RequestError
from stenograph.types import Message, ToolCall

_RAW = "_raw"  # what holds a call's arguments where they are no object
_MAX_DEPTH = 100  # of an `input`; Anthropic's client reads two hundred levels, and a request's body is around it

# --- blocks -> records -------------------------------------------------------------------------------------------


def read_messages(fields: Fields) -> tuple[tuple[Message, ...], list[str], bool]:
    """The messages, notes on what was left out of them, and whether the last is the beginning of the answer."""
    messages, notes = list(fields.whole("system", _system)), []
    given = fields.each("messages", _message)
    if not given:
        raise invalid("messages", "must hold at least one message")
    for made, left_out in given:
        messages += made
        notes += left_out
    continues = messages[-1].role == "assistant"
    if continues:
        _check_begun(messages[-1], f"messages[{len(given) - 1}].content")
    return tuple(messages), notes, continues


def _system(fields: Fields) -> tuple[Message, ...]:
    text = _text(fields, "system")
    return (Message("system", text.text, joints=text.joints),) if text.text else ()


def _message(fields: Fields) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """The messages that one of the protocol's is, and notes on what was left out of it."""
    match fields.text("role"):
        case "user":
            return tuple(_user(fields)), ()
        case "assistant":
            message, notes = _assistant(fields)
            return (message,), tuple(notes)
        case "system" | "developer":  # no chat template in use tells the two apart
            text = _text(fields, "content")
            return (Message("system", text.text, joints=text.joints),), ()
    told = f"must be one of user, assistant, system, got {shown(fields.values.get('role'))}"
    raise invalid(f"{fields.path}role", told)


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
                text = _joined([_said(block) for block in run])
                messages.append(Message("user", text.text, joints=text.joints))
            case "tool_result":
                messages += [_result(block) for block in run]
            case _:
                raise _unknown(next(run))
    return messages or [Message("user")]


def _result(block: Fields) -> Message:
    """A tool's result. Whether it is an error is said by its text; templates know no mark for it."""
    text = _text(block, "content")
    return Message("tool", text.text, tool_call_id=_call_id(block.name("tool_use_id")), joints=text.joints)


def _assistant(fields: Fields) -> tuple[Message, list[str]]:
    texts, thoughts, calls, notes = [], [], [], []
    turn = None
    for block in _blocks(fields, "content"):
        match block.values.get("type"):
            case "text":
                texts.append(_said(block))
            case "thinking" | "redacted_thinking":
                sealed = unseal(block.text("signature") or block.text("data") or "")
                # Where a client left out what was thought, the seal says it; others' seals stay shut.
                thoughts.append(block.text("thinking") or (sealed.reasoning if sealed else ""))
                turn = turn or (sealed and turn_id(sealed.turn))
            case "tool_use":
                calls.append(ToolCall(_call_id(block.name("id")), block.name("name"), _arguments(block)))
            case str(kind) if kind in ("server_tool_use", "mcp_tool_use") or kind.endswith("_tool_result"):
                notes.append(f"left_out:{kind}")
            case _:
                raise _unknown(block)
    # One reply is told in several blocks where its thinking interrupts its text: no separator of ours belongs there.
    text = Joined.of(texts)
    message = Message("assistant", text.text, "".join(thoughts), tuple(calls), turn=turn, joints=text.joints)
    return message, notes


def _blocks(fields: Fields, name: str) -> list[Fields]:
    """The blocks under `name`; a text is one block."""
    content = fields.values.get(name)
    if isinstance(content, str):
        return [Fields({"type": "text", "text": content}, f"{fields.path}{name}.")]
    typed(content or [], list, fields.path + name, "a text or a list of blocks")
    return fields.objects(name)


def _text(fields: Fields, name: str) -> Joined:
    """The text under `name`, where nothing else may stand."""
    return _joined([_said(block) for block in _blocks(fields, name)])


def _joined(texts: Sequence[str]) -> Joined:
    """Blocks are texts apart (a prompt's parts, a reminder behind a question), so a line's end stands between them.

    One block is the same as its text.
    """
    return Joined.of(texts, "\n")


def _said(block: Fields) -> str:
    match block.values.get("type"):
        case "text":
            return block.get("text", str, "a text") or ""
        case "tool_reference":  # a tool that a search found; its definition stands among the tools
            return block.name("tool_name")
    raise _unknown(block)


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


# --- records -> blocks --------------------------------------------------------------------------------------------


def tool_use(call: ToolCall) -> dict[str, Any]:
    """A call's block, without its `input`."""
    return {"type": "tool_use", "id": _wire_id(call.id), "name": call.name}


def tool_input(arguments: str) -> str:
    """The object that tells `arguments`, as JSON; the model's own spelling of it wherever it wrote one."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        value = None
    # An object that looks like the stand-in is told in one, so that it is not taken for it when it comes back.
    told_as_it_is = isinstance(value, dict) and not _stands_in(value) and not is_deeper(value, _MAX_DEPTH)
    return arguments if told_as_it_is else orjson.dumps({_RAW: arguments}).decode()
