from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stenograph.config_training import OptimizerConfig
from stenograph.engines.twin import sharing_twin
from stenograph.errors import CheckpointError
from stenograph.training.phases import Phase, Phases, mover
from stenograph.training.updates import Updates
from support.models import tiny_model

PHASES: tuple[Phase, ...] = get_args(Phase)
ACTOR = ("actor", "actor_optimizer")
CRITIC = ("critic", "critic_optimizer")
ALL = (*ACTOR, *CRITIC, "reference")
NEEDS: dict[Phase, set[str]] = {
    "rollout": set(),
    "score": {"actor", "reference"},
    "value": {"critic"},
    "train_critic": {"critic", "critic_optimizer"},
    "train_actor": {"actor", "actor_optimizer"},
    "publish": {"actor"},
}
FULL_STEP: tuple[Phase, ...] = ("score", "value", "train_critic", "train_actor", "publish", "rollout")
LEGAL: set[tuple[Phase | None, Phase]] = {
    (None, "rollout"),
    (None, "publish"),
    *itertools.combinations(PHASES, 2),  # forward, whatever is left out
    *((phase, "rollout") for phase in PHASES),
    *((phase, phase) for phase in PHASES),
} - {("rollout", "publish")}


class Device:
    """Records what is moved, and refuses to hold what no one phase needs."""

    def __init__(self, parts: Sequence[str], shares: bool = False) -> None:
        self.needs = {phase: needed & set(parts) for phase, needed in NEEDS.items()}
        if shares:
            self.needs["rollout"] = {"actor"} & set(parts)
        self.moves: list[tuple[str, bool]] = []
        self.held = set(parts)

    def place(self, part: str, resident: bool) -> None:
        assert (part in self.held) != resident, f"{part} is there already"
        self.moves.append((part, resident))
        self.held ^= {part}
        if resident:
            assert any(self.held <= needed for needed in self.needs.values()), self.held

    def taken(self) -> list[tuple[str, bool]]:
        moves, self.moves = self.moves, []
        return moves


def offloading(parts: Sequence[str] = ALL, *, shares: bool = False) -> tuple[Phases, Device]:
    device = Device(parts, shares)
    phases = Phases(device.place, offload=True, parts=parts, engine_shares_weights=shares)
    device.taken()
    return phases, device


def test_a_step_of_ppo_moves_what_each_phase_needs() -> None:
    phases, device = offloading()
    moves = {}
    for phase in ("rollout", *FULL_STEP):
        phases.enter(phase)
        moves[phase] = device.taken()
        assert phases.current == phase
        assert phases.resident == device.held == NEEDS[phase]
    assert moves == {
        "rollout": [("actor", False)],
        "score": [("actor", True), ("reference", True)],
        "value": [("actor", False), ("reference", False), ("critic", True)],
        "train_critic": [("critic_optimizer", True)],
        "train_actor": [
            ("critic", False),
            ("critic_optimizer", False),
            ("actor", True),
            ("actor_optimizer", True),
        ],
        "publish": [("actor_optimizer", False)],
    }


def test_a_step_without_a_critic_moves_little() -> None:
    phases, device = offloading(ACTOR)
    moves = []
    for phase in ("publish", "rollout", "train_actor", "publish", "rollout"):
        phases.enter(phase)
        moves.append(device.taken())
    assert moves == [
        [("actor", True)],
        [("actor", False)],
        [("actor", True), ("actor_optimizer", True)],
        [("actor_optimizer", False)],
        [("actor", False)],
    ]


def test_the_critics_warm_up_leaves_the_actor_out_and_publishes_nothing() -> None:
    phases, device = offloading()
    for phase in ("rollout", "value", "train_critic", "rollout", "value", "train_critic", "rollout"):
        phases.enter(phase)
    assert {part for part, _ in device.taken()} == {"critic", "critic_optimizer"}
    assert phases.resident == set()


def test_an_engine_that_shares_the_weights_has_them_in_the_rollout() -> None:
    phases, device = offloading((*ACTOR, "reference"), shares=True)
    phases.enter("rollout")
    assert device.taken() == [("actor", True)]
    for phase in ("score", "train_actor", "publish", "rollout"):
        phases.enter(phase)
        assert "actor" in phases.resident
    assert "actor" not in {part for part, _ in device.taken()}  # it never left


def test_an_engine_that_shares_the_weights_does_without_them_while_the_critic_is_trained() -> None:
    phases, device = offloading(shares=True)
    expected: dict[Phase, set[str]] = {"rollout": {"actor"}, "value": {"critic"}, "train_critic": set(CRITIC)}
    for phase, resident in expected.items():
        phases.enter(phase)
        assert phases.resident == device.held == resident


def test_nothing_is_resident_before_the_first_phase() -> None:
    device = Device(ALL)
    phases = Phases(device.place, offload=True, parts=ALL, engine_shares_weights=True)
    assert phases.current is None
    assert phases.resident == device.held == set()


@pytest.mark.parametrize("shares", [True, False])
def test_without_offloading_everything_stays(shares: bool) -> None:
    device = Device(ALL)
    phases = Phases(device.place, offload=False, parts=ALL, engine_shares_weights=shares)
    assert phases.resident == set(ALL)
    for phase in ("rollout", *FULL_STEP, "value", "rollout"):
        phases.enter(phase)
        assert phases.resident == set(ALL)
    assert device.moves == []


