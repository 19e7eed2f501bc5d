"""A turn as it is written: its arrays as bytes, all else as JSON that leaves out what is as it was in its parent."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import orjson

from stenograph.errors import TraceError
from stenograph.types import Ids, Message, Payload, Reply, Sampling, Tool, ToolCall, Turn


@dataclass(frozen=True, slots=True)
class Shared:
    """The first `num_tokens` of a turn's context are those that stand in the same place on the path to `turn`."""

    turn: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class WrittenTurn:
    """A row. `record` is JSON; arrays are little-endian: ids int32, log-probabilities float32.

    `context_ids` leaves out what is `shared`. `call` is the same for siblings: the id of the first.
    """

    id: str
    parent: str | None
    call: str
    shared: Shared | None
    context_ids: bytes
    output_ids: bytes
    rollout_logprobs: bytes
    record: bytes

    @property
    def checksum(self) -> int:
        """CRC-32 of all of it."""
        names = [self.id, self.parent, self.call, *((self.shared.turn, self.shared.num_tokens) if self.shared else ())]
        parts = (orjson.dumps(names), self.context_ids, self.output_ids, self.rollout_logprobs, self.record)
        checksum = 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        return checksum


def write(turn: Turn, parent: Turn | None, call: str, shared: Shared | None) -> WrittenTurn:
    """Raises TraceError where something in `turn` cannot be written."""
    values = {name: getattr(turn, name) for name in _VALUES if parent is None or not _same(name, turn, parent)}
    try:
        record: dict[str, Any] = {
            name: _WRITE[name](value) if name in _WRITE else value for name, value in values.items()
        }
        record["messages"] = [_message(message) for message in turn.messages]
        record["reply"] = _reply(turn.reply)
        written = orjson.dumps(record)
    except TypeError as e:  # orjson's own errors too
        raise TraceError(f"turn {turn.id} cannot be written: {e}") from e
    return WrittenTurn(
        id=turn.id,
        parent=None if parent is None else parent.id,
        call=call,
        shared=shared,
        context_ids=_bytes(turn.context_ids[shared.num_tokens if shared else 0 :], "<i4"),
        output_ids=_bytes(turn.output_ids, "<i4"),
        rollout_logprobs=_bytes(turn.rollout_logprobs, "<f4"),
        record=written,
    )


def read(row: WrittenTurn, parent: Turn | None, shared_ids: Ids) -> Turn:
    """The turn that `write` was given; `shared_ids` are those that were left out."""
    record = orjson.loads(row.record)
    values = {name: getattr(parent, name) for name in _VALUES} if parent is not None else {}
    for name in _VALUES & record.keys():
        values[name] = _READ[name](record[name]) if name in _READ else record[name]
    context_ids = _ids(row.context_ids)
    return Turn(
        id=row.id,
        context_ids=np.concatenate([shared_ids, context_ids]) if len(shared_ids) else context_ids,
        output_ids=_ids(row.output_ids),
        rollout_logprobs=np.frombuffer(row.rollout_logprobs, "<f4").astype(np.float32),
        messages=tuple(_read_message(message) for message in record["messages"]),
        reply=_read_reply(record["reply"]),
        **values,
    )


_ARRAYS = {"context_ids", "output_ids", "rollout_logprobs"}
_VALUES = {field.name for field in fields(Turn)} - _ARRAYS - {"id", "messages", "reply"}


def _same(name: str, turn: Turn, parent: Turn) -> bool:
    ours, theirs = getattr(turn, name), getattr(parent, name)
    return ours is theirs or ours == theirs


def _bytes(array: np.ndarray, kind: str) -> bytes:
    return array.astype(kind, copy=False).tobytes()


def _ids(written: bytes) -> Ids:
    return np.frombuffer(written, "<i4").astype(np.int32)


# --- what is said ------------------------------------------------------------------------------------------------


def _message(message: Message) -> dict[str, Any]:
    held: dict[str, Any] = {"role": message.role}
    for name in ("content", "reasoning", "tool_call_id", "name", "turn", "joints"):
        if (value := getattr(message, name)) != _UNSAID[name]:  # an empty id is one all the same
            held[name] = value
    return {**held, "tool_calls": _calls(message.tool_calls)} if message.tool_calls else held


_UNSAID = {field.name: field.default for field in fields(Message)}


def _read_message(held: dict[str, Any]) -> Message:
    calls, joints = _read_calls(held.pop("tool_calls", ())), tuple(held.pop("joints", ()))
    return Message(tool_calls=calls, joints=joints, **held)


def _reply(reply: Reply) -> dict[str, Any]:
    held = {"content": reply.content, "reasoning": reply.reasoning, "tool_calls": _calls(reply.tool_calls)}
    return {**held, "num_malformed_calls": reply.num_malformed_calls}


def _read_reply(held: dict[str, Any]) -> Reply:
    return Reply(tool_calls=_read_calls(held.pop("tool_calls")), **held)


def _calls(calls: Sequence[ToolCall]) -> list[list[str]]:
    return [[call.id, call.name, call.arguments] for call in calls]


def _read_calls(held: Sequence[Sequence[str]]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(*call) for call in held)


def _tools(tools: Sequence[Tool]) -> list[list[str]]:
    # Parameters are a text of their own: as deep as they may be, they are not deeper for being in a record.
    return [[tool.name, tool.description, orjson.dumps(tool.parameters).decode()] for tool in tools]


def _read_tools(held: Sequence[Sequence[str]]) -> tuple[Tool, ...]:
    return tuple(Tool(name, description, orjson.loads(parameters)) for name, description, parameters in held)


def _read_sampling(held: Mapping[str, Any]) -> Sampling:
    return Sampling(**{**held, "stop": tuple(held["stop"])})


def _payload(payload: Payload | None) -> dict[str, Any] | None:
    return None if payload is None else asdict(payload)


def _read_payload(held: Mapping[str, Any] | None) -> Payload | None:
    return None if held is None else Payload(held["id"], held["dtype"], tuple(held["shape"]))


_WRITE = {"sampling": asdict, "tools": _tools, "experts": _payload}
_READ = {
    "sampling": _read_sampling,
    "tools": _read_tools,
    "experts": _read_payload,
    "versions": lambda held: tuple(tuple(span) for span in held),
    "accepted": tuple,
    "notes": tuple,
}
