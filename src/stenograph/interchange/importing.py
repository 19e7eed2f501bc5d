"""Sessions out of rows: what comes back gives the very same rows again, or is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from stenograph.errors import ConfigError, TraceError
from stenograph.interchange import files
from stenograph.interchange.checking import checked, difference
from stenograph.interchange.rows import MessageRow, Row, TurnRow, session_rows
from stenograph.traces.selection import Branch, Selection
from stenograph.traces.session import Opening, SessionRecord
from stenograph.traces.trace import EMPTY
from stenograph.types import Ids, Message, Reply, Sampling, Tool, ToolCall, Turn

Numbered = tuple[int, Row]  # a row and its number in the file, from 1


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
    passes: NDArray[np.integer] | None


@dataclass(slots=True)
class _Found:
    """What a session's rows say of its turns, by their names."""

    told: dict[str, _Told] = field(default_factory=dict)
    sampled: dict[str, _Sampled] = field(default_factory=dict)


def read_sessions(path: Path) -> Iterator[SessionRecord]:
    """The sessions of a file, one in memory at a time. Raises ConfigError naming the row and what is wrong with it."""
    seen: set[str] = set()
    for session, group in groupby(_checked(path), key=lambda numbered: numbered[1]["session"]):
        rows = list(group)
        if session in seen:
            raise ConfigError(f"{path}, row {rows[0][0]}: session {session} again; put the rows of a session together")
        seen.add(session)
        yield _rebuilt(path, rows)


def _checked(path: Path) -> Iterator[Numbered]:
    for number, row in enumerate(files.read(path), 1):
        try:
            yield number, checked(row)
        except ConfigError as e:
            raise ConfigError(f"{path}, row {number}: {e}") from None


def _rebuilt(path: Path, rows: Sequence[Numbered]) -> SessionRecord:
    first = rows[0][0]
    try:
        record = _record([row for _, row in rows])
        again = list(session_rows(record))
    except (msgspec.ValidationError, orjson.JSONDecodeError, CycleError, TraceError, ValueError) as e:
        raise ConfigError(f"{path}, row {first}: its session cannot be put together: {e}; export it again") from None
    for (number, row), made in zip(rows, again, strict=True):
        if (column := difference(row, made)) is not None:
            told = f"{path}, row {number}: column {column} does not follow from the session's turns"
            raise ConfigError(f"{told}; export the run again, or leave the session out")
    return record


def _record(rows: Sequence[Row]) -> SessionRecord:
    """The session of some rows, sealed, with its samples selected."""
    metadata = orjson.loads(rows[0]["metadata"])
    if not isinstance(metadata, dict):
        raise ValueError("metadata is no JSON object")
    if not all(row["turns"] for row in rows):
        raise ValueError("a row has no turns")
    found = _Found()
    for row in rows:
        _read_messages(row, found)
        _read_turns(row, found)
    record = SessionRecord(Opening(rows[0]["session"], metadata))
    for turn, parent in _in_order(found):
        record.commit(parent, [turn])
    branches = [_branch(row) for row in rows]
    if len({branch.number for branch in branches}) < len(branches):
        raise ValueError("a branch is there twice")
    record.selection = Selection(tuple(branches), {})
    record.seal(rows[0]["reward"], rows[0]["status"])
    return record


def _branch(row: Row) -> Branch:
    """The row's own turns and length: a turn that a limit cut is recorded as it was cut."""
    spans = row["turns"]
    trains = frozenset(span["turn"] for span in spans if row["loss_mask"][span["start"] : span["end"]].any())
    return Branch(row["branch"], tuple(span["turn"] for span in spans), len(row["ids"]), False, trains)


# --- what the rows say ---------------------------------------------------------------------------------------------------


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
        name, passes = span["turn"], _passes(row, span)
        known = found.sampled.setdefault(name, _Sampled(row, span, before, begin, routed, passes))
        if known.passes is not None and passes is not None:
            known.passes = _agreed(known.passes, passes)
        before, begin = name, span["end"]
        routed = name if span["end"] > span["start"] else routed


# --- the turns -----------------------------------------------------------------------------------------------------------


def _in_order(found: _Found) -> Iterator[tuple[Turn, str | None]]:
    """Every turn and the one that it goes on from, parents first."""
    needed: dict[str, list[str]] = {}
    for name in (*found.sampled, *found.told):
        befores = [_parent(found, name), found.sampled[name].before if name in found.sampled else None]
        needed[name] = [before for before in befores if before is not None]
    for name in TopologicalSorter(needed).static_order():
        yield _turn(found, name), _parent(found, name)


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
        experts=_own_passes(found, sampled),
        started_s=span["started_s"],
        seconds=span["seconds"],
    )


def _versions(versions: Ids) -> tuple[tuple[int, int], ...]:
    """Where the policy version changes, and to what."""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[:1] - 1))
    return tuple((int(start), int(versions[start])) for start in starts)


# --- routed experts ------------------------------------------------------------------------------------------------------


def _passes(row: Row, span: TurnRow) -> NDArray[np.integer] | None:
    """The known passes of a branch up to the one that sampled the last token of `span`, without a gap."""
    held = row["experts"]
    if held is None or span["end"] <= span["start"]:
        return None
    dtype: np.dtype[Any] = np.dtype(held["dtype"]).newbyteorder("<")
    experts = np.frombuffer(held["data"], dtype).reshape(held["shape"])
    stop = span["end"] - 1
    unknown = np.flatnonzero(held["mask"][:stop] == 0)
    return experts[unknown[-1] + 1 if len(unknown) else 0 : stop]


def _agreed(one: NDArray[np.integer], other: NDArray[np.integer]) -> NDArray[np.integer]:
    """The last passes of both that are equal, in the smaller of their types."""
    if one is other or one.shape[1:] != other.shape[1:]:
        return one
    num = min(len(one), len(other))
    one, other = one[len(one) - num :], other[len(other) - num :]
    different = np.flatnonzero((one != other).any(axis=(1, 2)))
    held = min(one, other, key=lambda passes: passes.dtype.itemsize)
    return held[different[-1] + 1 if len(different) else 0 :]


def _own_passes(found: _Found, sampled: _Sampled) -> NDArray[np.integer] | None:
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
