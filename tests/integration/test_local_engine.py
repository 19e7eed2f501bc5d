"""The local engine's exactness: what it recorded is what a fresh forward pass of the same weights says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from stenograph.config import EngineConfig
from stenograph.engines.base import Chunk, Generate
from stenograph.engines.local import LocalEngine
from stenograph.errors import ContextOverflow, EngineError, EngineUnavailable, RequestError
from stenograph.types import Ids, Logprobs, Sampling
from support.models import Weights, fresh_logprobs, perturb, tiny_model

TOLERANCE = 1e-4
PROMPT = np.arange(3, 60, dtype=np.int32)  # seven full pages of 8, so prefixes are shared

Make = Callable[..., LocalEngine]


def small(**values: object) -> EngineConfig:
    return EngineConfig.model_validate({"num_blocks": 128, "page_size": 8, "max_batch_tokens": 64} | values)


@pytest.fixture
async def make() -> AsyncGenerator[Make, None]:
    """Makes engines, and closes them."""
    engines: list[LocalEngine] = []

    def make(model: LlamaForCausalLM, *, seed: int = 0, **values: object) -> LocalEngine:
        engines.append(LocalEngine(model, small(**values), seed=seed))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.aclose()


def asked(prompt: Ids = PROMPT, stop: tuple[int, ...] = (), **sampling: object) -> Generate:
    return Generate(prompt, Sampling(**({"max_tokens": 24} | sampling)), "s", stop_token_ids=stop)  # type: ignore[arg-type]


async def read(engine: LocalEngine, request: Generate) -> tuple[Ids, Logprobs, list[Chunk]]:
    chunks = [chunk async for chunk in engine.generate(request)]
    return np.concatenate([c.ids for c in chunks]), np.concatenate([c.logprobs for c in chunks]), chunks


@pytest.mark.parametrize("weights", ["shared", "copy"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_those_of_a_fresh_forward_before_and_after_an_update(
    make: Make, weights: str, temperature: float
) -> None:
    model = tiny_model()
    engine = make(model, weights=weights)
    for version in (0, 1, 2):
        turns = await asyncio.gather(*[read(engine, asked(temperature=temperature)) for _ in range(6)])
        for ids, logprobs, chunks in turns:
            np.testing.assert_allclose(
                logprobs, fresh_logprobs(model, PROMPT, ids, temperature), atol=TOLERANCE, rtol=0
            )
            assert {chunk.version for chunk in chunks} == {version}
        await engine.pause("finish")
        perturb(model)
        await engine.update_weights(Weights(model), version + 1)
        await engine.resume()


async def test_a_copy_serves_its_old_weights_until_the_update(make: Make) -> None:
    model, before = tiny_model(), tiny_model()
    engine = make(model, weights="copy")
    perturb(model)
    ids, logprobs, _ = await read(engine, asked())
    np.testing.assert_allclose(logprobs, fresh_logprobs(before, PROMPT, ids), atol=TOLERANCE, rtol=0)


async def test_each_token_of_a_turn_across_an_update_has_the_logprob_of_its_version(make: Make) -> None:
    model = tiny_model()
    by_version = {0: tiny_model(), 1: model}
    engine = make(model, weights="copy")
    perturb(model)
    seen = asyncio.Event()

    async def watch() -> tuple[Ids, Logprobs, list[Chunk]]:
        chunks = []
        async for chunk in engine.generate(asked(max_tokens=200)):
            chunks.append(chunk)
            seen.set()
        return np.concatenate([c.ids for c in chunks]), np.concatenate([c.logprobs for c in chunks]), chunks

    turns = [asyncio.create_task(watch()) for _ in range(3)]
    await seen.wait()
    await engine.update_weights(Weights(model), 1)
    later = await read(engine, asked())  # shares the prefix of requests that began under the old weights
    for ids, logprobs, chunks in [*await asyncio.gather(*turns), later, await read(engine, asked())]:
        versions = np.concatenate([np.full(len(c.ids), c.version) for c in chunks])
        for version, weights in by_version.items():
            fresh = fresh_logprobs(weights, PROMPT, ids)
            mine = versions == version
            np.testing.assert_allclose(logprobs[mine], fresh[mine], atol=TOLERANCE, rtol=0)
    assert {c.version for c in later[2]} == {1}


async def test_a_full_cache_changes_no_logprob(make: Make) -> None:
    model = tiny_model()
    engine = make(model, num_blocks=24)  # 192 tokens, for requests that come to 8 * 81
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 300, 57).astype(np.int32) for _ in range(8)]
    turns = await asyncio.gather(*[read(engine, asked(prompt)) for prompt in prompts])
    for prompt, (ids, logprobs, _) in zip(prompts, turns, strict=True):
        assert len(ids) == 24
        np.testing.assert_allclose(logprobs, fresh_logprobs(model, prompt, ids), atol=TOLERANCE, rtol=0)


async def test_the_trained_module_keeps_its_attention_mode_and_gradients(make: Make) -> None:
    model = tiny_model().train()
    engine = make(model)
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    position_ids = torch.arange(9)[None]
    ids = torch.arange(9)[None]
    reference = model(ids, attention_mask=mask, position_ids=position_ids).logits
    await read(engine, asked())
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    output = model(ids, attention_mask=mask, position_ids=position_ids)
    assert torch.equal(output.logits, reference)
    output.logits.sum().backward()
    assert all(p.requires_grad and p.grad is not None for p in model.parameters())


async def test_generation_and_the_global_random_state_leave_each_other_alone(make: Make) -> None:
    outputs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        engine = make(tiny_model(), seed=7)
        outputs.append((await read(engine, asked()))[0])
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(3)
        outputs.append((await read(engine, asked()))[0])
    assert (outputs[0] == outputs[2]).all()
    assert (outputs[1] == outputs[3]).all()
    assert (outputs[0] != outputs[1]).any()


async def test_sampling_is_per_request(make: Make) -> None:
    model = tiny_model()
    engine = make(model)
    greedy, single, cold, hot = await asyncio.gather(
        read(engine, asked(temperature=0.0)),
        read(engine, asked(top_k=1)),
        read(engine, asked(temperature=0.5)),
        read(engine, asked(temperature=1.5)),
    )
    with torch.no_grad():
        context = PROMPT
        for id in greedy[0]:
            assert model(torch.from_numpy(context).long()[None]).logits[0, -1].argmax() == id
            context = np.append(context, id)
    assert (greedy[0] == single[0]).all()
    assert (greedy[1] == 0).all()  # the limit of log softmax(logits / temperature)
    np.testing.assert_allclose(cold[1], fresh_logprobs(model, PROMPT, cold[0], 0.5), atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(hot[1], fresh_logprobs(model, PROMPT, hot[0], 1.5), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("field", ["min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"])
async def test_what_it_does_not_support_is_refused_by_name(make: Make, field: str) -> None:
    engine = make(tiny_model())
    with pytest.raises(RequestError, match=field) as raised:
        await read(engine, asked(**{field: 0.5}))  # pyright: ignore[reportArgumentType]
    assert raised.value.param == field


async def test_a_stop_id_ends_the_turn_and_is_part_of_it(make: Make) -> None:
    engine = make(tiny_model())
    ids, logprobs, chunks = await read(engine, asked(stop=tuple(range(0, 307, 2))))
    assert ids[-1] % 2 == 0
    assert (ids[:-1] % 2 == 1).all()
    assert chunks[-1].finish_reason == "stop"
    assert len(logprobs) == len(ids)


async def test_a_prompt_without_room_is_an_overflow(make: Make) -> None:
    engine = make(tiny_model(), context_length=64)
    assert engine.capabilities.context_length == 64
    ids, _, chunks = await read(engine, asked(max_tokens=100))
    assert len(ids) == 64 - len(PROMPT)
    assert chunks[-1].finish_reason == "length"
    with pytest.raises(ContextOverflow) as raised:
        await read(engine, asked(np.zeros(64, np.int32)))
    assert (raised.value.num_tokens, raised.value.limit) == (64, 64)


async def test_the_cache_bounds_the_context(make: Make) -> None:
    engine = make(tiny_model(), num_blocks=8)
    assert engine.capabilities.context_length == 64
    assert len((await read(engine, asked(max_tokens=100)))[0]) == 64 - len(PROMPT)


async def test_requests_of_other_event_loops_are_served(make: Make) -> None:
    engine = make(tiny_model())
    lengths: list[int] = []
    thread = threading.Thread(target=lambda: lengths.append(len(asyncio.run(read(engine, asked()))[0])))
    thread.start()
    await read(engine, asked())
    await engine.pause("finish")
    await engine.resume()
    await asyncio.to_thread(thread.join)
    assert lengths == [24]


async def test_requests_that_were_closed_early_leave_no_trace(make: Make) -> None:
    model = tiny_model()
    engine = make(model)
    for _ in range(4):
        async with aclosing(engine.generate(asked(max_tokens=300))) as chunks:
            await anext(chunks)
    ids, logprobs, _ = await read(engine, asked())
    np.testing.assert_allclose(logprobs, fresh_logprobs(model, PROMPT, ids), atol=TOLERANCE, rtol=0)


async def test_a_dead_generation_thread_is_an_unavailable_engine(make: Make) -> None:
    model = tiny_model()
    failing = threading.Event()

    def fail(*_: object) -> None:
        if failing.is_set():
            raise RuntimeError("out of memory")

    model.register_forward_pre_hook(fail)
    engine = make(model)
    await engine.health()
    await read(engine, asked())
    failing.set()
    with pytest.raises(EngineUnavailable, match="out of memory"):
        await read(engine, asked())
    uses: list[Callable[[], Awaitable[object]]] = [
        engine.health,
        lambda: read(engine, asked()),
        lambda: engine.pause("finish"),
    ]
    for use in uses:
        with pytest.raises(EngineUnavailable):
            await use()


async def test_a_token_outside_the_vocabulary_fails_its_own_request_only(make: Make) -> None:
    engine = make(tiny_model())
    with pytest.raises(EngineError, match="vocabulary"):
        await read(engine, asked(np.array([5, 10_000], np.int32)))
    await read(engine, asked())


async def test_a_closed_engine_fails_its_requests(make: Make) -> None:
    engine = make(tiny_model())
    turn = asyncio.create_task(read(engine, asked(max_tokens=400)))
    await asyncio.sleep(0.05)
    await engine.aclose()
    with pytest.raises(EngineUnavailable):
        await turn
    with pytest.raises(EngineUnavailable):
        await read(engine, asked())


async def test_a_copy_in_another_dtype_is_filled_by_name(make: Make) -> None:
    model = tiny_model()
    engine = make(model, weights="copy", dtype="bfloat16")
    perturb(model)
    await engine.update_weights(Weights(model), 1)
    ids, logprobs, _ = await read(engine, asked())
    difference = np.abs(logprobs - fresh_logprobs(model, PROMPT, ids))
    assert 0 < difference.max() < 0.5

    class Wrong:
        def tensors(self) -> list[tuple[str, torch.Tensor]]:
            return [("no.such.weight", torch.zeros(1))]

    with pytest.raises(EngineError, match=r"no\.such\.weight"):
        await engine.update_weights(Wrong(), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", ["shared", "copy"])
async def test_an_engine_that_is_started_again_goes_on_to_the_bit(make: Make, weights: str) -> None:
    """One request at a time: neither what was cached before the update nor where in the cache it lay shows."""
    model = tiny_model()
    first = make(model, weights=weights, seed=3)
    for length in (5, 40, 57):
        await read(first, asked(PROMPT[:length]))
    perturb(model)
    await first.update_weights(Weights(model), 1)
    state = await first.random_state()
    second = make(model, weights=weights)
    await second.update_weights(Weights(model), 1)
    await second.restore_random_state(state)
    for length in (57, 30, 57):
        (ids, logprobs, _), (again, same, chunks) = [await read(e, asked(PROMPT[:length])) for e in (first, second)]
        np.testing.assert_array_equal(again, ids)
        np.testing.assert_array_equal(same, logprobs)
        assert {chunk.version for chunk in chunks} == {1}
