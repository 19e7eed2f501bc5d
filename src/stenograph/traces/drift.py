"""Why a branch began: the first difference between what came and what is recorded in its place, and a likely cause."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

import orjson

from stenograph.traces.digests import conversation_labels, message_digests
from stenograph.traces.equivalences import accept, minted_turns, results_reordered, undo
from stenograph.traces.trace import Output, ToldNode, TraceTree, num_equal
from stenograph.types import Conversation, Ids, Message, Tool, Turn

log = logging.getLogger(__name__)

Cause = Literal[
    "template_rewrites_history",
    "reasoning_stripped",
    "arguments_changed",
    "message_changed",
    "message_inserted",
    "history_truncated",
    "compaction",
    "system_changed",
    "tools_changed",
    "unknown",
]
_CONTEXT_CHARS = 40  # of a text before its first difference
_SHOWN_CHARS = 160
_SUMMARY_CHARS = 32  # a reply of fewer is no summary that would be known again
_MOST_BRANCHES = 32  # branches that part in one place
_RECENT_TURNS = 64  # among which the summary is looked for


@dataclass(frozen=True, slots=True)
class Drift:
    """A fork, or a request that would have been one. `message` is an index into the request's messages.

    `before` and `after` are the texts around `char`. `token` is where the branch begins on its path; `rerendered` are
    the tokens of context behind it, where replies that were recorded before are among them. `setting` names what would
    accept the difference.
    """

    turn: str
    parent_turn: str | None
    message: int | None
    role: str | None
    field: str | None
    before: str | None
    after: str | None
    char: int | None
    token: int
    cause: Cause
    setting: str | None = None
    rerendered: int = 0


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request, recorded or not: what is new in it after the reply of `before`.

    `met` are the turns that were asked for until then: what stands in its place is the first that was not. None: all.
    """

    before: Output | None
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    met: Collection[str] | None = None

    @property
    def start(self) -> int:
        return 0 if self.before is None else self.before.num_messages

    def said(self, tree: TraceTree, start: int) -> tuple[Message, ...]:
        known = () if self.before is None else tree.said(self.before.turn.id, start)
        return (*known, *self.messages)


@dataclass(frozen=True, slots=True)
class _Difference:
    """What differs first, and why, as far as can be told."""

    cause: Cause
    message: int | None = None
    role: str | None = None
    field: str | None = None
    before: str = ""
    after: str = ""
    setting: str | None = None

    @property
    def char(self) -> int | None:
        if self.field is None:
            return None
        n = min(len(self.before), len(self.after))
        return next((i for i in range(n) if self.before[i] != self.after[i]), n)


def explain(tree: TraceTree, turn: Turn, token: int, allowed: Collection[str]) -> Drift:
    """Describe the fork at `token` with which `turn`, in the tree already, begins a branch."""
    try:
        return _explain(tree, turn, token, allowed)
    except Exception:  # the turn is recorded, and that it begins a branch is known whatever is wrong here
        log.exception("the fork of %s could not be explained", turn.id)
        return Drift(turn.id, tree.parent(turn.id), None, None, None, None, None, None, token, "unknown")


def _explain(tree: TraceTree, turn: Turn, token: int, allowed: Collection[str]) -> Drift:
    parent = tree.parent(turn.id)
    rewritten = parent is not None and not turn.extends
    asked = _Asked(tree.node(turn.id).before, turn.messages, turn.tools)
    found = _rewritten(tree, parent, token) if rewritten else _difference(tree, asked, allowed)
    behind = turn.messages[max((found.message or 0) - asked.start, 0) :]
    again = rewritten or any(message.role == "assistant" for message in behind)
    return _record(found, turn.id, parent, token, tree.node(turn.id).start - token if again else 0)


def compare(
    tree: TraceTree,
    asked: Conversation,
    parent: str | None,
    ids: Ids,
    allowed: Collection[str],
    met: Collection[str],
) -> Drift:
    """Describe how a request whose prompt `ids` is that of no turn differs from those that were recorded.

    `asked` has what `parent` knows as it is recorded; `met` are the turns that were asked for before. The `turn` of
    what is returned is the one that stands in the request's place, "" where the record has nothing there; `token` is
    the first that no turn was told.
    """
    new = _Asked(None if parent is None else tree.node(parent), asked.messages, asked.tools, met)
    new = replace(new, messages=asked.messages[new.start :])
    token = max((num_equal(tree.path_ids(leaf), ids) for leaf in tree.leaves()), default=0)
    labels, at = _labels(tree, new)
    told = tree.told.search(labels, at=at)
    if told.length < len(labels):
        found = _difference(tree, new, allowed)
        other, _ = _other(tree, new, allowed)
        return _record(found, _in_place(tree, other, found.message or 0), parent, token, 0)
    answered = [child for child in told.nodes[-1].children if child.has_value]
    if answered and token < len(ids):  # the very same was asked, and rendered to other ids then
        return _record(_Difference("template_rewrites_history"), answered[-1].value[-1], parent, token, 0)
    other = tree.first_below(told.nodes[-1])
    found = _Difference("history_truncated", len(asked.messages), tree.message(other, len(asked.messages)).role)
    return _record(found, other, parent, token, 0)


