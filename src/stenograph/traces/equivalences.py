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
from typing import Any

import orjson

from stenograph.types import Message, ToolCall

# Gives `recorded` as the client would send it back if it did this; `recorded` itself where `came` shows no sign of it.
Equivalence = Callable[[Message, Message], Message]


def reasoning_in_content(recorded: Message, came: Message) -> Message:
    """Frameworks without a field for reasoning write it before the text, between the tags that models use."""
    found = _TAGGED.match(came.content) if recorded.reasoning and not came.reasoning else None
    if found is None or found["thought"].strip() != recorded.reasoning.strip():
        return recorded
    if found["said"].strip() != recorded.content.strip():
        return recorded
    return replace(recorded, content=came.content, reasoning="")


def reasoning_dropped(recorded: Message, came: Message) -> Message:
    """Most frameworks over chat completions keep no reasoning: the protocol's own has none to send back."""
    return replace(recorded, reasoning="") if recorded.reasoning and not came.reasoning else recorded


def whitespace_dropped(recorded: Message, came: Message) -> Message:
    """Models put empty lines before a call; clients drop a text of white space alone, or trim one."""
    message = recorded
    if recorded.content != came.content and recorded.content.strip() == came.content.strip():
        message = replace(message, content=came.content)
    if recorded.reasoning != came.reasoning and recorded.reasoning.strip() == came.reasoning.strip():
        message = replace(message, reasoning=came.reasoning)
    return message


def blocks_joined(recorded: Message, came: Message) -> Message:
    """Clients merge a message's blocks of text, or split one at its line ends; what stands between them is the loss."""
    inside = recorded.content.strip() != came.content.strip()
    joined = inside and recorded.content.replace("\n", "") == came.content.replace("\n", "")
    return replace(recorded, content=came.content) if joined else recorded


def header_changed(recorded: Message, came: Message) -> Message:
    """Claude Code opens its system text with a line like a header, for billing, whose value changes in a session."""
    if recorded.role != "system" or recorded.content == came.content:
        return recorded
    same = _HEADER.sub(r"\1", recorded.content) == _HEADER.sub(r"\1", came.content)
    return replace(recorded, content=came.content) if same else recorded


def ids_changed(recorded: Message, came: Message) -> Message:
    """Frameworks give calls ids of their own, or none; the model's text has none to lose."""
    message = recorded
    if len(recorded.tool_calls) == len(came.tool_calls):
        calls = tuple(
            replace(call, id=other.id) for call, other in zip(recorded.tool_calls, came.tool_calls, strict=True)
        )
        message = replace(message, tool_calls=calls) if calls != recorded.tool_calls else message
    # An id of the gateway's own names another call: then it is the results that have changed places.
    if recorded.tool_call_id != came.tool_call_id and not _MINTED.fullmatch(came.tool_call_id or ""):
        message = replace(message, tool_call_id=came.tool_call_id)
    return message


def arguments_respelled(recorded: Message, came: Message) -> Message:
    """A client that keeps arguments parsed writes them anew: other spacing, order of keys, escapes and numbers."""
    return _with_arguments(recorded, came, _is_same_json)


def arguments_mended(recorded: Message, came: Message) -> Message:
    """Arguments that do not parse come back as an empty object, within an object of one key, or repaired."""
    return _with_arguments(recorded, came, _mends)


def results_reordered(answered: Sequence[str | None], id: str | None) -> int | None:
    """Where, in results in a row that answer the calls `answered`, the one stands that answers the call `id`.

    Agents run calls at the same time and may list the results as they ended, or as they were called.
    """
    return answered.index(id) if id is not None and id in answered else None


# In the order in which they are tried: one may leave less for the next.
EQUIVALENCES: dict[str, Equivalence] = {
    equivalence.__name__: equivalence
    for equivalence in (
        ids_changed,
        arguments_respelled,
        arguments_mended,
        reasoning_in_content,
        reasoning_dropped,
        whitespace_dropped,
        blocks_joined,
        header_changed,
    )
}
NAMES = (*EQUIVALENCES, results_reordered.__name__)


def accept(recorded: Message, came: Message, allowed: Collection[str] = NAMES) -> tuple[str, ...] | None:
    """The names of the differences by which `came` is `recorded`; None where some other difference is left."""
    if recorded.role != came.role:
        return None
    names = []
    for name, equivalence in EQUIVALENCES.items():
        if recorded == came:
            break
        if name in allowed:
            closer = equivalence(recorded, came)
            if closer is not recorded:
                names.append(name)
                recorded = closer
    return tuple(names) if recorded == came else None


_TAGGED = re.compile(r"\s*<(?P<tag>think(?:ing)?)>(?P<thought>.*?)</(?P=tag)>(?P<said>.*)", re.DOTALL)
_HEADER = re.compile(r"^(x-[\w-]+:).*$", re.MULTILINE)
_MINTED = re.compile(r"call_[0-9a-f]{16}(?:_[0-9]+)+")


def minted_turns(message: Message) -> set[str]:
    """The turns that ids in `message` name, as the gateway gave them out."""
    named = {f"turn_{call.id[5:].rpartition('_')[0]}" for call in message.tool_calls if _MINTED.fullmatch(call.id)}
    return named | ({message.turn} if message.turn is not None else set())


def _with_arguments(recorded: Message, came: Message, same: Callable[[str, str], bool]) -> Message:
    """`recorded` with the arguments of `came` wherever they differ and are the `same`."""
    if len(recorded.tool_calls) != len(came.tool_calls):
        return recorded
    calls = tuple(
        _with_theirs(ours, theirs, same) for ours, theirs in zip(recorded.tool_calls, came.tool_calls, strict=True)
    )
    return replace(recorded, tool_calls=calls) if calls != recorded.tool_calls else recorded


def _with_theirs(ours: ToolCall, theirs: ToolCall, same: Callable[[str, str], bool]) -> ToolCall:
    if ours.arguments == theirs.arguments or ours.name != theirs.name or not same(ours.arguments, theirs.arguments):
        return ours
    return replace(ours, arguments=theirs.arguments)


def _is_same_json(a: str, b: str) -> bool:
    try:
        return bool(_plain(orjson.loads(a)) == _plain(orjson.loads(b)))
    except (orjson.JSONDecodeError, RecursionError):
        return False


def _plain(value: Any) -> Any:
    """JSON in which equality means the same to a client: its numbers are doubles, and true is no number."""
    if isinstance(value, bool):
        return (value,)
    if isinstance(value, int):
        return float(value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value


def _is_object(text: str) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def _mends(raw: str, text: str) -> bool:
    """Whether `text`, an object, is what a client makes of `raw`, which is none."""
    if _is_object(raw):
        return False
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    if not isinstance(value, dict):
        return False
    if len(value) == 1 and raw in value.values():
        return True
    # A repair adds quotes and brackets, or leaves out the end that was cut off: the words stay, from the first one on.
    kept, words = _words(text), _words(raw)
    is_cut = not raw.rstrip().endswith("}")
    return kept == words or not kept or (is_cut and kept == words[: len(kept)])


def _words(text: str) -> list[str]:
    return [word.lower() for word in re.findall(r"\w+", text)]