def reach(phases: Phases, phase: Phase | None) -> None:
    if phase not in (None, "publish"):
        phases.enter("rollout")
    if phase is not None:
        phases.enter(phase)


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("before", [None, *PHASES])
@pytest.mark.parametrize("after", PHASES)
def test_every_transition_is_legal_or_refused(before: Phase | None, after: Phase, offload: bool) -> None:
    device = Device(ALL)
    phases = Phases(device.place, offload=offload, parts=ALL, engine_shares_weights=False)
    reach(phases, before)
    device.taken()
    if (before, after) in LEGAL:
        phases.enter(after)
        assert phases.current == after
    else:
        with pytest.raises(RuntimeError, match=rf"^phase {after} cannot follow {before or 'the start'},.*$"):
            phases.enter(after)
        assert phases.current == before
        assert device.moves == []


@pytest.mark.parametrize("phase", PHASES)
def test_entering_the_current_phase_moves_nothing(phase: Phase) -> None:
    phases, device = offloading()
    reach(phases, phase)
    device.taken()
    phases.enter(phase)
    assert device.moves == []


@pytest.mark.parametrize("phase", [None, *PHASES])
def test_a_checkpoint_is_saved_between_steps_only(phase: Phase | None) -> None:
    phases, _ = offloading()
    reach(phases, phase)
    if phase in (None, "rollout"):
        phases.check_save()
    else:
        with pytest.raises(CheckpointError, match=f"in phase {phase}, "):
            phases.check_save()


def test_a_part_that_no_phase_needs_is_refused() -> None:
    with pytest.raises(ValueError, match="no phase needs reference_optimizer;"):
        Phases(Device(ALL).place, offload=True, parts=["actor", "reference_optimizer"], engine_shares_weights=True)


@given(
    st.lists(st.integers(0, 10), min_size=10, max_size=30),
    st.sets(st.sampled_from(ALL)),
    st.booleans(),
)
def test_a_walk_holds_one_phases_parts_at_a_time_and_moves_each_once(
    choices: list[int], parts: set[str], shares: bool
) -> None:
    phases, device = offloading(sorted(parts), shares=shares)
    for choice in choices:
        legal: list[Phase] = [phase for phase in PHASES if (phases.current, phase) in LEGAL]
        phase = legal[choice % len(legal)]
        before = set(phases.resident)
        phases.enter(phase)
        moves = device.taken()
        assert phases.resident == device.held == device.needs[phase]
        assert {part for part, _ in moves} == before ^ device.needs[phase]
        assert moves == sorted(moves, key=lambda move: move[1])  # what leaves goes first


def trained(network: nn.Module, device: str) -> Updates:
    """Updates of which one was applied, so that there are moments."""
    updates = Updates(network, OptimizerConfig(), 4)
    network(torch.arange(8, device=device)[None]).logits.square().mean().backward()
    updates.apply()
    return updates


def test_on_the_cpu_nothing_moves() -> None:
    actor = tiny_model()
    updates = trained(actor, "cpu")

    def addresses() -> list[int]:
        moments = [value for entry in updates.optimizer_state()["state"] for value in entry.values()]
        return [tensor.data_ptr() for tensor in (*actor.parameters(), *actor.buffers(), *moments)]

    before = addresses()
    place = mover("cpu", {"actor": actor}, {"actor": updates})
    for part, resident in itertools.product(ACTOR, (False, True)):
        place(part, resident)
    assert addresses() == before


def test_an_optimizers_moments_are_placed_apart_from_its_model() -> None:
    networks = {"actor": tiny_model(), "critic": tiny_model()}
    updates = {name: trained(network, "cpu") for name, network in networks.items()}
    mover("meta", networks, updates)("critic_optimizer", True)
    on = {name: {m.device.type for e in u.optimizer.state.values() for m in e.values()} for name, u in updates.items()}
    assert on == {"actor": {"cpu"}, "critic": {"meta"}}
    assert {p.device.type for network in networks.values() for p in network.parameters()} == {"cpu"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_devices_memory_is_given_back_and_an_engine_that_shares_the_weights_follows() -> None:
    torch.cuda.synchronize()
    at_start = torch.cuda.memory_allocated()
    actor = tiny_model(tokenizer_size=400_000)  # more than the workspace of matrix products
    nn.Module.to(actor, "cuda")
    twin = sharing_twin(actor)
    updates = trained(actor, "cuda")
    size = sum(p.nbytes for p in actor.parameters())
    weights = {name: tensor.cpu() for name, tensor in actor.state_dict().items()}

    phases = Phases(
        mover("cuda", {"actor": actor}, {"actor": updates}), offload=True, parts=ACTOR, engine_shares_weights=False
    )
    workspace = torch.cuda.memory_allocated() - at_start
    assert workspace < size
    used = {}
    for phase in ("rollout", "train_actor", "publish", "rollout"):
        phases.enter(phase)
        used[phase] = torch.cuda.memory_allocated() - at_start - workspace
    assert used["rollout"] == 0
    assert size <= used["publish"] < 1.1 * size
    assert 3 * size <= used["train_actor"] < 1.1 * 3 * size

    phases.enter("train_actor")
    assert all(torch.equal(tensor.cpu(), weights[name]) for name, tensor in actor.state_dict().items())
    ids = torch.arange(8, device="cuda")[None]
    torch.testing.assert_close(twin(ids).logits, actor(ids).logits)
    assert all(a is b for a, b in zip(twin.parameters(), actor.parameters(), strict=True))
    assert all(a is b for a, b in zip(twin.buffers(), actor.buffers(), strict=True))
    assert updates.apply().reason is None
