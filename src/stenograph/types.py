"""The records: frozen, free of I/O, torch and any wire format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]  # [tokens]
Logprobs = NDArray[np.float32]  # [tokens]
Mask = NDArray[np.bool_]  # [tokens]

Role = Literal["system", "developer", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "abort"]
EndedBy = Literal["eos", "stop", "length", "abort"]
LogprobsMode = Literal["raw", "processed"]
BranchRole = Literal["main", "sub-agent", "compaction", "title", "probe"]


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work for an agent; `data` is the source's own, `judge` overrides the run's judge."""

    id: str
    prompt: str
    answer: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    sandbox: Mapping[str, Any] | None = None
    judge: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an agent program left behind; the judge's input.

    `num_turns` are those that its session had when the agent ended; a call in flight then may still become one.
    """

    answer: str | None
    exit_code: int | None
    stdout: str
    stderr: str
    workdir: str
    seconds: float
    num_turns: int = 0


@dataclass(frozen=True, slots=True)
class Judgement:
    """A reward and the named parts that it was made of.

    `turn_rewards` are beside it: the n-th is that of the session's n-th turn, in the order in which they were
    committed. Turns beyond have none.
    """

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it: `arguments` is its raw text, valid JSON or not."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message in canonical form; parts of text are already joined.

    `turn` is the recorded turn that an id in it names: what the gateway gave out and a client sent back with it.
    `joints` are the places in `content` where blocks of text meet.
    """

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    turn: str | None = field(default=None, compare=False)
    joints: tuple[int, ...] = field(default=(), compare=False)
    digest: bytes = field(default=b"", init=False, repr=False, compare=False)  # kept here by `traces.digests`


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    digest: bytes = field(default=b"", init=False, repr=False, compare=False)  # kept here by `traces.digests`


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request says, free of its protocol.

    `continues`: the last message is an assistant's, to be gone on with rather than answered (a prefill).
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    continues: bool = False
    labels: tuple[bytes, ...] = field(default=(), init=False, repr=False, compare=False)  # kept by `traces.digests`


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample, every value explicit. top_k 0 and top_p 1 are full support; seed None leaves it to the engine.

    `constrained`: a grammar decided which tokens were possible.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()
    seed: int | None = None
    constrained: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """What sampled ids say, once parsed. A call that does not parse stays in `content` the way the model wrote it."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    num_malformed_calls: int = field(default=0, compare=False)

    def message(self) -> Message:
        return Message("assistant", self.content, self.reasoning, self.tool_calls)


@dataclass(frozen=True, slots=True)
class Payload:
    """A handle of an array that is kept elsewhere for as long as it is leased; opaque bytes are uint8 [bytes]."""

    id: str
    dtype: str  # NumPy's name of it
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One recorded call, as a difference to its parent, the turn whose conversation it goes on from.

    `messages` are what came after the parent's reply (everything, where there is no parent). `context_ids` are the ids
    after the parent's where they were kept (`extends`), else the whole prompt; in a tree, less the ids that another
    turn was told before. Where the agent had begun the reply itself (a prefill), its tokens are context, and `reply` is
    both as one text. `versions` are spans (start offset in output_ids, policy version); the first starts at 0.
    `experts` has a row for each forward pass over one input token; the last pass sampled the last token, so its input
    is the token before that. There is a row for each token of `output_ids`, and more before them where passes over the
    prompt are known. None: nobody asked for them (a dense model); a turn that lacks what was asked is not recorded.
    """

    id: str
    context_ids: Ids
    output_ids: Ids
    rollout_logprobs: Logprobs  # [output tokens]
    versions: tuple[tuple[int, int], ...]
    finish_reason: FinishReason
    ended_by: EndedBy
    sampling: Sampling
    logprobs_mode: LogprobsMode
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    reply: Reply
    extends: bool = True
    role: BranchRole = "main"
    role_evidence: str = ""  # what decided it
    accepted: tuple[str, ...] = ()  # differences between what was asked and what it goes on from, by their names
    notes: tuple[str, ...] = ()
    stopped_by: str | None = None  # the stop string that ended the visible text
    experts: Payload | None = None  # [passes, layers, experts per token], see above
    started_s: float = 0.0  # Unix time
    seconds: float = 0.0
    client_session: str | None = None  # the id of the client's own session, where it sends one
    num_instructions: int | None = None  # messages that hold for a stored response alone; None: it is not stored
    request: str = ""  # a digest of what was asked, by which a repeat is known


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """Where one turn's output lies in a sample: ids[start:end].

    The last turn of a sample that was cut for its length has `ended_by` "length", wherever the cut fell.
    `reward` is the same in every sample that holds the turn; None where it was given none.
    """

    turn: str
    start: int
    end: int
    ended_by: EndedBy
    temperature: float
    top_p: float
    logprobs_mode: LogprobsMode
    reward: float | None = None  # the judge's, of this turn alone
    mask_reason: str | None = None  # why its tokens are not trained here


@dataclass(frozen=True, slots=True)
class Routing:
    """Where a turn's experts lie in a sample: the last row of `payload` is of the pass whose input is ids[end - 1]."""

    payload: Payload
    end: int  # may be behind the end of a sample that was cut for its length


@dataclass(frozen=True, slots=True)
class Sample:
    """One branch flattened for training; every array has len(ids), 0.0 and -1 where the token was not sampled.

    `experts` are read by `traces.experts.routed_experts`. There are none where nobody asked for them: a dense model.
    They never went missing: such a branch is no sample.
    """

    session: str
    branch: int
    role: BranchRole
    rollout_id: str | None
    group_id: str | None
    task_id: str | None
    reward: float | None
    ids: Ids
    loss_mask: Mask
    rollout_logprobs: Logprobs
    versions: NDArray[np.int32]
    turns: tuple[TurnSpan, ...]
    experts: tuple[Routing, ...] = ()  # oldest turn first

    @property
    def truncated(self) -> bool:
        """Whether something other than the policy ended its last turn."""
        return bool(self.turns) and self.turns[-1].ended_by in ("length", "abort")


RolloutStatus = Literal["completed", "agent_failed", "timeout", "error", "interrupted"]


@dataclass(frozen=True, slots=True)
class Rollout:
    """A task's attempt. Whatever went wrong is data here: `status` and `error`."""

    id: str
    group_id: str
    task: Task
    session: str
    reward: float | None
    status: RolloutStatus
    error: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()  # as the judge gave them
    seconds: float = 0.0
