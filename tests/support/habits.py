"""What clients change of what they were answered without meaning to, by the names that the record has for it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stenograph.types import ToolCall
from support.wires import Item, Protocol


@dataclass(frozen=True, slots=True)
class Entry:
    """A message as it was said first, as it is sent now, and the names of what differs."""

    said: Item
    sent: Item
    names: frozenset[str] = frozenset()

    def shows_turn(self, protocol: Protocol) -> bool:
        """Whether ids go with a reply that name its turn."""
        calls = bool(self.said.calls) and "ids_changed" not in self.names
        in_text = (protocol == "messages" and self.sent.signature) or (protocol == "responses" and self.sent.turn)
        return calls or bool(in_text)

    def changed(self, name: str, **fields: Any) -> Entry:
        return replace(self, sent=replace(self.sent, **fields), names=self.names | {name})


History = tuple[Entry, ...]
Habit = Callable[[History, Protocol, random.Random], History]


def _each_reply(change: Callable[[Entry, Protocol, random.Random], Entry]) -> Habit:
    """A habit that changes one of the replies in which there is something to change."""

    def habit(history: History, protocol: Protocol, chance: random.Random) -> History:
        replies = [i for i, entry in enumerate(history) if entry.said.role == "assistant"]
        for i in chance.sample(replies[::-1], len(replies)) if chance.random() < 0.5 else replies[::-1]:
            changed = change(history[i], protocol, chance)
            if changed is not history[i]:
                return (*history[:i], changed, *history[i + 1 :])
        return history

    return habit


def is_malformed(arguments: str) -> bool:
    """Whether these are no object, so that a client cannot call a function with them."""
    return not isinstance(json.loads(arguments), dict)


def _respelled(entry: Entry, protocol: Protocol, chance: random.Random) -> Entry:
    def respell(call: ToolCall) -> ToolCall:
        if is_malformed(call.arguments) or call.name == _COMPLAINS:
            return call
        value = _renumbered(json.loads(call.arguments), chance)
        value = dict(chance.sample(list(value.items()), len(value)))
        separators = chance.choice([(",", ":"), (", ", ": ")])
        return replace(call, arguments=json.dumps(value, separators=separators, ensure_ascii=chance.random() < 0.5))

    calls = tuple(map(respell, entry.sent.calls))
    if calls == entry.sent.calls:
        return entry
    respelled = [
        (call, before)
        for call, before, said in zip(calls, entry.sent.calls, entry.said.calls, strict=True)
        if call != before and not is_malformed(said.arguments)  # those were mended, in whatever spelling
    ]
    # The protocol of messages carries objects, not their spelling.
    if not any(protocol != "messages" or _differ(*pair) for pair in respelled):
        return replace(entry, sent=replace(entry.sent, calls=calls))
    return entry.changed("arguments_respelled", calls=calls)


def _differ(a: ToolCall, b: ToolCall) -> bool:
    return json.dumps(json.loads(a.arguments), sort_keys=True) != json.dumps(json.loads(b.arguments), sort_keys=True)


def _renumbered(value: Any, chance: random.Random) -> Any:
    """Whole floats as integers, as JavaScript writes them."""
    if isinstance(value, dict):
        return {key: _renumbered(one, chance) for key, one in value.items()}
    if isinstance(value, list):
        return [_renumbered(one, chance) for one in value]
    whole = isinstance(value, float) and value.is_integer() and chance.random() < 0.5
    return int(value) if whole else value


def _mended(entry: Entry, protocol: Protocol, chance: random.Random) -> Entry:
    def mend(call: ToolCall) -> ToolCall:
        if not is_malformed(call.arguments):
            return call
        text = json.loads(call.arguments)
        if isinstance(text, str) and text.startswith('{"') and chance.random() < 0.5:
            return replace(call, arguments=f"{text}]}}")  # an agent's repair of what the model left open
        key = chance.choice(["raw", "input", "_invalid", "INVALID_JSON"])
        return replace(call, arguments=chance.choice(["{}", json.dumps({key: call.arguments})]))

    calls = tuple(map(mend, entry.sent.calls))
    return entry if calls == entry.sent.calls else entry.changed("arguments_mended", calls=calls)


def _called_otherwise(entry: Entry, protocol: Protocol, chance: random.Random) -> Entry:
    """A call that cannot be made, as one of a tool that takes what is wrong with it."""

    def complain(call: ToolCall) -> ToolCall:
        if not is_malformed(call.arguments):
            return call
        return replace(call, name=_COMPLAINS, arguments=json.dumps({"tool": call.name, "error": "no object"}))

    calls = tuple(map(complain, entry.sent.calls))
    return entry if calls == entry.sent.calls else entry.changed("call_mended", calls=calls)


def _without_reasoning(entry: Entry, protocol: Protocol, chance: random.Random) -> Entry:
    if not entry.sent.reasoning:
        return entry
    return entry.changed("reasoning_dropped", reasoning="", signature="")


def _reasoning_in_content(entry: Entry, protocol: Protocol, chance: random.Random) -> Entry:
    if not entry.sent.reasoning:
        return entry
    texts = entry.sent.texts or ("",)
    texts = (f"<think>\n{entry.sent.reasoning}\n</think>\n\n{texts[0]}", *texts[1:])
    return entry.changed("reasoning_in_content", reasoning="", signature="", texts=texts)


def _stripped(entry: Entry, protocol: Protocol, chance: random.Random) -> Entry:
    """Without outer white space. It takes a reply with some, which few families' parsers leave."""
    text = "".join(entry.sent.texts)
    stripped = text.strip()
    if text == stripped or "reasoning_in_content" in entry.names:
        return entry
    return entry.changed("whitespace_dropped", texts=(stripped,) if stripped else ())