def _in_place(tree: TraceTree, turn: str | None, index: int) -> str:
    """The first turn on the way to `turn` that was told the message at `index`."""
    while turn is not None and (before := tree.node(turn).before) is not None and before.num_messages > index:
        turn = before.turn.id
    return turn or ""


def _record(found: _Difference, turn: str, parent: str | None, token: int, rerendered: int) -> Drift:
    char = found.char
    cut = slice(max(0, (char or 0) - _CONTEXT_CHARS), (char or 0) + _SHOWN_CHARS)
    return Drift(
        turn=turn,
        parent_turn=parent,
        message=found.message,
        role=found.role,
        field=found.field,
        before=found.before[cut] if found.field else None,
        after=found.after[cut] if found.field else None,
        char=char,
        token=token,
        cause=found.cause,
        setting=found.setting,
        rerendered=rerendered,
    )


def _difference(tree: TraceTree, new: _Asked, allowed: Collection[str]) -> _Difference:
    other, start = _other(tree, new, allowed)
    if other is None:
        return _Difference("unknown")
    said, asked = tree.said(other, start), new.said(tree, start)
    index = _first_difference(said, asked, allowed)
    tools = tree.turn(other).tools
    if tools != new.tools and (index > 0 or said[0].role != "system"):
        return _Difference("tools_changed", None, None, "tools", *_told(tools, new.tools))
    if index in (len(said), len(asked)):
        return _Difference("history_truncated" if index < len(said) else "unknown", start + index)
    return replace(_between(tree, said, asked, index, allowed), message=start + index)


def _rewritten(tree: TraceTree, parent: str | None, token: int) -> _Difference:
    """All messages are as recorded, and their ids are not: the first reply that the fork cuts off is what changed."""
    assert parent is not None
    turn = next((turn for turn in tree.path_turns(parent) if tree.node(turn).end > token), parent)
    recorded = tree.node(turn)
    field = "reasoning" if recorded.turn.reply.reasoning else None
    return _Difference(
        "template_rewrites_history",
        recorded.num_messages - 1,
        "assistant",
        field,
        recorded.turn.reply.reasoning,
        "",
        "model.thinking_retention" if field else None,
    )


def _first_difference(said: Sequence[Message], asked: Sequence[Message], allowed: Collection[str]) -> int:
    """The index of the first message that differs; where none does, that of the first that only one of them has."""
    differing = [i for i, (ours, theirs) in enumerate(zip(said, asked, strict=False)) if ours != theirs]
    found = next((i for i in differing if not _is_same(said[i], asked[i], allowed)), None)
    if found is None:  # what no reply follows is never taken back to what is recorded
        found = next((i for i in differing if all(one.role != "assistant" for one in asked[i:])), None)
    return min(len(said), len(asked)) if found is None else found


def _other(tree: TraceTree, new: _Asked, allowed: Collection[str]) -> tuple[str | None, int]:
    """The recorded turn to compare with, and from which message on.

    It is the one that ids in the last reply name, else the last of those that say the same longest.
    """
    if not new.messages:  # nothing was asked, or nobody knows what
        return None, 0
    last = next((message for message in reversed(new.messages) if message.role == "assistant"), None)
    named = next((name for name in minted_turns(last) if name in tree), None) if last is not None else None
    if named is not None:  # and it is not what is gone on from, or this would be no message of the request's own
        return named, 0
    (labels, at), start = _labels(tree, new), new.start
    path = tree.told.search(labels, at=at).nodes
    for depth, (node, label) in reversed(list(enumerate(zip(path, labels, strict=False)))):
        others = [child for child in node.children if child.label != label][-_MOST_BRANCHES:]
        if not others:
            continue
        index = start + depth - (1 if new.before is None else 0)
        if index < start:  # other tools: of the conversations with them, one that begins with the same message
            index, others = start, [child for other in others for child in other.children][-_MOST_BRANCHES:]
        asked = new.messages[index - start]
        told = [(child, tree.message(tree.first_below(child), index)) for child in others]
        alike = [child for child, message in told if _is_same(message, asked, allowed)]
        alike = alike or [child for child, message in told if message.role == asked.role] or others
        left = (child for child in alike if new.met is not None and tree.first_below(child) not in new.met)
        return tree.last_below(next(left, alike[-1])), start
    return None, 0


