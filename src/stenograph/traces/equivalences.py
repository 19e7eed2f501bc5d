"""Differences that real clients make without meaning to, each by its name; what is not on the list is a fork.

What a protocol may spell in several ways is settled in reading, where `dialects` make one record of it: null, empty and
absent content, added nulls, a text or a list with one block, cache markers, an `index`, the name of the reasoning's
field. Here stands what leaves two records different, though the agent means the one that is recorded. Its context stays
the recorded one, so a name here costs the agent nothing but that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from stenograph.dialects.minted import turn_of_call
from stenograph.traces import arguments
from stenograph.types import Message, ToolCall

# Gives `recorded` as the client would send it back if it did this; `recorded` itself where `came` shows no sign of it.
Equivalence = Callable[[Message, Message], Message]


def ids_changed(recorded: Message, came: Message) -> Message:
    """Frameworks give calls ids of their own, or none; the model's text has none to lose."""
    message = recorded
    if recorded.tool_calls and len(recorded.tool_calls) == len(came.tool_calls):
        pairs = zip(recorded.tool_calls, came.tool_calls, strict=True)
        calls = tuple(replace(ours, id=theirs.id) for ours, theirs in pairs)
        message = replace(message, tool_calls=calls) if calls != recorded.tool_calls else message
    # An id of the gateway's own names another call: then it is the results that have changed places.
    if recorded.tool_call_id != came.tool_call_id and turn_of_call(came.tool_call_id or "") is None:
        message = replace(message, tool_call_id=came.tool_call_id)
    return message


def name_changed(recorded: Message, came: Message) -> Message:
    """Frameworks of many agents put an agent's name on its replies, and others a tool's on its results."""
    differs = recorded.name != came.name and recorded.role in ("assistant", "tool")
    return replace(recorded, name=came.name) if differs else recorded


def call_mended(recorded: Message, came: Message) -> Message:
    """A call that no tool takes comes back by its tool's name in lower case, or as another tool's that says why."""
    return _with_calls(recorded, came, _with_their_tool)


def arguments_respelled(recorded: Message, came: Message) -> Message:
    """A client that keeps arguments parsed writes them anew: other spacing, order of keys, escapes and numbers."""
    return _with_arguments(recorded, came, arguments.are_same)


def arguments_mended(recorded: Message, came: Message) -> Message:
    """Arguments that do not parse come back as an empty object, within an object of one key, or repaired."""
    return _with_arguments(recorded, came, arguments.is_mended)


def reasoning_in_content(recorded: Message, came: Message) -> Message:
    """Frameworks without a field for reasoning write it before the text, between the tags that models use."""
    reasoning, opened = recorded.reasoning.strip(), _OPENED.match(came.content)
    if not reasoning or came.reasoning or opened is None or not came.content.startswith(reasoning, opened.end()):
        return recorded
    closed = re.compile(rf"\s*</{opened['tag']}>\s*").match(came.content, opened.end() + len(reasoning))
    if closed is None:
        return recorded
    return replace(recorded, content=came.content[: closed.end()] + recorded.content.lstrip(), reasoning="")


def reasoning_dropped(recorded: Message, came: Message) -> Message:
    """Most frameworks over chat completions keep no reasoning: the protocol's own has none to send back."""
    return replace(recorded, reasoning="") if recorded.reasoning and not came.reasoning else recorded


def whitespace_dropped(recorded: Message, came: Message) -> Message:
    """Models put empty lines before a call; clients drop a text of white space alone, or trim one."""
    message = recorded
    if recorded.content != came.content and _trimmed(recorded) == _trimmed(came):
        message = replace(message, content=came.content)
    if recorded.reasoning != came.reasoning and recorded.reasoning.strip() == came.reasoning.strip():
        message = replace(message, reasoning=came.reasoning)
    return message


def blocks_joined(recorded: Message, came: Message) -> Message:
    """Clients merge a message's blocks of text, or split one at its line ends; what stands between them is the loss."""
    if recorded.content == came.content or not (recorded.joints or came.joints):
        return recorded
    joined = _is_joined(recorded, came.content) or _is_joined(came, recorded.content)
    return replace(recorded, content=came.content) if joined else recorded


def header_changed(recorded: Message, came: Message) -> Message:
    """Claude Code opens its system text with a line like a header, for billing, whose values change in a session."""
    if recorded.role != "system" or recorded.content == came.content:
        return recorded
    ours, theirs = _HEADER.match(recorded.content), _HEADER.match(came.content)
    if ours is None or theirs is None or ours["name"] != theirs["name"]:
        return recorded
    return replace(recorded, content=theirs[0] + recorded.content[ours.end() :])


def results_reordered(answered: Sequence[str | None], id: str | None) -> int | None:
    """Where, in results in a row that answer the calls `answered`, the one stands that answers the call `id`.

    Agents run calls at the same time and may list the results as they ended, or as they were called.
    """
    return answered.index(id) if id is not None and id in answered else None


