"""A session put together again from its rows: every turn once, whatever branches hold it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush

import msgspec
import numpy as np
import orjson

from stenograph.interchange.columns import MessageRow, Row, TurnRow
from stenograph.interchange.experts import Passes, agreed, known_passes
from stenograph.traces.journal import Journal
from stenograph.traces.payloads import Holder, new_payload
from stenograph.traces.recovery import settled
from stenograph.traces.selection import Branch, Selection
from stenograph.traces.session import Opening, SessionRecord
from stenograph.traces.trace import EMPTY
from stenograph.types import Ids, Message, Payload, Reply, Sampling, Tool, ToolCall, Turn


@dataclass(frozen=True, slots=True)
class Session:
    """A session as it is to be recorded: its turns with what each goes on from, in an order in which that works."""

    opening: Opening
    commits: Sequence[tuple[str | None, Turn]]
    selection: Selection
    reward: float | None
    status: str | None
    turn_rewards: Mapping[str, float]  # by turn
    passes: Mapping[Payload, Passes]  # what the turns hold by handle alone

    def read(self, payload: Payload) -> Passes:
        return self.passes[payload]

    def record(self) -> SessionRecord:
        """The session in memory, sealed, its samples selected."""
        record = SessionRecord(self.opening)
        for parent, turn in self.commits:
            record.commit(parent, [turn])
        record.seal(self.reward, self.status, self.turn_rewards)
        record.settle({}, self.selection)
        return record

    def write(self, journal: Journal) -> None:
        """The same in a journal, released: it was recorded to its end elsewhere. Its payloads stay all the same."""
        record = SessionRecord(self.opening)
        journal.open(self.opening, record.allowed, None)
        for payload, passes in self.passes.items():
            journal.put(payload, passes, _IMPORTED, "")
        for parent, turn in self.commits:
            journal.commit(record, parent, [turn], None)
            record.commit(parent, [turn])
        said = {"reward": self.reward, "status": self.status, "turn_rewards": self.turn_rewards}
        journal.note(record.id, "seal", said, None)
        journal.note(record.id, "settle", settled({}, self.selection), None)
        journal.release([record.id], "all")
        record.tree.release()


_IMPORTED = Holder("checkpoint", "imported")


def session_of(rows: Sequence[Row]) -> Session:
    """Raises ValueError, or msgspec's own, where they cannot be those of one session."""
    metadata = orjson.loads(rows[0]["metadata"])
    if not isinstance(metadata, dict):
        raise ValueError("its metadata is no JSON object")
    if not all(row["turns"] for row in rows):
        raise ValueError("a row has no turns")
    branches = [_branch(row) for row in rows]
    if any(not 0 <= branch.number < 2**31 for branch in branches):
        raise ValueError("a branch has no number from 0 to 2**31 - 1")
    if len({branch.number for branch in branches}) < len(branches):
        raise ValueError("a branch is there twice")
    found = _Found()
    for row in rows:
        _read_messages(row, found)
        _read_turns(row, found)
    opening = Opening(rows[0]["session"], metadata)
    selection = Selection(tuple(branches), {})
    commits = list(_commits(found))
    return Session(
        opening, commits, selection, rows[0]["reward"], rows[0]["status"], _turn_rewards(found), found.payloads
    )


def _branch(row: Row) -> Branch:
    """The row's own turns and length: a turn that a limit cut is recorded as it was cut."""
    spans = row["turns"]
    trains = frozenset(span["turn"] for span in spans if row["loss_mask"][span["start"] : span["end"]].any())
    return Branch(row["branch"], tuple(span["turn"] for span in spans), len(row["ids"]), False, trains)


def _turn_rewards(found: _Found) -> dict[str, float]:
    rewards = {name: sampled.span["reward"] for name, sampled in found.sampled.items()}
    return {name: reward for name, reward in rewards.items() if reward is not None}


# --- what the rows say ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Told:
    """What a turn was asked and answered, after the turn that its conversation goes on from."""

    parent: str | None
    messages: tuple[Message, ...]
    reply: Message
    tools: tuple[Tool, ...]


@dataclass(slots=True)
class _Sampled:
    """A turn's place on its path: `before` is the turn before it there, `routed` the last one that sampled anything.

    `passes` are the rows of experts that all branches agree on, up to the pass that sampled the turn's last token.
    """

    row: Row
    span: TurnRow
    before: str | None
    begin: int  # where the output of `before` ends
    routed: str | None
    passes: Passes | None


@dataclass(slots=True)
class _Found:
    """What a session's rows say of its turns, by their names."""

    told: dict[str, _Told] = field(default_factory=dict)
    sampled: dict[str, _Sampled] = field(default_factory=dict)
    payloads: dict[Payload, Passes] = field(default_factory=dict)


def _read_messages(row: Row, found: _Found) -> None:
    """Cut what was said at the replies that were sampled."""
    tools = tuple(Tool(t["name"], t["description"], orjson.loads(t["parameters"])) for t in row["tools"])
    parent: str | None = None
    asked: list[Message] = []
    for held in row["messages"]:
        message = _message(held)
        if "turn" not in held:
            asked.append(message)
            continue
        found.told.setdefault(held["turn"], _Told(parent, tuple(asked), message, tools))
        parent, asked = held["turn"], []


