"""Credit, for whatever masks, lengths and turns: what a sequence gets depends on its own rollout alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograph.config import AlgorithmConfig
from stenograph.config_training import KLConfig, OffPolicyConfig
from stenograph.training import credit, measuring, weighting
from stenograph.training.batch import TokenArrays, num_trainable, sequence
from stenograph.types import Sample
from support.samples import make_sample

FEW = settings(max_examples=60, deadline=None)
KINDS = st.sampled_from(["context", "output"])
FRACTIONS = st.floats(0, 1)


@st.composite
def drawn_samples(draw: st.DrawFn) -> list[Sample]:
    """Branches of a few rollouts, in any order, with any turns, masks and rewards of turns."""
    samples = []
    for rollout in range(draw(st.integers(1, 4))):
        reward = draw(st.sampled_from([0.0, 0.5, 1.0]))
        for branch in range(draw(st.integers(1, 3))):
            pieces = [("context", [1])]
            pieces += [(draw(KINDS), [1] * draw(st.integers(1, 4))) for _ in range(draw(st.integers(0, 4)))]
            sample = make_sample(
                pieces, rollout=f"r{rollout}", group=f"g{rollout % 2}", reward=reward, branch=branch, version=1
            )
            chance = np.random.default_rng(draw(st.integers(0, 1000)))
            mask = sample.loss_mask & (chance.random(len(sample.ids)) < draw(st.sampled_from([0.0, 0.6, 1.0])))
            turns = tuple(
                dataclasses.replace(turn, reward=draw(st.sampled_from([None, 0.25])), ended_by="length")
                for turn in sample.turns
            )
            samples.append(dataclasses.replace(sample, loss_mask=mask, turns=turns))
    return draw(st.permutations(samples))


@st.composite
def drawn_algorithms(draw: st.DrawFn) -> AlgorithmConfig:
    return AlgorithmConfig(
        estimator="gae",
        whiten=False,
        gamma=draw(FRACTIONS),
        lam=draw(FRACTIONS | st.just("length_adaptive")),  # pyright: ignore[reportArgumentType]
        critic_lam=draw(st.none() | FRACTIONS),
        turn_gamma=draw(st.none() | FRACTIONS),
        turn_lam=draw(st.none() | FRACTIONS),
        bootstrap=draw(st.sampled_from(["zero", "value"])),
        credit=draw(st.sampled_from(["every_branch", "main_branch"])),
    )


def valued(samples: Sequence[Sample], noise: float = 0.0) -> tuple[list[TokenArrays], torch.Tensor]:
    """The samples' sequences with rewards and with values that follow from where a token stands; values at the ends."""
    sequences = [sequence(sample) for sample in samples]
    for arrays, sample in zip(sequences, samples, strict=True):
        values = np.sin(len(sample.ids) + np.arange(len(sample.ids)))
        arrays["values"][:] = np.where(arrays["action_mask"], values, noise)
    return sequences, torch.tensor([len(sample.ids) / 10 for sample in samples])


def rewarded(samples: Sequence[Sample], sequences: list[TokenArrays], config: AlgorithmConfig) -> list[TokenArrays]:
    attempts = credit.attempts_of(samples)
    rewards = torch.tensor([attempt.reward for attempt in attempts], dtype=torch.float64)
    credit.place_rewards(attempts, rewards, samples, sequences, config)
    credit.place_turn_rewards(samples, sequences)
    return sequences


@given(drawn_samples(), drawn_algorithms(), st.sampled_from([0.0, 9.0, np.nan]))
@FEW
def test_advantages_of_a_batch_are_those_of_its_sequences_alone(
    samples: list[Sample], config: AlgorithmConfig, noise: float
) -> None:
    together, at_ends = valued(samples, noise)
    credit.estimate_advantages(rewarded(samples, together, config), at_ends, config)
    alone, _ = valued(samples)
    rewarded(samples, alone, config)
    for n, (arrays, one) in enumerate(zip(together, alone, strict=True)):
        one["loss_mask"][:] = False  # which the chain does not follow
        credit.estimate_advantages([one], at_ends[n : n + 1], config)
        for name in ("advantages", "returns"):
            assert arrays[name] == pytest.approx(one[name], rel=1e-6, abs=1e-6)
            assert not arrays[name][~arrays["action_mask"]].any()


