"""Sampling in this process: every token carries the version of the weights that it was drawn under."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput

from stenograph.config import EngineConfig
from stenograph.engines.base import Capabilities, Chunk, Generate, PauseMode, WeightSource
from stenograph.engines.batching import Batch, Job
from stenograph.engines.sampler import check_sampling
from stenograph.engines.twin import copy_weights, copying_twin, sharing_twin
from stenograph.errors import ContextOverflow, EngineError, EngineUnavailable, RequestError, boundary
from stenograph.types import FinishReason

T = TypeVar("T")


class LocalEngine:
    """Serves a causal language model with transformers' continuous batching, on the model's device.

    With `config.weights = "shared"` it serves the very parameters of `model`: pause it while they change, then call
    `update_weights`. With "copy" it has parameters of its own, which `update_weights` fills. Either way `model` keeps
    its attention, mode and gradients, and torch's global random state is untouched: draws come from a generator
    that `seed` starts.

    `rollout_logprobs` are "processed": after temperature, renormalised over top-k and top-p; 0 at temperature 0.
    They equal a fresh forward pass of the chunk's version over everything before the token. A weight change reaches
    requests in flight: they prefill anew under the new weights.

    May be used from several event loops at once.
    """

    def __init__(self, model: PreTrainedModel, config: EngineConfig, *, version: int = 0, seed: int = 0) -> None:
        self._shared = config.weights == "shared"
        dtype = getattr(torch, config.dtype) if config.dtype is not None else model.dtype
        self._model = sharing_twin(model) if self._shared else copying_twin(model, dtype)
        self._vocab_size = model.config.get_text_config().vocab_size
        self._config = config
        self._version = version
        self._generator = torch.Generator(model.device).manual_seed(seed)
        # One thread runs what blocks, in order: transformers' pauses must be taken and released on the same one.
        self._control = ThreadPoolExecutor(1, "stenograph-engine")
        self._lock = threading.Lock()  # guards the three below
        self._flying: dict[str, _Flight] = {}
        self._waiting: dict[str, _Flight] = {}  # until resume
        self._open = True
        self._hold: ExitStack | None = None
        self._closed = False
        self._numbers = count()
        self._batch: Batch | None = self._start()
        length = config.context_length or getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.capabilities = Capabilities(
            context_length=min(length or self._batch.num_tokens, self._batch.num_tokens),
            logprobs_mode="processed",
            live_weights=True,
        )

    @property
    def server(self) -> None:
        return None

    async def is_paused(self) -> bool:
        return not self._open

    async def generate(self, request: Generate) -> AsyncGenerator[Chunk, None]:
        """Raises RequestError for sampling that is not supported, ContextOverflow, EngineError, EngineUnavailable."""
        flight = _Flight(self._job(request), asyncio.get_running_loop())
        try:
            self._admit(flight)
            while True:
                item = await flight.items.get()
                if isinstance(item, EngineError):
                    raise item
                yield item
                if item.finish_reason is not None:
                    return
        finally:
            self._dismiss(flight)

    async def pause(self, mode: PauseMode) -> None:
        """Returns when no forward pass runs, nor will until `resume`; new requests wait for that."""
        with self._lock:
            self._open = False
            aborted = list(self._flying.values()) if mode == "abort" else []
        for flight in aborted:
            self._dismiss(flight)
            flight.put(_chunk([], [], self._version, "abort"))
        # Requests end on other threads and loops, so there is no one event to await.
        while mode == "finish" and self._flying:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        await self._run(self._take_hold)

    async def resume(self) -> None:
        await self._run(self._release_hold)
        with self._lock:
            self._open = True
            waiting = list(self._waiting.values())
            self._waiting.clear()
        for flight in waiting:
            try:
                self._admit(flight)
            except EngineUnavailable as e:
                flight.put(e)

    async def update_weights(self, source: WeightSource, version: int) -> None:
        await self._run(lambda: self._update(source, version))

    async def random_state(self) -> bytes:
        """The generator's, between two draws."""
        return await self._run(self._read_generator)

    async def restore_random_state(self, state: bytes) -> None:
        await self._run(lambda: self._set_generator(state))

    async def sleep(self) -> None:
        """Let requests in flight end, then free the cache; a copy's weights stay."""
        await self.pause("finish")
        await self._run(self._stop)

    async def wake(self) -> None:
        """Undo `sleep`, and resume."""
        await self._run(self._restart)
        await self.resume()

    async def health(self) -> None:
        if self._closed:
            raise EngineUnavailable("the engine is closed")
        if self._batch is not None and not self._batch.alive:
            raise EngineUnavailable("the generation thread has ended; restart the engine")

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._lock:
            flights = [*self._flying.values(), *self._waiting.values()]
        for flight in flights:
            self._dismiss(flight)
            flight.put(EngineUnavailable("the engine was closed"))
        await asyncio.get_running_loop().run_in_executor(self._control, self._stop)
        self._control.shutdown()

    def _job(self, request: Generate) -> Job:
        check_sampling(request.sampling)
        room = self.capabilities.context_length - len(request.ids)
        if room <= 0:
            raise ContextOverflow(len(request.ids), self.capabilities.context_length)
        if len(request.ids) == 0:
            raise RequestError("the prompt has no tokens; send at least one message")
        if not 0 <= request.ids.min() <= request.ids.max() < self._vocab_size:  # it would end the thread for everyone
            raise EngineError(
                f"token {request.ids.max()} is outside the model's vocabulary of {self._vocab_size}; "
                "use the model's own tokenizer",
                status=400,
            )
        return Job(
            id=str(next(self._numbers)),
            ids=request.ids.tolist(),
            sampling=request.sampling,
            max_tokens=min(room, request.sampling.max_tokens),
            stop_token_ids=list(request.stop_token_ids),
        )

    def _admit(self, flight: _Flight) -> None:
        with self._lock:
            if self._closed:
                raise EngineUnavailable("the engine is closed")
            if not self._open:
                self._waiting[flight.job.id] = flight
                return
            assert self._batch is not None  # none only while paused
            self._flying[flight.job.id] = flight  # before the first output can come
            self._batch.submit(flight.job)

    def _dismiss(self, flight: _Flight) -> None:
        """Forget the request wherever it is; idempotent."""
        id = flight.job.id
        with self._lock:
            self._waiting.pop(id, None)
            flying = self._flying.pop(id, None) is not None
            batch = self._batch
        if flying and batch is not None:
            batch.cancel(id)
            batch.forget(id)

    def _deliver(self, output: GenerationOutput) -> None:
        """On the generation thread, between one forward pass and the next, so the version is the tokens' own."""
        flight = self._flying.get(output.request_id)
        if flight is None:
            return  # cancelled meanwhile
        if output.is_finished():
            with self._lock:
                self._flying.pop(output.request_id, None)
            if self._batch is not None:
                self._batch.forget(output.request_id)
        if output.error is not None:
            alive = self._batch is not None and self._batch.alive
            flight.put((EngineError if alive else EngineUnavailable)(f"generation failed: {output.error}"))
            return
        ids = output.generated_tokens[flight.num_sent :]
        logprobs = output.logprobs[flight.num_sent :]
        flight.num_sent += len(ids)
        finish_reason: FinishReason | None = None
        if output.is_finished():
            finish_reason = "stop" if ids and ids[-1] in flight.job.stop_token_ids else "length"
        flight.put(_chunk(ids, logprobs, self._version, finish_reason))

    async def _run(self, action: Callable[[], T]) -> T:
        await self.health()
        return await asyncio.get_running_loop().run_in_executor(self._control, action)

    # What follows runs on the control thread.

    def _start(self) -> Batch:
        return Batch(self._model, self._config, self._generator, self._deliver)

    def _restart(self) -> None:
        if self._batch is None:
            self._batch = self._start()

    def _stop(self) -> None:
        self._release_hold()
        if self._batch is not None:
            self._batch.stop()
            self._batch = None

    def _take_hold(self) -> None:
        if self._hold is None and self._batch is not None:
            hold = ExitStack()
            hold.enter_context(self._batch.held())
            self._hold = hold

    def _release_hold(self) -> None:
        if self._hold is not None:
            self._hold.close()
            self._hold = None

    @contextmanager
    def _still(self) -> Iterator[Batch | None]:
        """No forward pass runs inside."""
        with self._batch.held() if self._batch is not None else nullcontext():
            yield self._batch

    def _read_generator(self) -> bytes:
        with self._still():
            return self._generator.get_state().numpy().tobytes()

    def _set_generator(self, state: bytes) -> None:
        with self._still(), boundary(EngineError, "go on from the random state of another engine"):
            self._generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def _update(self, source: WeightSource, version: int) -> None:
        with self._still() as batch:
            if not self._shared:
                copy_weights(source, self._model)
            if batch is not None:
                batch.drop_cache()
            self._version = version


@dataclass(slots=True, eq=False)
class _Flight:
    """A request, and what its caller has yet to read."""

    job: Job
    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[Chunk | EngineError] = field(default_factory=asyncio.Queue)
    num_sent: int = 0

    def put(self, item: Chunk | EngineError) -> None:
        """From any thread."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)


def _chunk(ids: list[int], logprobs: list[float], version: int, finish_reason: FinishReason | None) -> Chunk:
    return Chunk(np.array(ids, np.int32), np.array(logprobs, np.float32), version, finish_reason)
