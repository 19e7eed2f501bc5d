"""transformers' continuous batching with our sampling: each token is drawn under one version's weights and cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
    OutputRouter,
)
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import GenerationOutput

from stenograph.config import EngineConfig
from stenograph.engines import attention
from stenograph.engines.sampler import draw
from stenograph.errors import EngineUnavailable
from stenograph.types import Sampling


@dataclass(frozen=True, slots=True)
class Job:
    """One request as the batch needs it."""

    id: str
    ids: list[int]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: list[int]


class Batch:
    """The requests that are generated together, on a thread of their own.

    `deliver` is called on that thread with each request's output so far; every token in it that is new was drawn
    since the last `hold`. Draws come from `generator` alone: torch's global generators are not touched.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig,
        generator: torch.Generator,
        deliver: Callable[[GenerationOutput], None],
    ) -> None:
        self._samplings: dict[str, Sampling] = {}
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        self._manager = _Manager(
            model,  # pyright: ignore[reportArgumentType]  # its protocol is private
            # Neutral, so that no processor of transformers stands between the logits and our sampler.
            GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1),
            ContinuousBatchingConfig(
                num_blocks=config.num_blocks,
                page_size=config.page_size,
                max_batch_tokens=config.max_batch_tokens,
                return_logprobs=True,
                use_cuda_graph=False,
                use_async_batching=False,
                auto_switch_to_flash=False,
            ),
        )
        self._manager.output_router = _Router(deliver)
        if model.device.type == "cpu" and model.config._attn_implementation == "sdpa":
            attention.install()  # which the manager, that knows only its own kinds, would have refused
            model.set_attn_implementation(attention.RAGGED)
        devices = [model.device] if model.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # the processor seeds the global generators when it is made
            self._manager.warmup()
        processor = self._manager.batch_processor
        assert processor is not None
        self._processor: ContinuousBatchProcessor = processor
        processor.model_runner = _Runner(processor, self._samplings, generator)
        self._manager.start()

    @property
    def num_tokens(self) -> int:
        """How many tokens the cache holds."""
        cache = self._processor.cache
        return cache.num_blocks * cache.cache_allocators["full_attention"].tokens_per_page

    @property
    def alive(self) -> bool:
        status = self._manager.background_thread_status
        return self._manager.is_running() and status.local_status == BackgroundThreadStatus.DONT_STOP

    def submit(self, job: Job) -> None:
        """Raises EngineUnavailable once the thread is gone."""
        self._samplings[job.id] = job.sampling
        self._manager.add_request(
            job.ids, job.id, max_new_tokens=job.max_tokens, streaming=True, eos_token_id=job.stop_token_ids
        )
        # Asked afterwards: a thread that was alive only before may have failed its queue without this request.
        if not self.alive:
            self._samplings.pop(job.id, None)
            raise EngineUnavailable("the generation thread has ended; restart the engine")

    def cancel(self, id: str) -> None:
        """Generate no more for the request, if it is still known; one more output may be on its way."""
        self._manager.cancel_request(id)

    def forget(self, id: str) -> None:
        """Release what is kept for a request that has ended."""
        self._samplings.pop(id, None)

    @contextmanager
    def held(self) -> Iterator[None]:
        """No forward pass runs inside; may be nested on one thread. Raises EngineUnavailable without a thread."""
        try:
            pause = self._manager.pause()
            pause.__enter__()
        except RuntimeError as e:
            raise EngineUnavailable("the generation thread has ended; restart the engine") from e
        try:
            yield
        finally:
            pause.__exit__(None, None, None)

    def drop_cache(self) -> None:
        """Inside `held`: use no cached key or value again. Requests in flight keep their tokens and prefill anew.

        Left as they are, they would go on with old keys and values, and leave those to later requests as a prefix.
        """
        scheduler, cache = self._processor.scheduler, self._processor.cache
        for state in reversed(list(scheduler.active_requests.values())):
            cache.free_blocks(state.request_id, no_cache=True)
            del scheduler.active_requests[state.request_id]
            scheduler.waiting_requests[state.request_id] = state.create_equivalent_initial_request()
            scheduler.waiting_requests_order.appendleft(state.request_id)
        scheduler.block_new_requests = False  # it waits for an active request to finish, and there is none now
        cache.evict_cached_blocks()

    def stop(self) -> None:
        """End the thread and free the cache; requests in flight fail. Not inside `held`."""
        self._manager.stop(block=True, hard_stop=True)
        self._manager.destroy()


class _Manager(ContinuousBatchingManager):
    def start(self) -> None:
        # A daemon: an engine that was not closed must not keep the interpreter from exiting.
        self.background_thread_status.clear()
        self._generation_thread = threading.Thread(
            target=self._run_generation_loop,
            kwargs={"use_inference_mode": False},
            name="stenograph-generation",
            daemon=True,
        )
        self._generation_thread.start()


class _Router(OutputRouter):
    def __init__(self, deliver: Callable[[GenerationOutput], None]) -> None:
        super().__init__()
        self._deliver = deliver

    def deliver(self, output: GenerationOutput) -> None:
        self._deliver(output)

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            self._deliver(output)


class _Runner(ModelRunner):
    """Samples with `draw`: per request, from a generator of its own."""

    def __init__(
        self, processor: ContinuousBatchProcessor, samplings: dict[str, Sampling], generator: torch.Generator
    ) -> None:
        super().__init__(
            logit_processor=processor.logit_processor,
            cb_config=processor.cb_config,
            inputs_and_outputs=processor.inputs_and_outputs,
            cache=processor.cache,
            do_sample=True,
            return_logprobs=True,
        )
        self._samplings = samplings
        self._generator = generator

    def _sample(self, scores: Tensor, output_ids: Tensor) -> None:
        """scores [1, rows, vocab] -> output_ids [2, >= rows] int32: ids, and logprobs as float32 bits."""
        assert isinstance(self.inputs_and_outputs, ContinuousBatchingIOs)  # not asynchronous
        batch = self.inputs_and_outputs.requests_in_batch
        requests = [future.state.request_id for future in batch if future.has_new_token]
        if not requests:
            return
        rows = [self._samplings.get(id, Sampling()) for id in requests]  # a cancelled one's draw is not delivered
        ids, logprobs = draw(scores[0, : len(rows)], rows, self._generator)
        output_ids[0, : len(rows)].copy_(ids)
        output_ids[1, : len(rows)].copy_(logprobs.view(torch.int32))
