from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from stenograph.config import AlgorithmConfig, Config
from stenograph.errors import ConfigError
from stenograph.training.batch import SIGNALS, TokenArrays, sequence
from stenograph.training.critic import critic_from_actor
from stenograph.training.forward import check_packable, target_logprobs
from stenograph.training.packing import pack
from stenograph.training.trainer import Trainer
from stenograph.types import Sample
from support.models import tiny_model
from support.samples import make_sample, random_groups

MODEL = tiny_model(dtype=torch.float64)


def reference_logprobs(model: LlamaForCausalLM, arrays: TokenArrays) -> torch.Tensor:
    """[tokens] float64: one sequence on its own, the library's own causal mask and positions, every logit."""
    ids = torch.from_numpy(arrays["ids"]).long()
    logits = model(input_ids=ids[None]).logits[0].double()
    temperature = torch.from_numpy(arrays["temperature"]).double()
    result = torch.zeros(len(ids), dtype=torch.float64)
    for i in range(1, len(ids)):
        result[i] = torch.log_softmax(logits[i - 1] / temperature[i], -1)[ids[i]]
    return result


def packed_logprobs(model: LlamaForCausalLM, sequences: list[TokenArrays], max_tokens: int) -> list[np.ndarray]:
    into = [{**arrays, "old_logprobs": np.zeros(len(arrays["ids"]))} for arrays in sequences]
    with torch.no_grad():
        for p in pack(sequences, max_tokens):
            p.scatter(target_logprobs(model, p).numpy(), into, "old_logprobs")
    return [arrays["old_logprobs"] for arrays in into]


def assert_equal_to_reference(samples: list[Sample], max_tokens: int) -> None:
    sequences = [sequence(sample) for sample in samples]
    for arrays, actual in zip(sequences, packed_logprobs(MODEL, sequences, max_tokens), strict=True):
        with torch.no_grad():
            expected = reference_logprobs(MODEL, arrays).numpy()
        mask = arrays["loss_mask"]
        # the log-softmax is float32 by design
        np.testing.assert_allclose(actual[mask], expected[mask], rtol=2e-6, atol=2e-6)
        assert (actual[~mask] == 0).all()


def test_a_shared_prefix_is_laid_out_once() -> None:
    samples = [
        make_sample([("context", [7, 8, 9]), ("output", [1, 2])]),
        make_sample([("context", [7, 8, 9]), ("output", [1, 3, 4])]),
        make_sample([("context", [7, 8, 9]), ("output", [5])]),
    ]
    (p,) = pack([sequence(s) for s in samples], 100)
    assert p.ids.tolist() == [7, 8, 9, 1, 2, 3, 4, 5]
    assert p.positions.tolist() == [0, 1, 2, 3, 4, 4, 5, 3]
    assert p.ends.tolist() == [8, 8, 8, 7, 5, 7, 7, 8]
    # the prompt's last position predicts 1, 1 and 5; both sequences train the shared 1, each with its own signals
    assert p.rows.tolist() == [2, 3, 5]
    assert p.rows[p.row_of_target].tolist() == [2, 3, 2, 3, 5, 2]
    assert p.signals["ids"].tolist() == [1, 2, 1, 3, 4, 5]
    assert p.cu_seqlens.tolist() == [0, 2, 5, 6]
    assert set(p.signals) == set(SIGNALS)


@pytest.mark.parametrize("max_tokens", [1, 30, 60, 1000])
def test_logprobs_equal_those_of_single_sequences(max_tokens: int) -> None:
    assert_equal_to_reference(random_groups(), max_tokens)


