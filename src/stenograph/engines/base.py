"""The seam to an inference engine: ids in, ids and log-probabilities out, nothing else."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from stenograph.types import Conversation, FinishReason, Ids, Logprobs, LogprobsMode, Sampling

if TYPE_CHECKING:
    import torch

PauseMode = Literal["finish", "abort", "keep"]
_UNKNOWN = Conversation(())


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do. `live_weights`: a weight change reaches requests in flight."""

    context_length: int
    logprobs_mode: LogprobsMode
    experts: bool = False
    constrained: bool = False
    seeded: bool = False
    live_weights: bool = False


@dataclass(frozen=True, slots=True)
class Generate:
    """One request. `session` groups requests that share a prefix (and selects the scripted engine's cursor).

    `turn` is the id that its turn will have in the record. `conversation` is what was asked, as it came; a model's
    engine reads the ids alone. `grammar` is a JSON schema that the text must follow; only for an engine that is
    `constrained`.
    """

    ids: Ids  # [prompt tokens]
    sampling: Sampling
    session: str
    turn: str = ""
    stop_token_ids: tuple[int, ...] = ()
    conversation: Conversation = _UNKNOWN
    grammar: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Newly sampled tokens under one policy version; the last chunk carries `finish_reason` (and may hold no ids).

    `experts` are as in `Turn`: a row for the pass that sampled each token of `ids`; the first chunk may have rows for
    passes over the prompt before them. Their dtype is the smallest of uint8, uint16 and int32 that holds how many
    experts the model has.
    """

    ids: Ids
    logprobs: Logprobs
    version: int
    finish_reason: FinishReason | None = None
    experts: NDArray[np.integer] | None = None  # [passes, layers, experts per token]


class WeightSource(Protocol):
    """Named parameters to publish, in the trainer's precision."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class Engine(Protocol):
    """An inference engine. Closing the iterator of `generate` aborts the request on the engine."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def server(self) -> str | None:
        """Address of the engine's own HTTP server; None where it has none."""
        ...

    async def is_paused(self) -> bool:
        """Whether requests wait for `resume`, whoever paused it."""
        ...

    def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]: ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating: `finish` lets requests in flight end, `abort` ends them, `keep` freezes them."""
        ...

    async def resume(self) -> None: ...

    async def update_weights(self, source: WeightSource, version: int) -> None:
        """Serve `source` as policy `version` from now on; nothing cached under older weights is used again."""
        ...

    async def random_state(self) -> bytes:
        """What draws from now on follow from; empty where that is not this process's to know."""
        ...

    async def restore_random_state(self, state: bytes) -> None:
        """Go on drawing as an engine of this kind did from `state` on. Raises EngineError for another kind's."""
        ...

    async def sleep(self) -> None:
        """Give the device's memory back."""
        ...

    async def wake(self) -> None: ...

    async def health(self) -> None:
        """Raise EngineUnavailable unless the engine can generate."""
        ...

    async def aclose(self) -> None: ...
