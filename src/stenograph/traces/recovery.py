"""A session put together again from what was written of it; what cannot be read is set aside, the rest stands."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, takewhile
from typing import Any, Literal

import orjson

from stenograph.errors import TraceError
from stenograph.traces.selection import Branch, Dropped, Selection
from stenograph.traces.session import Disposition, Ended, SessionRecord
from stenograph.traces.trace import EMPTY, TraceTree
from stenograph.traces.written import WrittenTurn, read
from stenograph.types import Ids, Turn

QUARANTINED = "quarantined"  # in the ledger: why the tokens of turns that were set aside are dropped


@dataclass(frozen=True, slots=True)
class Row:
    """A turn as it was found; `written` is None where not even that could be read."""

    number: int
    written: WrittenTurn | None
    checksum: int = 0
    damage: str = ""  # why `written` is None
    num_sampled: int = 0  # tokens, where that is all that is known


@dataclass(frozen=True, slots=True)
class Event:
    """What became of a session: `mark`, `drop`, `seal` or `settle`, as `SessionRecord` has them, as JSON."""

    number: int
    kind: str
    record: str
    checksum: int = 0
    damage: str = ""  # why there is nothing of it


@dataclass(frozen=True, slots=True)
class SetAside:
    """A turn that could not be read, or whose place is gone, or what became of a session and cannot be read."""

    place: Literal["turns", "events"]
    number: int
    name: str
    reason: str


def event_checksum(kind: str, record: str) -> int:
    return zlib.crc32(f"{kind} {record}".encode())


def restore(record: SessionRecord, rows: Iterable[Row], events: Iterable[Event]) -> list[SetAside]:
    """Fill an empty `record`. Returns what was set aside."""
    aside: list[SetAside] = []
    for _, call in groupby(rows, key=lambda row: row.written.call if row.written else row.number):
        turns: list[Turn] = []
        parent = None
        for row in call:
            try:
                turns.append(_turn(record, row, turns))
                parent = row.written.parent if row.written else None
            except _DAMAGED as e:
                name = row.written.id if row.written else f"number {row.number}"
                aside.append(SetAside("turns", row.number, f"turn {name}", str(e) or repr(e)))
                record.drop(QUARANTINED, len(row.written.output_ids) // 4 if row.written else row.num_sampled)
        if turns:
            record.commit(parent, turns)
    for event in events:
        try:
            if event.damage or event_checksum(event.kind, event.record) != event.checksum:
                raise TraceError(event.damage or _CHANGED)
            _APPLY[event.kind](record, orjson.loads(event.record))
        except _DAMAGED as e:
            aside.append(SetAside("events", event.number, f"event number {event.number}", str(e) or repr(e)))
    return aside


_DAMAGED = (TraceError, ValueError, TypeError, KeyError, AttributeError)
_CHANGED = "it is not what was written (its checksum differs)"


def _turn(record: SessionRecord, row: Row, siblings: Sequence[Turn]) -> Turn:
    """The turn of a row. Raises TraceError, or what its text's reader raises, where it cannot be had."""
    written = row.written
    if written is None:
        raise TraceError(row.damage)
    if written.checksum != row.checksum:
        raise TraceError(_CHANGED)
    for name in (written.parent, written.shared.turn if written.shared else None):
        if name is not None and name not in record.tree and all(name != turn.id for turn in siblings):
            raise TraceError(f"it begins as {name} does, which is set aside")
    parent = record.tree.turn(written.parent) if written.parent is not None else None
    turn = read(written, parent, EMPTY)
    if written.shared is not None:
        turn = read(written, parent, _shared_ids(record, written, turn, siblings))
    record.check(written.parent, [turn])
    return turn


def _shared_ids(record: SessionRecord, written: WrittenTurn, turn: Turn, siblings: Sequence[Turn]) -> Ids:
    assert written.shared is not None
    end = written.shared.num_tokens
    for sibling in siblings:
        if sibling.id == written.shared.turn:
            return sibling.context_ids[:end]
    start = record.tree.node(written.parent).end if turn.extends and written.parent is not None else 0
    return record.tree.path_ids(written.shared.turn)[start : start + end]


# --- what became of it -------------------------------------------------------------------------------------------


def settled(ended: Ended, selection: Selection) -> dict[str, Any]:
    """A `settle` as it is written."""
    turns = {turn: [[one.kind, one.reason, num_tokens] for one, num_tokens in parts] for turn, parts in ended.items()}
    return {"ended": turns, "selection": _selection(selection)}


def _selection(selection: Selection) -> dict[str, Any]:
    branches = [{**asdict(branch), "trains": sorted(branch.trains)} for branch in selection.branches]
    return {"branches": branches, "dropped": {turn: asdict(one) for turn, one in selection.dropped.items()}}


def _read_selection(held: Mapping[str, Any]) -> Selection:
    branches = [
        Branch(**{**branch, "turns": tuple(branch["turns"]), "trains": frozenset(branch["trains"])})
        for branch in held["branches"]
    ]
    return Selection(tuple(branches), {turn: Dropped(**one) for turn, one in held["dropped"].items()})


def _mark(record: SessionRecord, held: Mapping[str, Any]) -> None:
    record.mark((turn for turn in held["turns"] if turn in record.tree), held["state"])


def _drop(record: SessionRecord, held: Mapping[str, Any]) -> None:
    record.drop(held["reason"], held["num_tokens"])


def _seal(record: SessionRecord, held: Mapping[str, Any]) -> None:
    record.seal(held["reward"], held["status"], held.get("turn_rewards", {}))  # older journals have none


def _settle(record: SessionRecord, held: Mapping[str, Any]) -> None:
    ended = {
        turn: [(Disposition(kind, reason), num_tokens) for kind, reason, num_tokens in parts]
        for turn, parts in held["ended"].items()
    }
    selection = _read_selection(held["selection"])
    left = [cut for branch in selection.branches if (cut := _cut(record.tree, branch)) is not None]
    record.settle(ended, Selection(tuple(left), selection.dropped))


def _cut(tree: TraceTree, branch: Branch) -> Branch | None:
    """A branch up to the first turn that is set aside; None where that is its first."""
    turns = tuple(takewhile(lambda turn: turn in tree, branch.turns))
    if turns == branch.turns or not turns:
        return branch if turns else None
    return replace(branch, turns=turns, length=tree.node(turns[-1]).end, truncated=False)


_APPLY: dict[str, Callable[[SessionRecord, Mapping[str, Any]], None]] = {
    "mark": _mark, "drop": _drop, "seal": _seal, "settle": _settle,
}  # fmt: skip