def _joined(entry: Entry, protocol: Protocol, chance: random.Random) -> Entry:
    """Blocks as one, or a text in blocks at its lines' ends."""
    texts = entry.sent.texts
    if len(texts) > 1:
        return entry.changed("blocks_joined", texts=("\n".join(texts),))
    lines = tuple(texts[0].split("\n")) if texts else ()
    return entry.changed("blocks_joined", texts=lines) if len(lines) > 1 and all(lines) else entry


def _with_other_ids(history: History, protocol: Protocol, chance: random.Random) -> History:
    """The ids of one reply's calls, and those of their results, dropped or replaced alike."""
    callers = [i for i, entry in enumerate(history) if any(call.id for call in entry.sent.calls)]
    if not callers:
        return history
    i = callers[-1] if chance.random() < 0.5 else chance.choice(callers)
    drops = protocol == "chat" and chance.random() < 0.3
    made = [f"{chance.choice(['call', 'toolu', 'functions.f:'])}_{chance.getrandbits(40):x}" for _ in range(3)]
    old = [call.id for call in history[i].sent.calls]
    new = dict(zip(old, [""] * len(old) if drops else made, strict=False))
    calls = tuple(replace(call, id=new[call.id]) for call in history[i].sent.calls)
    turn = "" if protocol == "responses" else history[i].sent.turn
    entries = list(history)
    entries[i] = history[i].changed("ids_changed", calls=calls, turn=turn)
    for j in range(i + 1, len(history)):
        if history[j].sent.role != "tool":
            break
        answers = new.get(history[j].sent.answers, history[j].sent.answers)
        entries[j] = history[j].changed("ids_changed", answers=answers)
    return tuple(entries)


_COMPLAINS = "invalid"
HABITS: Mapping[str, Habit] = {
    "call_mended": _each_reply(_called_otherwise),
    "arguments_respelled": _each_reply(_respelled),
    "arguments_mended": _each_reply(_mended),
    "ids_changed": _with_other_ids,
    "reasoning_dropped": _each_reply(_without_reasoning),
    "reasoning_in_content": _each_reply(_reasoning_in_content),
    "whitespace_dropped": _each_reply(_stripped),
    "blocks_joined": _each_reply(_joined),
}
# Those about more than one message: how a request as a whole is written.
WHOLE_HABITS = ("results_reordered", "header_changed")


def reordered(history: Sequence[Entry], chance: random.Random) -> list[Entry]:
    """`history` with the results of parallel calls that were answered already in another order.

    Results without ids answer by their place.
    """
    ordered = list(history)
    last_reply = max((i for i, entry in enumerate(history) if entry.said.role == "assistant"), default=0)
    start = 0
    while start < last_reply:
        end = start
        while end < last_reply and history[end].sent.role == "tool" and history[end].sent.answers:
            end += 1
        if end - start > 1:
            run = ordered[start:end]
            ordered[start:end] = run[1:] + run[:1] if chance.random() < 0.5 else run[::-1]
        start = max(end, start + 1)
    return ordered
