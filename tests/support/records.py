"""Sessions at random, of few ids and words, so that whatever can coincide does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import numpy as np

from stenograph.config import SelectConfig
from stenograph.interchange.columns import Row
from stenograph.interchange.rows import session_rows
from stenograph.traces.payloads import Holder, MemoryPayloads
from stenograph.traces.selection import DEFAULT
from stenograph.traces.session import Disposition, Opening, SessionRecord
from stenograph.types import (
    BranchRole,
    EndedBy,
    FinishReason,
    LogprobsMode,
    Message,
    Payload,
    Reply,
    Role,
    Sampling,
    Tool,
    ToolCall,
    Turn,
)

WORDS = ("", "hi", "Grüße, 世界\n", '{"a": 1.0}', "\u0000 and \U0001f600", "  ")
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.0, seed=7),
    Sampling(top_p=0.9, top_k=5, min_p=0.1, stop=("\n\n", "ende")),
    Sampling(temperature=0.7, presence_penalty=0.5, repetition_penalty=1.1, max_tokens=1),
)
TOOLS = (
    (),
    (Tool("look", "looks", {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": [1, None]}}}),),
    (Tool("look", "looks", {}), Tool("write", "", {"x": [1.5, {"y": "ü"}]})),
)
SELECTS = (
    SelectConfig(),
    SelectConfig(tokens="every_branch", unadopted="keep"),
    SelectConfig(max_tokens=9, overlong="truncate"),
    SelectConfig(max_tokens=14, overlong="truncate", tokens="every_branch", unadopted="keep"),
    SelectConfig(max_tokens=12, overlong="drop"),
    SelectConfig(roles=("compaction", "title"), unadopted="keep"),
    SelectConfig(roles=get_args(BranchRole), unadopted="keep"),
)


_PAYLOADS = MemoryPayloads()  # of all of them


def random_records(seed: int, number: int) -> Iterator[tuple[SessionRecord, SelectConfig]]:
    """Sessions and how they are to be selected; every other one is settled so."""
    chance = random.Random(seed)
    for n in range(number):
        select = chance.choice(SELECTS)
        yield random_record(f"steno_{seed}_{n}", chance, select), select


def random_record(session: str, chance: random.Random, select: SelectConfig) -> SessionRecord:
    metadata = {"rollout_id": f"r {session}", "group_id": chance.choice([None, "g", 3]), "ü": [1, 2.5, {"deep": None}]}
    record = SessionRecord(Opening(session, metadata))
    routed = chance.choice([None, None, np.uint8, np.uint16])
    parents: list[str] = []
    for n in range(chance.randint(1, 9)):
        way = chance.choice(["on", "on", "on", "rewritten", "anew"]) if parents else "anew"
        parent = chance.choice(parents[-2:]) if way != "anew" else None
        asked = _asked(record, parent, way == "rewritten", chance)
        turns = [_turn(f"{session}.{n}.{i}", asked, chance, routed) for i in range(chance.choice([1, 1, 2, 3]))]
        record.commit(parent, turns)
        parents += [turn.id for turn in turns]
    rewards = [chance.choice([-0.5, 0.0, 1 / 3]) for _ in range(chance.randint(0, len(record.tree.turns)))]
    record.seal(chance.choice([None, 0.0, 1.25]), chance.choice([None, "completed"]), record.by_turn(rewards))
    if chance.random() < 0.5:
        record.settle(*record.ending(Disposition("trained"), select))
    return record


def rows_of(record: SessionRecord, select: SelectConfig = DEFAULT) -> Iterator[Row]:
    return session_rows(record, _PAYLOADS.get, select)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What siblings have in common; `start` is where their outputs begin."""

    context: list[int]
    start: int
    extends: bool
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]


def _asked(record: SessionRecord, parent: str | None, rewritten: bool, chance: random.Random) -> _Asked:
    known = list(record.tree.turns)
    before = record.tree.node(parent).end if parent is not None and not rewritten else 0
    context = _ids(chance, 0 if before else 1, 4)
    if known and not before and chance.random() < 0.8:  # along any path, and then something else
        path = record.tree.path_ids(chance.choice(known)).tolist()
        context = path[: chance.randint(0, len(path))] + context
    messages = tuple(_message(chance) for _ in range(chance.randint(1, 3)))
    tools = record.tree.turn(parent).tools if parent is not None else chance.choice(TOOLS)
    return _Asked(context, before + len(context), not rewritten, messages, tools)


def _turn(name: str, asked: _Asked, chance: random.Random, routed: type | None) -> Turn:
    output = _ids(chance, 0, 4)
    cut = sorted({0, *(chance.randrange(len(output)) for _ in range(2))}) if output else []
    return Turn(
        id=name,
        context_ids=np.array(asked.context, np.int32),
        output_ids=np.array(output, np.int32),
        rollout_logprobs=-np.array([chance.random() for _ in output], np.float32),
        versions=tuple((start, 3 + n) for n, start in enumerate(cut)),
        finish_reason=chance.choice(get_args(FinishReason)),
        ended_by=chance.choice(get_args(EndedBy)),
        sampling=chance.choice(SAMPLINGS),
        logprobs_mode=chance.choice(get_args(LogprobsMode)),
        messages=asked.messages,
        tools=asked.tools,
        reply=Reply(chance.choice(WORDS), chance.choice(WORDS), _calls(chance)),
        extends=asked.extends,
        role=chance.choice(get_args(BranchRole)) if chance.random() < 0.4 else "main",
        role_evidence=chance.choice(["", "tools differ"]),
        accepted=chance.choice([(), ("key_order", "ids_dropped")]),
        notes=chance.choice([(), ("clamped:max_tokens",)]),
        stopped_by=chance.choice([None, "ende"]),
        experts=_experts(asked.start, len(output), chance, routed),
        started_s=chance.random() * 1e9,
        seconds=chance.random(),
    )


def _ids(chance: random.Random, low: int, high: int) -> list[int]:
    return [chance.randint(0, 2) for _ in range(chance.randint(low, high))]


def _experts(start: int, num_tokens: int, chance: random.Random, routed: type | None) -> Payload | None:
    if routed is None or not num_tokens:
        return None
    rows = chance.choice([num_tokens, start + num_tokens - 1, chance.randint(num_tokens, start + num_tokens - 1)])
    dtype = chance.choice([np.uint8, routed])
    values = [chance.randint(0, 1) for _ in range(rows * 4)]
    return _PAYLOADS.put(np.array(values, dtype).reshape(rows, 2, 2), Holder("checkpoint", "random"))


def _message(chance: random.Random) -> Message:
    role: Role = chance.choice(get_args(Role))
    calls = _calls(chance) if role == "assistant" else ()
    answers = chance.choice([None, "call_1"]) if role == "tool" else None
    named = chance.choice([None, "turn_of_a_client"])
    return Message(role, chance.choice(WORDS), "", calls, answers, chance.choice([None, "bob"]), turn=named)


def _calls(chance: random.Random) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(f"call_{n}", "look", chance.choice(WORDS)) for n in range(chance.choice([0, 0, 1, 2])))
