"""The columns of a row, the same in every format; docs/interchange.md says what they mean."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from stenograph.types import BranchRole, EndedBy, FinishReason, LogprobsMode, Role


class Called(TypedDict):
    name: str
    arguments: str  # as the model wrote them


class CallRow(TypedDict):
    id: str
    type: str
    function: Called


class MessageRow(TypedDict):
    """A message of chat completions; `turn` names the turn that sampled it."""

    role: Role
    content: str
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CallRow]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    turn: NotRequired[str]


class ToolRow(TypedDict):
    name: str
    description: str
    parameters: str  # JSON


class TurnRow(TypedDict):
    """Whose output ids[start:end] is, and how it was sampled."""

    turn: str
    start: int
    end: int
    role: BranchRole
    role_evidence: str
    ended_by: EndedBy
    finish_reason: FinishReason
    stopped_by: str | None
    sampling: dict[str, Any]  # every field of Sampling
    temperature: float
    top_p: float
    logprobs_mode: LogprobsMode
    accepted: list[str]
    notes: list[str]
    started_s: float
    seconds: float
    reward: float | None


class ExpertsRow(TypedDict):
    """Routed experts: `data` is the array in C order, little-endian; `mask` is 1 where they are known."""

    dtype: str
    shape: list[int]
    data: bytes
    mask: Any  # uint8[tokens]


class Row(TypedDict):
    """The columns, in their order. Arrays are NumPy's, an entry a token."""

    session: str
    branch: int
    role: BranchRole
    rollout_id: str | None
    group_id: str | None
    task_id: str | None
    reward: float | None
    status: str | None
    ids: Any  # int32
    loss_mask: Any  # uint8
    rollout_logprobs: Any  # float32
    versions: Any  # int32
    experts: ExpertsRow | None
    turns: list[TurnRow]
    messages: list[MessageRow]
    tools: list[ToolRow]
    metadata: str  # JSON
