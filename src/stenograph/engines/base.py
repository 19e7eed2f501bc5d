"""The seam to an inference engine: ids in, ids and log-probabilities out, nothing else."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from stenograph.types import FinishReason, Ids, Logprobs, LogprobsMode, Sampling

if TYPE_CHECKING:
    import torch

PauseMode = Literal["finish", "abort", "keep"]


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
    """One request. `session` groups requests that share a prefix (and selects the scripted engine's cursor)."""

    ids: Ids  # [prompt tokens]
    sampling: Sampling
    session: str
    stop_token_ids: tuple[int, ...] = ()
    last_message: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Newly sampled tokens under one policy version; the last chunk carries `finish_reason` (and may hold no ids)."""

    ids: Ids
    logprobs: Logprobs
    version: int
    finish_reason: FinishReason | None = None


class WeightSource(Protocol):
    """Named parameters to publish, in the trainer's precision."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class Engine(Protocol):
    """An inference engine. Closing the iterator of `generate` aborts the request on the engine."""

    @property
    def capabilities(self) -> Capabilities: ...

    def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]: ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating: `finish` lets requests in flight end, `abort` ends them, `keep` freezes them."""
        ...

    async def resume(self) -> None: ...

    async def update_weights(self, source: WeightSource, version: int) -> None:
        """Serve `source` as policy `version` from now on; nothing cached under older weights is used again."""
        ...

    async def sleep(self) -> None:
        """Give the device's memory back."""
        ...

    async def wake(self) -> None: ...

    async def health(self) -> None:
        """Raise EngineUnavailable unless the engine can generate."""
        ...

    async def aclose(self) -> None: ...