def test_edges_of_the_mask() -> None:
    assert_equal_to_reference(
        [
            make_sample([("context", [5]), ("output", [6, 7, 8])]),  # the whole row after one prompt token
            make_sample([("context", [5, 6]), ("output", [9])]),  # one token
            make_sample([("context", [5, 6]), ("output", [9])], temperature=0.7),  # the same, at another temperature
            make_sample([("context", [5, 6]), ("output", [9])]),  # exactly the same
            make_sample([("context", [5, 6, 7, 8])]),  # nothing to train
            make_sample([("context", [5]), ("output", [6])]),  # a prefix of others
            make_sample([("context", [300, 5]), ("output", [6])], temperature=1.3),
        ],
        100,
    )


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_forest(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(2, 9), min_size=1, max_size=6))
    samples = []
    for length in lengths:
        ids = data.draw(st.lists(st.integers(0, 2), min_size=length, max_size=length))
        mask = [False, *data.draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))]
        samples.append(make_sample([("output" if m else "context", [i]) for i, m in zip(ids, mask, strict=True)]))
    max_tokens = data.draw(st.integers(1, 40))
    assert_equal_to_reference(samples, max_tokens)
    packs = pack([sequence(s) for s in samples], max_tokens)
    assert sorted(n for p in packs for n in p.sequences) == [n for n, s in enumerate(samples) if s.loss_mask.any()]
    for p in packs:
        assert p.num_tokens <= max_tokens or len(p.sequences) == 1
        assert len({(r, t) for r, t in zip(p.rows, p.row_temperature, strict=True)}) == len(p.rows)


def test_what_a_sequence_cannot_see_does_not_reach_it() -> None:
    a = make_sample([("context", [5, 6]), ("output", [9, 10])])
    others = [make_sample([("context", [5, 6]), ("output", [n, n, n])]) for n in (8, 11)]
    more = [make_sample([("context", [5, 6]), ("output", [n, n + 1, n])]) for n in (8, 11)]
    first, second = (packed_logprobs(MODEL, [sequence(s) for s in (a, *rest)], 100)[0] for rest in (others, more))
    assert np.array_equal(first, second)


def test_a_long_sequence_has_a_pack_of_its_own() -> None:
    long = make_sample([("context", list(range(50))), ("output", [1])])
    short = [make_sample([("context", [60 + n]), ("output", [1])]) for n in range(3)]
    packs = pack([sequence(s) for s in (short[0], long, *short[1:])], 10)
    assert [(p.sequences, p.num_tokens) for p in packs] == [((1,), 51), ((0, 2, 3), 6)]


def test_gradients_equal_those_of_single_sequences() -> None:
    sequences = [sequence(s) for s in random_groups()]
    model = tiny_model(dtype=torch.float64)
    expected = torch.zeros((), dtype=torch.float64)
    for arrays in sequences:
        expected = expected + reference_logprobs(model, arrays)[torch.from_numpy(arrays["loss_mask"])].square().sum()
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for max_tokens in (1, 40, 1000):
        model.zero_grad()
        for p in pack(sequences, max_tokens):
            target_logprobs(model, p).square().sum().backward()
        actual = [p.grad for p in model.parameters() if p.grad is not None]
        for a, b in zip(actual, gradients, strict=True):
            assert (a - b).norm() <= 1e-6 * b.norm()


def test_an_action_without_a_token_before_it_is_refused() -> None:
    with pytest.raises(ValueError, match="first token is an action"):
        sequence(make_sample([("output", [1, 2])]))


def test_arrays_of_unequal_length_are_refused() -> None:
    sample = make_sample([("context", [1]), ("output", [2])])
    broken = Sample(**{**{f: getattr(sample, f) for f in Sample.__slots__}, "loss_mask": np.zeros(1, bool)})
    with pytest.raises(ValueError, match="1 loss_mask for 2 ids"):
        sequence(broken)


def test_layers_with_a_window_are_refused() -> None:
    config = MistralConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=9,
    )
    with pytest.raises(ConfigError, match="sliding_attention"):
        check_packable(MistralForCausalLM(config))
    check_packable(MODEL)
    critic = critic_from_actor(MistralForCausalLM(config), seed=0)
    with pytest.raises(ConfigError, match=r"^critic\.path: mistral has .*sliding_attention"):
        Trainer(MODEL, Config(algorithm=AlgorithmConfig(estimator="gae")), critic=critic)


def test_the_attention_of_a_shared_module_is_put_back() -> None:
    model = tiny_model()
    model.set_attn_implementation("eager")
    (p,) = pack([sequence(make_sample([("context", [1]), ("output", [2])]))], 10)
    target_logprobs(model, p)
    assert model.config._attn_implementation == "eager"
