"""What models say of a pack does not depend on the packing, and a value does not depend on the temperature."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from stenograph.training.batch import TokenArrays, sequence
from stenograph.training.critic import ValueModel, critic_from_actor
from stenograph.training.forward import check_packable, target_logprobs, target_logprobs_and_entropy, target_values
from stenograph.training.packing import Pack, pack
from stenograph.types import Sample
from support.families import random_actor
from support.models import tiny_model
from support.samples import make_sample, random_groups

PACKABLE = ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt2", "gpt_neox", "phi", "smollm3", "deepseek_v3"]
ACTOR = tiny_model()
CRITIC = critic_from_actor(ACTOR, seed=0)

Forward = Callable[[Pack], Tensor]  # [targets]
FORWARDS: dict[str, Forward] = {
    "logprobs": lambda p: target_logprobs(ACTOR, p),
    "entropy": lambda p: target_logprobs_and_entropy(ACTOR, p)[1],
    "values": lambda p: target_values(CRITIC, p)[0],
}


def samples_at(temperatures: tuple[float, ...], vocab: int = 307) -> list[Sample]:
    """Two groups with a prompt in common each; the samples of a group differ in temperature, some only in it."""
    rng = np.random.default_rng(0)
    samples = []
    for group in ("a", "b"):
        prompt, again = rng.integers(0, vocab, 9).tolist(), rng.integers(0, vocab, 4).tolist()
        for n, temperature in enumerate(temperatures):
            output = again if n % 2 else rng.integers(0, vocab, 5).tolist()
            more = [("context", rng.integers(0, vocab, 3).tolist()), ("output", rng.integers(0, vocab, 4).tolist())]
            pieces = [("context", prompt), ("output", output), *more]
            samples.append(make_sample(pieces, rollout=f"{group}{n}", group=group, temperature=temperature))
    return samples


def per_token(forward: Forward, sequences: list[TokenArrays], max_tokens: int) -> list[Tensor]:
    """A tensor of the trainable tokens for each sequence."""
    result = [torch.empty(0)] * len(sequences)
    with torch.no_grad():
        for p in pack(sequences, max_tokens):
            values = forward(p)
            assert values.dtype == torch.float32
            for n, i in enumerate(p.sequences):
                result[i] = values[p.cu_seqlens[n] : p.cu_seqlens[n + 1]]
    return result


def single_values(critic: ValueModel, arrays: TokenArrays) -> Tensor:
    """[trainable tokens]: one sequence on its own, with the library's mask and positions."""
    values = critic(torch.from_numpy(arrays["ids"]).long()[None]).values[0]
    return values[torch.from_numpy(np.flatnonzero(arrays["loss_mask"]) - 1)]


@pytest.mark.parametrize("name", FORWARDS)
def test_the_packing_changes_nothing(name: str) -> None:
    sequences = [sequence(s) for s in samples_at((1.0, 1.0, 0.5, 1.7))]
    alone = torch.cat(per_token(FORWARDS[name], sequences, 1))
    assert alone.abs().max() > 0.1
    for max_tokens in (30, 60, 1000):
        packed = torch.cat(per_token(FORWARDS[name], sequences, max_tokens))
        assert (packed - alone).norm() <= 1e-6 * alone.norm()


def test_entropy_is_that_of_the_sampling_distribution() -> None:
    model = tiny_model(dtype=torch.float64)
    sequences = [sequence(s) for s in samples_at((1.0, 0.5, 1.7))]
    entropies = per_token(lambda p: target_logprobs_and_entropy(model, p)[1], sequences, 1000)
    for arrays, entropy in zip(sequences, entropies, strict=True):
        (rows,) = np.nonzero(arrays["loss_mask"])
        logits = model(input_ids=torch.from_numpy(arrays["ids"]).long()[None]).logits[0][rows - 1]
        logits = logits / torch.from_numpy(arrays["temperature"][rows]).double()[:, None]
        expected = torch.distributions.Categorical(logits=logits).entropy()
        np.testing.assert_allclose(entropy, expected.detach(), rtol=2e-6)
    assert len({round(float(e.mean()), 2) for e in entropies}) > 1


