from __future__ import annotations

import numpy as np

from stenograph.config import SelectConfig
from stenograph.traces.samples import flatten
from stenograph.traces.selection import selected
from stenograph.traces.trace import TraceTree
from stenograph.training.batch import MASK_REASONS, SIGNALS, num_trainable, sequence
from stenograph.types import Sampling
from support.samples import make_sample
from support.turns import make_turn

PIECES = [("context", [1, 2]), ("output", [3, 4]), ("context", [5]), ("output", [6])]


def test_every_signal_has_a_value_at_every_token() -> None:
    arrays = sequence(make_sample(PIECES, temperature=0.5, version=7))
    assert {name: values.dtype for name, values in arrays.items()} == {n: np.dtype(s.dtype) for n, s in SIGNALS.items()}
    assert arrays["ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert arrays["temperature"].tolist() == [1, 1, 0.5, 0.5, 1, 0.5]
    assert arrays["versions"].tolist() == [-1, -1, 7, 7, -1, 7]
    assert arrays["old_logprobs"].tolist() == arrays["advantages"].tolist() == [0] * 6
    assert num_trainable([arrays, arrays]) == 6


def test_the_argmax_has_the_models_own_logprobs() -> None:
    assert sequence(make_sample(PIECES, temperature=0.0))["temperature"].tolist() == [1.0] * 6


def test_a_sequence_is_a_copy() -> None:
    sample = make_sample(PIECES)
    sequence(sample)["ids"][0] = 99
    assert sample.ids[0] == 1


def test_tokens_that_are_not_trained_say_why() -> None:
    tree = TraceTree()
    greedy = make_turn([1], [2, 3], sampling=Sampling(temperature=0.0))
    tree.add_siblings([greedy], None)
    tree.add_siblings([make_turn([4], [5])], greedy.id)
    (sample,) = flatten("s", tree, selected(tree, SelectConfig()), 1.0, {}, {})
    reasons = [MASK_REASONS[n] for n in sequence(sample)["mask_reason"]]
    assert reasons == ["", "greedy", "greedy", "", ""]