def _labels(tree: TraceTree, new: _Asked) -> tuple[Sequence[bytes], ToldNode]:
    """What a request is looked for by, and from where on."""
    if new.before is not None:
        return message_digests(new.messages), new.before.told
    return conversation_labels(Conversation(new.messages, new.tools)), tree.told.root


def _is_same(ours: Message, theirs: Message, allowed: Collection[str]) -> bool:
    return ours == theirs or accept(ours, theirs, allowed) is not None


def _between(
    tree: TraceTree, said: Sequence[Message], asked: Sequence[Message], index: int, allowed: Collection[str]
) -> _Difference:
    """The difference between two messages in the same place, less what is accepted of it."""
    before, after = said[index], asked[index]
    nearest, _ = undo(before, after, allowed)
    field, old, new = _field(nearest if nearest != after else before, after)
    cause = _cause(tree, said, asked, index, field)
    off = [name for name in accept(before, after) or () if name not in allowed]
    if results_reordered.__name__ not in allowed and _results(said, index) == _results(asked, index) != []:
        off.append(results_reordered.__name__)
    if off:
        cause = _CAUSES.get(off[0], cause)
    setting = ", ".join(f"matching.{name}" for name in off) or None
    return _Difference(cause, index, after.role, field, old, new, setting)


def _results(messages: Sequence[Message], index: int) -> list[bytes]:
    """The results in a row from `index` on, in no order."""
    run = takewhile(lambda message: message.role == "tool", messages[index:])
    return sorted(message_digests(run))


_CAUSES: dict[str, Cause] = {
    "reasoning_dropped": "reasoning_stripped",
    "reasoning_in_content": "reasoning_stripped",
    "arguments_respelled": "arguments_changed",
    "arguments_mended": "arguments_changed",
    "results_reordered": "message_changed",
}


def _cause(tree: TraceTree, said: Sequence[Message], asked: Sequence[Message], index: int, field: str) -> Cause:
    before, after = said[index], asked[index]
    if len(asked) < len(said) and _goes_on_from_summary(tree, asked[index:]):
        return "compaction"
    if message_digests([before])[0] in message_digests(asked[index + 1 :]):
        return "message_inserted"
    if message_digests([after])[0] in message_digests(said[index + 1 :]):
        return "history_truncated"
    if "system" in (before.role, after.role):
        return "system_changed"
    if before.role == after.role == "assistant":
        if field == "reasoning" and not after.reasoning:
            return "reasoning_stripped"
        if field == "arguments":
            return "arguments_changed"
        if field == "content" and before.content.startswith(after.content):
            return "history_truncated"  # of a reply, its beginning
    return "message_changed"


def _goes_on_from_summary(tree: TraceTree, asked: Sequence[Message]) -> bool:
    """Whether a message that is no reply quotes one, or the first reply is one that sums a conversation up."""
    recent = list(tree.turns.values())[-_RECENT_TURNS:]
    replies = {turn.reply.content: turn.role for turn in recent if len(turn.reply.content) >= _SUMMARY_CHARS}
    if asked[0].role != "assistant" and any(reply in asked[0].content for reply in replies):
        return True
    first = next((message.content for message in asked if message.role == "assistant"), "")
    return replies.get(first) == "compaction"


def _field(before: Message, after: Message) -> tuple[str, str, str]:
    """The first field that differs, and its two texts."""
    for name in ("role", "content", "reasoning"):
        if getattr(before, name) != getattr(after, name):
            return name, getattr(before, name), getattr(after, name)
    for ours, theirs in zip(before.tool_calls, after.tool_calls, strict=False):
        for name in ("name", "arguments", "id"):
            if getattr(ours, name) != getattr(theirs, name):
                return name, getattr(ours, name), getattr(theirs, name)
    if len(before.tool_calls) != len(after.tool_calls):
        return "tool_calls", _called(before), _called(after)
    if before.tool_call_id != after.tool_call_id:
        return "tool_call_id", before.tool_call_id or "", after.tool_call_id or ""
    return "name", before.name or "", after.name or ""


def _told(before: Sequence[Tool], after: Sequence[Tool]) -> tuple[str, str]:
    """The tools' names, or, where those are the same, what is said of the first that differs."""
    names = tuple(", ".join(tool.name for tool in tools) for tools in (before, after))
    differs = next(((ours, theirs) for ours, theirs in zip(before, after, strict=False) if ours != theirs), None)
    if names[0] != names[1] or differs is None:
        return names[0], names[1]
    ours, theirs = (f"{tool.name}: {tool.description} {orjson.dumps(tool.parameters).decode()}" for tool in differs)
    return ours, theirs


def _called(message: Message) -> str:
    return ", ".join(call.name for call in message.tool_calls)