def test_entropy_has_a_value_where_tokens_are_impossible() -> None:
    model = random_actor("phi")
    with torch.no_grad():
        model.get_parameter("lm_head.bias")[7:] = -torch.inf
    (p,) = pack([sequence(make_sample([("context", [1, 2]), ("output", [3, 4])]))], 10)
    _, entropy = target_logprobs_and_entropy(model, p)
    assert not entropy.requires_grad
    assert ((entropy > 0) & (entropy < np.log(7))).all()


def test_entropy_leaves_the_logprobs_and_their_gradient_as_they_are() -> None:
    (p,) = pack([sequence(s) for s in samples_at((1.0, 0.5))], 1000)
    gradients = []
    for forward in (target_logprobs, lambda model, p: target_logprobs_and_entropy(model, p)[0]):
        model = tiny_model()
        logprobs = forward(model, p)
        logprobs.square().sum().backward()
        gradients.append((logprobs.detach(), *(q.grad for q in model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_values_do_not_depend_on_the_temperature() -> None:
    hot, cold = (per_token(FORWARDS["values"], [sequence(s) for s in samples_at((t, t))], 1000) for t in (2.0, 0.5))
    assert all(torch.equal(a, b) for a, b in zip(hot, cold, strict=True))


@pytest.mark.parametrize("family", PACKABLE)
def test_values_equal_those_of_single_sequences(family: str) -> None:
    critic = critic_from_actor(random_actor(family), seed=0)
    check_packable(critic)
    sequences = [sequence(s) for s in samples_at((1.0, 0.5), vocab=97)]
    for max_tokens in (1, 1000):
        packed = per_token(lambda p: target_values(critic, p)[0], sequences, max_tokens)
        for values, arrays in zip(packed, sequences, strict=True):
            expected = single_values(critic, arrays).detach()
            assert (values - expected).norm() <= 2e-6 * expected.norm()


def test_gradients_of_values_equal_those_of_single_sequences() -> None:
    sequences = [sequence(s) for s in random_groups()]
    critic = critic_from_actor(tiny_model(dtype=torch.float64), seed=0)
    torch.stack([single_values(critic, arrays).square().sum() for arrays in sequences]).sum().backward()
    expected = [p.grad.clone() for p in critic.parameters() if p.grad is not None]
    assert len(expected) == len(list(critic.parameters()))
    for max_tokens in (1, 40, 1000):
        critic.zero_grad()
        for p in pack(sequences, max_tokens):
            target_values(critic, p)[0].square().sum().backward()
        for parameter, gradient in zip(critic.parameters(), expected, strict=True):
            assert parameter.grad is not None
            assert (parameter.grad - gradient).norm() <= 2e-6 * gradient.norm()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_policy_of_experts_whose_router_is_asked_for_is_packed_like_any_other(family: str) -> None:
    actor = random_actor(family)
    actor.config.output_router_logits = True
    sample = make_sample([("context", [1, 2, 3]), ("output", [4, 5])])
    (p,) = pack([sequence(sample)], 10)
    logprobs = actor(torch.from_numpy(sample.ids).long()[None]).logits[0, 2:4].log_softmax(-1)
    torch.testing.assert_close(target_logprobs(actor, p), logprobs[[0, 1], [4, 5]])


def test_the_balancing_loss_comes_with_the_values() -> None:
    critic = critic_from_actor(random_actor("mixtral"), seed=0)
    sample = make_sample([("context", [1, 2, 3]), ("output", [4, 5])])
    (p,) = pack([sequence(sample)], 10)
    loss = target_values(critic, p).balancing_loss
    expected = critic(torch.from_numpy(sample.ids).long()[None]).balancing_loss
    assert loss is not None
    assert expected is not None
    torch.testing.assert_close(loss, expected)
    assert target_values(CRITIC, p).balancing_loss is None


def test_autocast_gives_values_in_float32() -> None:
    (p,) = pack([sequence(s) for s in samples_at((1.0,))[:1]], 100)
    full = target_values(CRITIC, p)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = target_values(CRITIC, p)[0]
    assert half.dtype == torch.float32
    assert not torch.equal(half, full)
    assert (half - full).norm() < 0.05 * full.norm()
