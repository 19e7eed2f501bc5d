"""A game on stairs that is small enough to compute: how it goes, what it is worth, and what a policy makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from stenograph.types import Sample, TurnSpan

BEGIN, WALK, LEAP, LEFT, RIGHT = range(5)
STAIR = 5  # the first of the tokens that tell the stair
TOP = 3  # is never told: the game ends there
VOCAB = STAIR + TOP

NUM_TURNS = 3
STARTS = (0.5, 0.25, 0.25)  # probability of each stair
CHANCES = {WALK: (0.3, 0.9, 0.9), LEAP: (0.8, 0.1, 0.1)}  # of getting on, from each stair; else it is the bottom
STRIDE = {WALK: 1, LEAP: 2}
PAYOFF = 2.0  # of the rollout that comes to the top
COIN = 0.5  # of the turn, for each stair that it climbs
CUT = 0.25  # of the rollouts: a turn, each as likely as another, may have one token only
GAMMA = 0.9  # from one action to the next


@dataclass(frozen=True, slots=True)
class State:
    """Where an action is chosen. A turn is WALK or LEAP, and then the side that was told; all else ends the game."""

    turn: int
    stair: int
    side: int  # LEFT or RIGHT
    pace: int | None = None  # WALK or LEAP, once it is said


@dataclass(frozen=True, slots=True)
class Outcome:
    """What may come of an action."""

    probability: float
    state: State | None = None  # None: the game is over
    coin: float = 0.0
    payoff: float = 0.0

    @property
    def reward(self) -> float:
        return self.coin + self.payoff

    @property
    def told(self) -> tuple[int, ...]:
        """The observation that follows: none within a turn, and none after the end."""
        state = self.state
        return () if state is None or state.pace is not None else (state.side, STAIR + state.stair)


@cache
def beginnings() -> list[Outcome]:
    return [outcome for stair, chance in enumerate(STARTS) for outcome in _arrive(chance, 0, stair, 0.0)]


@cache
def outcomes(state: State, action: int) -> list[Outcome]:
    """The game's only rule."""
    if state.pace is None:
        return [Outcome(1.0, replace(state, pace=action))] if action in CHANCES else [Outcome(1.0)]
    if action != state.side:
        return [Outcome(1.0)]
    chance = CHANCES[state.pace][state.stair]
    stair = min(state.stair + STRIDE[state.pace], TOP)
    climbed = _arrive(chance, state.turn + 1, stair, COIN * (stair - state.stair))
    return climbed + _arrive(1 - chance, state.turn + 1, 0, 0.0)


def _arrive(probability: float, turn: int, stair: int, coin: float) -> list[Outcome]:
    if stair == TOP:
        return [Outcome(probability, None, coin, PAYOFF)]
    if turn == NUM_TURNS:
        return [Outcome(probability, None, coin)]
    return [Outcome(probability / 2, State(turn, stair, side), coin) for side in (LEFT, RIGHT)]


@cache
def best(state: State) -> tuple[float, int]:
    """V* of a state, and the action that it is the value of."""
    return max((action_value(state, action), action) for action in range(VOCAB))


@cache
def action_value(state: State, action: int) -> float:
    """Q*."""
    return sum(
        outcome.probability * (outcome.reward + (GAMMA * best(outcome.state)[0] if outcome.state else 0.0))
        for outcome in outcomes(state, action)
    )


@dataclass(frozen=True, slots=True)
class Visit:
    """A place in the game's tree where an action is chosen, after `num_actions` others."""

    ids: tuple[int, ...]
    state: State
    probability: float
    num_actions: int


Policy = Callable[[list[Visit]], NDArray[np.float64]]  # of visits that are equally long -> [visits, VOCAB]


def best_policy(visits: list[Visit]) -> NDArray[np.float64]:
    return np.eye(VOCAB)[[best(visit.state)[1] for visit in visits]]


def policy_of(model: PreTrainedModel) -> Policy:
    return lambda visits: np.exp(logprobs(model, [visit.ids for visit in visits]).double().numpy())


@torch.no_grad()
def logprobs(model: PreTrainedModel, histories: list[tuple[int, ...]]) -> torch.Tensor:
    """Of what comes next: [histories, VOCAB], equally long ones."""
    return model(input_ids=torch.tensor(histories), use_cache=False).logits[:, -1].log_softmax(-1)