def reply_split(came: Message, following: Message) -> Message | None:
    """The reply that two messages in a row are; None where they are none.

    Clients keep what arrived of a reply that broke off, if only its beginning, and send it before what came instead.
    """
    if came.role != "assistant" or following.role != "assistant" or came.tool_calls:
        return None
    reasoning = came.reasoning + following.reasoning
    return replace(following, content=came.content + following.content, reasoning=reasoning, joints=())


# In the order in which they are tried: one may leave less for the next.
EQUIVALENCES: dict[str, Equivalence] = {
    equivalence.__name__: equivalence
    for equivalence in (
        ids_changed,
        name_changed,
        call_mended,
        arguments_respelled,
        arguments_mended,
        reasoning_in_content,
        reasoning_dropped,
        whitespace_dropped,
        header_changed,
        blocks_joined,
    )
}
NAMES = (*EQUIVALENCES, results_reordered.__name__, reply_split.__name__)


def undo(recorded: Message, came: Message, allowed: Collection[str] = NAMES) -> tuple[Message, tuple[str, ...]]:
    """`recorded` as near to `came` as the differences in `allowed` bring it, and their names."""
    names = []
    for name, equivalence in EQUIVALENCES.items():
        if name in allowed:
            nearer = equivalence(recorded, came)
            if nearer is not recorded:
                names.append(name)
                recorded = nearer
    return recorded, tuple(names)


def accept(recorded: Message, came: Message, allowed: Collection[str] = NAMES) -> tuple[str, ...] | None:
    """The names of the differences by which `came` is `recorded`; None where some other difference is left."""
    if recorded.role != came.role:
        return None
    nearest, names = undo(recorded, came, allowed)
    return names if nearest == came else None


_OPENED = re.compile(r"\s*<(?P<tag>think(?:ing)?|thought|reasoning)>\s*")
_HEADER = re.compile(r"(?P<name>x-[\w-]+):[ \t]*[\w.-]+=[^\n]*")


def minted_turns(message: Message) -> set[str]:
    """The turns that ids in `message` name, as the gateway gave them out."""
    named = {turn_of_call(call.id) for call in message.tool_calls} | {message.turn}
    return {turn for turn in named if turn is not None}


def _trimmed(message: Message) -> str:
    """A text of code or of a tool keeps the indentation of its first line."""
    return message.content.strip() if message.role == "assistant" else message.content.rstrip().lstrip("\r\n")


def _is_joined(blocks: Message, text: str) -> bool:
    """Whether `text` is what `blocks` holds, but for the line ends where its blocks meet."""
    content = blocks.content
    if not blocks.joints or len(content) - content.count("\n") != len(text) - text.count("\n"):
        return False
    at = 0
    for start, end in zip((0, *blocks.joints), (*blocks.joints, len(content)), strict=True):
        block = content[start:end]
        block = block.lstrip("\n") if start > 0 else block
        block = block.rstrip("\n") if end < len(content) else block
        while start > 0 and text.startswith("\n", at):
            at += 1
        if not text.startswith(block, at):
            return False
        at += len(block)
    return at == len(text)


def _with_arguments(recorded: Message, came: Message, same: Callable[[str, str], bool]) -> Message:
    """`recorded` with the arguments of `came` wherever they differ and are the `same`."""

    def with_theirs(ours: ToolCall, theirs: ToolCall) -> ToolCall:
        differ = ours.name == theirs.name and ours.arguments != theirs.arguments
        return replace(ours, arguments=theirs.arguments) if differ and same(ours.arguments, theirs.arguments) else ours

    return _with_calls(recorded, came, with_theirs)


_INVALID = "invalid"  # opencode's tool for calls that no other takes


def _with_their_tool(ours: ToolCall, theirs: ToolCall) -> ToolCall:
    """That tool takes the name that was called, and what was wrong with the call."""
    if ours.name != theirs.name == ours.name.lower():
        return replace(ours, name=theirs.name)
    if theirs.name == _INVALID != ours.name and arguments.are_complaint(theirs.arguments, ours.name):
        return replace(ours, name=theirs.name, arguments=theirs.arguments)
    return ours


def _with_calls(recorded: Message, came: Message, theirs: Callable[[ToolCall, ToolCall], ToolCall]) -> Message:
    """`recorded` with each of its calls as `theirs` makes it from that one and the one that came in its place."""
    if not recorded.tool_calls or len(recorded.tool_calls) != len(came.tool_calls):
        return recorded
    calls = tuple(theirs(*pair) for pair in zip(recorded.tool_calls, came.tool_calls, strict=True))
    return replace(recorded, tool_calls=calls) if calls != recorded.tool_calls else recorded