@given(drawn_samples(), st.sampled_from(["every_branch", "main_branch"]))
@FEW
def test_every_reward_lands_on_an_action_once_for_each_branch_that_is_credited(
    samples: list[Sample], selected: str
) -> None:
    config = AlgorithmConfig(estimator="gae", credit=selected)  # pyright: ignore[reportArgumentType]
    sequences = rewarded(samples, [sequence(sample) for sample in samples], config)
    highest = {
        s.rollout_id: max(other.branch for other in samples if other.rollout_id == s.rollout_id) for s in samples
    }
    for arrays, sample in zip(sequences, samples, strict=True):
        actions = np.flatnonzero(arrays["action_mask"])
        is_credited = selected == "every_branch" or sample.branch == highest[sample.rollout_id]
        final = sample.reward if is_credited and len(actions) else 0.0
        assert arrays["rewards"].sum() == pytest.approx((final or 0.0) + sum(turn.reward or 0 for turn in sample.turns))
        assert not arrays["rewards"][~arrays["action_mask"]].any()
        if len(actions):
            last = sample.turns[-1].reward or 0.0
            assert arrays["rewards"][actions[-1]] == pytest.approx((final or 0.0) + last)


@given(drawn_samples(), st.sampled_from(["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"]))
@FEW
def test_what_a_rollout_gets_does_not_depend_on_how_it_branched(samples: list[Sample], estimator: str) -> None:
    config = AlgorithmConfig(estimator=estimator)  # pyright: ignore[reportArgumentType]

    def advantages_of(samples: Sequence[Sample]) -> dict[str | None, set[float]]:
        attempts, sequences = credit.attempts_of(samples), [sequence(sample) for sample in samples]
        rewards = torch.tensor([attempt.reward for attempt in attempts], dtype=torch.float64)
        credit.spread_advantages(attempts, rewards, samples, sequences, config)
        found: dict[str | None, set[float]] = {}
        for sample, arrays in zip(samples, sequences, strict=True):
            assert not arrays["advantages"][~sample.loss_mask].any()
            found.setdefault(sample.rollout_id, set()).update(arrays["advantages"][sample.loss_mask].tolist())
        return found

    everything = advantages_of(samples)
    assert all(len(values) <= 1 for values in everything.values())
    firsts = advantages_of(list({sample.rollout_id: sample for sample in reversed(samples)}.values()))
    for rollout, values in firsts.items():
        assert sorted(values) == pytest.approx(sorted(everything[rollout])) or not values


@given(drawn_samples(), st.floats(0.01, 1.0))
@FEW
def test_the_penalty_is_on_trainable_tokens_and_its_mean_is_told(samples: list[Sample], beta: float) -> None:
    sequences = [sequence(sample) for sample in samples]
    for arrays in sequences:
        arrays["old_logprobs"][:] = np.where(arrays["loss_mask"], -1.0, np.nan)
        arrays["ref_logprobs"][:] = np.where(arrays["loss_mask"], -1.5, np.inf)
    told = credit.penalise(sequences, KLConfig(placement="reward"), beta=beta, is_sampled=False)
    assert told == pytest.approx(0.5 if num_trainable(sequences) else 0.0)
    for arrays in sequences:
        assert arrays["rewards"] == pytest.approx(np.where(arrays["loss_mask"], -0.5 * beta, 0.0))


@given(
    drawn_samples(),
    st.sampled_from(["token_mean", "sequence_mean"]),
    st.booleans(),
    st.integers(0, 3),
)
@FEW
def test_a_mean_of_ones_is_one_whatever_is_rejected_and_not_counted(
    samples: list[Sample], reduction: str, is_counted: bool, num_rejected: int
) -> None:
    off_policy = OffPolicyConfig(level="token", count_rejected=is_counted)
    config = AlgorithmConfig(reduction=reduction, off_policy=off_policy)  # pyright: ignore[reportArgumentType]
    sequences = [sequence(sample) for sample in samples]
    for arrays in sequences:
        arrays["weights"][np.flatnonzero(arrays["loss_mask"])[:num_rejected]] = 0.0
    accepted = [int((arrays["weights"][arrays["loss_mask"]] != 0).sum()) for arrays in sequences]
    lengths = [int(arrays["loss_mask"].sum()) for arrays in sequences]
    weighting.reduce(sequences, config)
    denominator = weighting.denominator(sequences, config)
    total = sum(float(arrays["weights"][arrays["loss_mask"]].sum()) for arrays in sequences)

    if not is_counted:
        assert total == pytest.approx(denominator)
    elif reduction == "token_mean":
        assert (total, denominator) == (sum(accepted), sum(lengths))
    else:
        shares = [a / n for a, n in zip(accepted, lengths, strict=True) if n]
        assert (total, denominator) == (pytest.approx(sum(shares)), len(shares))


def test_a_turn_in_several_branches_earns_once() -> None:
    pieces = [("context", [1]), ("output", [2]), ("context", [3]), ("output", [4])]
    samples = []
    for n in range(2):
        sample = make_sample(pieces, branch=n)
        shared, own = sample.turns
        turns = (dataclasses.replace(shared, reward=0.5), dataclasses.replace(own, turn=f"own {n}"))
        samples.append(dataclasses.replace(sample, turns=turns))
    measured = measuring.samples(credit.attempts_of(samples), samples, [sequence(sample) for sample in samples], 0)
    assert measured["turn_reward_mean"] == 0.5
