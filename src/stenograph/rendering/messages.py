"""Canonical records as the plain dicts that templates read; argument text passes through as it was written."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stenograph.errors import RequestError
from stenograph.types import Conversation, Message, Tool

_INSTRUCTIONS = ("system", "developer")
ASK = Message("user", "question")  # a stand-in
MARK, _REASONING_MARK = "Zanswer", "Zreason"  # no template trims or escapes them


@dataclass(frozen=True, slots=True)
class Placement:
    """What has to be done to system messages so that none is refused, dropped or moved.

    `merged`: those at the start become one. `as_user`: those after the start become messages of the user.
    """

    merged: bool = False
    as_user: bool = False


AS_GIVEN = Placement()


def find_placement(render: Callable[[Sequence[Message]], str]) -> Placement:
    """Learn from stand-ins where `render`, which ends with the generation prompt, takes system messages."""
    first, second, answer = Message("system", "Zfirst"), Message("system", "Zsecond"), Message("assistant", MARK)

    def shows(*messages: Message) -> bool:
        """Whether all are there, in their order, with something between them and behind the last."""
        try:
            text = render(messages)
        except Exception:  # renderers and templates raise what they like; one that refuses does not show
            return False
        end = -1
        for message in messages:
            start = text.find(message.content)
            if start <= end:
                return False
            end = start + len(message.content)
        return end < len(text)

    return Placement(
        merged=not shows(first, second, ASK),
        as_user=not (shows(first, ASK, second) and shows(ASK, answer, second)),
    )


def tool_dicts(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Tools in the envelope that chat templates are written for; None where there are none."""
    if not tools:
        return None
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in tools
    ]


def message_dicts(
    conversation: Conversation,
    start: int = 0,
    *,
    placement: Placement = AS_GIVEN,
    parse_arguments: bool = False,
    named_ids: bool = False,
) -> list[dict[str, Any]]:
    """messages[start:]; a tool result without a name takes that of the call it answers, wherever that call stands.

    `start` is 0 or lies behind the system messages at the start. `parse_arguments` is for templates that take an
    object; text that is no JSON stays text. `named_ids` is for a family whose calls have their name in their id alone.
    """
    messages = _with_named_ids(conversation.messages) if named_ids else conversation.messages
    num_leading = 0
    while num_leading < len(messages) and messages[num_leading].role in _INSTRUCTIONS:
        num_leading += 1
    dicts = [_message_dict(messages, i, parse_arguments) for i in range(start, len(messages))]
    if placement.as_user:
        for at, message in enumerate(dicts, start):
            if message["role"] == "system" and at >= num_leading:
                message["role"] = "user"
    if placement.merged and start == 0 and num_leading > 1:
        content = "\n\n".join(message["content"] for message in dicts[:num_leading])
        dicts[:num_leading] = [{"role": "system", "content": content}]
    return dicts


def _with_named_ids(messages: Sequence[Message]) -> Sequence[Message]:
    """`messages` with the ids that the family's models write: the function and the number of the call."""
    named: dict[str, str] = {}
    num_calls = 0
    out = []
    for message in messages:
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                id = call.id if call.id.startswith("functions.") else f"functions.{call.name}:{num_calls}"
                named[call.id] = id
                calls.append(replace(call, id=id))
                num_calls += 1
            message = replace(message, tool_calls=tuple(calls))
        elif message.tool_call_id in named:
            message = replace(message, tool_call_id=named[message.tool_call_id])
        out.append(message)
    return out


def ends_reasoning(messages: Sequence[Message], num_known: int, placement: Placement) -> bool:
    """Whether messages[num_known:] hold a new question and the tool cycle that it ends holds reasoning.

    What lies before the last known question ended the same way when that question was new.
    """
    questions = ("user", *_INSTRUCTIONS) if placement.as_user else ("user",)
    if all(message.role not in questions for message in messages[num_known:]):
        return False
    for message in reversed(messages[:num_known]):
        if message.reasoning:
            return True
        if message.role in questions:
            return False
    return False


def begun_message(conversation: Conversation) -> Message:
    """The message that the agent has begun, less the white space before its text, which no parser keeps."""
    message = conversation.messages[-1]
    if message.role != "assistant":
        raise RequestError(f"only an assistant's message can be continued, got a {message.role}'s; end with one")
    if message.tool_calls:
        raise RequestError("a message that calls tools cannot be continued; leave its calls out, or answer them")
    return message


def opening(render: Callable[[Message | None], str], reasoning: str) -> str | None:
    """What stands between the generation prompt and a reply's content.

    `render` gives a question with the generation prompt, or with a reply. None where no reply continues the prompt, in
    a family that closes empty reasoning, say, in another way than the reasoning that its prompt opens.
    """
    prompt = render(None)
    for thought in (reasoning, _REASONING_MARK, ""):
        before, mark, _ = render(Message("assistant", MARK, thought)).rpartition(MARK)
        if mark and before.startswith(prompt):
            return before[len(prompt) :].replace(_REASONING_MARK, reasoning)
    return None


def _message_dict(messages: Sequence[Message], index: int, parse_arguments: bool) -> dict[str, Any]:
    message = messages[index]
    # Templates know one kind of instruction, and many drop a role that they do not know without a word.
    role = "system" if message.role == "developer" else message.role
    out: dict[str, Any] = {"role": role, "content": message.content}
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {
                "type": "function",
                "id": call.id,
                "function": {
                    "name": call.name,
                    "arguments": _parsed(call.arguments) if parse_arguments else call.arguments,
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    name = message.name or (_called_name(messages, index) if message.role == "tool" else None)
    if name:
        out["name"] = name
    return out


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _called_name(messages: Sequence[Message], index: int) -> str | None:
    """The name in the call that the tool result at `index` answers: the nearest call with its id."""
    wanted = messages[index].tool_call_id
    if wanted is None:
        return None
    for message in reversed(messages[:index]):
        for call in message.tool_calls:
            if call.id == wanted:
                return call.name
    return None