def _message(row: MessageRow) -> Message:
    calls = [ToolCall(call["id"], **call["function"]) for call in row.get("tool_calls", ())]
    return Message(
        row["role"],
        row["content"],
        row.get("reasoning_content", ""),
        tuple(calls),
        tool_call_id=row.get("tool_call_id"),
        name=row.get("name"),
    )


def _read_turns(row: Row, found: _Found) -> None:
    """Note the turns that are not known from another branch, and what this one knows of the experts of all."""
    before, begin, routed = None, 0, None
    for span in row["turns"]:
        name, passes = span["turn"], known_passes(row, span)
        known = found.sampled.setdefault(name, _Sampled(row, span, before, begin, routed, passes))
        if known.passes is not None and passes is not None:
            known.passes = agreed(known.passes, passes)
        before, begin = name, span["end"]
        routed = name if span["end"] > span["start"] else routed


# --- the turns ------------------------------------------------------------------------------------------------------


def _commits(found: _Found) -> Iterator[tuple[str | None, Turn]]:
    """Every turn after the one that it goes on from, with the name of that."""
    needed: dict[str, list[str]] = {}
    for name in (*found.sampled, *found.told):
        befores = [_parent(found, name), found.sampled[name].before if name in found.sampled else None]
        needed[name] = [before for before in befores if before is not None]
    for name in _in_order(found, needed):
        yield _parent(found, name), _turn(found, name)


def _in_order(found: _Found, needed: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Each after those that it needs, and of what is free the one that was asked for first."""
    sorter = TopologicalSorter(needed)
    try:
        sorter.prepare()
    except CycleError as e:
        raise ValueError(f"turns go on from one another: {', '.join(e.args[1])}") from None
    free: list[tuple[float, str]] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heappush(free, (_started_s(found, name), name))
        _, name = heappop(free)
        yield name
        sorter.done(name)


def _started_s(found: _Found, name: str) -> float:
    return found.sampled[name].span["started_s"] if name in found.sampled else 0.0


def _parent(found: _Found, name: str) -> str | None:
    """A turn that no row's conversation holds goes on from the one before it on its path."""
    return found.told[name].parent if name in found.told else found.sampled[name].before


def _turn(found: _Found, name: str) -> Turn:
    told, sampled = found.told.get(name), found.sampled.get(name)
    if told is None:
        assert sampled is not None
        told = _Told(sampled.before, (), Message("assistant"), ())
    reply = Reply(told.reply.content, told.reply.reasoning, told.reply.tool_calls)
    if sampled is None:  # it was said, and no row holds its tokens
        return Turn(
            id=name,
            context_ids=EMPTY,
            output_ids=EMPTY,
            rollout_logprobs=np.empty(0, np.float32),
            versions=(),
            finish_reason="stop",
            ended_by="eos",
            sampling=Sampling(),
            logprobs_mode="raw",
            messages=told.messages,
            tools=told.tools,
            reply=reply,
            extends=False,
        )
    row, span = sampled.row, sampled.span
    extends = told.parent == sampled.before
    output = slice(span["start"], span["end"])
    return Turn(
        id=name,
        context_ids=row["ids"][sampled.begin if extends else 0 : span["start"]],
        output_ids=row["ids"][output],
        rollout_logprobs=row["rollout_logprobs"][output],
        versions=_versions(row["versions"][output]),
        finish_reason=span["finish_reason"],
        ended_by=span["ended_by"],
        sampling=msgspec.convert(span["sampling"], Sampling),
        logprobs_mode=span["logprobs_mode"],
        messages=told.messages,
        tools=told.tools,
        reply=reply,
        extends=extends,
        role=span["role"],
        role_evidence=span["role_evidence"],
        accepted=tuple(span["accepted"]),
        notes=tuple(span["notes"]),
        stopped_by=span["stopped_by"],
        experts=_kept(found, _own_passes(found, sampled)),
        started_s=span["started_s"],
        seconds=span["seconds"],
    )


def _versions(versions: Ids) -> tuple[tuple[int, int], ...]:
    """Where the policy version changes, and to what."""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
    return tuple((int(start), int(versions[start])) for start in starts)


def _kept(found: _Found, passes: Passes | None) -> Payload | None:
    if passes is None:
        return None
    payload = new_payload(passes)
    found.payloads[payload] = passes
    return payload


def _own_passes(found: _Found, sampled: _Sampled) -> Passes | None:
    """A turn's passes less those that the turn before it has: a session's turns would hold its beginning each."""
    passes = sampled.passes
    if passes is None or sampled.routed is None:
        return passes
    before = found.sampled[sampled.routed]
    if before.passes is None:
        return passes
    begin = sampled.span["end"] - 1 - len(passes)
    begin_before = before.span["end"] - 1 - len(before.passes)
    if begin < begin_before:
        return passes
    return passes[max(0, before.span["end"] - 1 - begin) :]