def visits(policy: Policy) -> tuple[list[Visit], float]:
    """Every visit that `policy` makes, and its return: exact, in expectation over policy and game."""
    found: list[Visit] = []
    total = 0.0
    front = [Visit((BEGIN, *o.told), o.state, o.probability, 0) for o in beginnings() if o.state is not None]
    while front:
        found += front
        following: list[Visit] = []
        for visit, action, outcome, probability in _branches(front, policy(front)):
            total += probability * GAMMA**visit.num_actions * outcome.reward
            if outcome.state is not None:
                ids = (*visit.ids, action, *outcome.told)
                following.append(Visit(ids, outcome.state, probability, visit.num_actions + 1))
        front = following
    return found, total


def _branches(front: list[Visit], chances: NDArray[np.float64]) -> Iterator[tuple[Visit, int, Outcome, float]]:
    """What may come of every visit, and with which probability."""
    for n, action in np.argwhere(chances > 0).tolist():
        for outcome in outcomes(front[n].state, action):
            yield front[n], action, outcome, front[n].probability * float(chances[n, action]) * outcome.probability


class Game:
    """One rollout as it goes."""

    def __init__(self, name: str, rng: np.random.Generator, version: int) -> None:
        self._name, self._rng, self._version = name, rng, version
        self._cut_at = rng.integers(NUM_TURNS) if rng.random() < CUT else None
        self._logprobs: dict[int, float] = {}  # by the place of the action
        self._turns: list[TurnSpan] = []
        self._payoff = 0.0
        self.ids = [BEGIN]
        self.state: State | None = None  # None: the game is over
        self._enter(beginnings())

    def act(self, logprobs: NDArray[np.float32]) -> None:
        """Draw one action from `logprobs`, [VOCAB]."""
        assert self.state is not None
        state, chances = self.state, np.exp(logprobs.astype(np.float64))
        action = int(self._rng.choice(VOCAB, p=chances / chances.sum()))
        self._logprobs[len(self.ids)] = float(logprobs[action])
        self.ids.append(action)
        end = len(self.ids)
        start = end - 1 if state.pace is None else end - 2
        if state.turn == self._cut_at and state.pace is None and action in CHANCES:
            self.state = None
            self._turns.append(TurnSpan(f"t{start}", start, end, "length", 1.0, 1.0, "processed"))
            return
        outcome = self._enter(outcomes(state, action))
        if self.state is None or self.state.pace is None:
            self._turns.append(TurnSpan(f"t{start}", start, end, "eos", 1.0, 1.0, "processed", outcome.coin))
            self._payoff = outcome.payoff

    def sample(self) -> Sample:
        """The rollout, once it is over."""
        places = list(self._logprobs)
        mask = np.zeros(len(self.ids), bool)
        mask[places] = True
        rollout_logprobs = np.zeros(len(self.ids), np.float32)
        rollout_logprobs[places] = list(self._logprobs.values())
        return Sample(
            session=f"steno_{self._name}",
            branch=0,
            role="main",
            rollout_id=self._name,
            group_id=None,
            task_id=None,
            reward=self._payoff,
            ids=np.array(self.ids, np.int32),
            loss_mask=mask,
            rollout_logprobs=rollout_logprobs,
            versions=np.where(mask, self._version, -1).astype(np.int32),
            turns=tuple(self._turns),
        )

    def _enter(self, possible: list[Outcome]) -> Outcome:
        outcome = possible[self._rng.choice(len(possible), p=[o.probability for o in possible])]
        self.state = outcome.state
        self.ids += outcome.told
        return outcome


def play(model: PreTrainedModel, num_rollouts: int, rng: np.random.Generator, *, version: int) -> list[Sample]:
    """Rollouts of the model's own policy, side by side: those that go on are equally long."""
    games = [Game(f"{version}-{n}", rng, version) for n in range(num_rollouts)]
    while going := [game for game in games if game.state is not None]:
        said = logprobs(model, [tuple(game.ids) for game in going]).numpy()
        for game, row in zip(going, said, strict=True):
            game.act(row)
    return [game.sample() for game in games]
