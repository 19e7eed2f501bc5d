"""What of a session is trained: one pure function of its tree, so that samples and the ledger cannot disagree."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stenograph.config import SelectConfig
from stenograph.traces.trace import Output, TraceTree

DropReason = Literal["unadopted", "role", "overlong"]

DEFAULT = SelectConfig()


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch that becomes a sample: the first `length` tokens on the path to the last of `turns`."""

    number: int  # of the oldest leaf below it, among all leaves of the session
    turns: tuple[str, ...]  # oldest first
    length: int
    truncated: bool
    trains: frozenset[str] = frozenset()  # turns whose tokens may be trained in this sample


@dataclass(frozen=True, slots=True)
class Dropped:
    """A turn's last tokens, as many as are in no sample: all, unless a limit cut it."""

    num_tokens: int
    reason: DropReason


@dataclass(frozen=True, slots=True)
class Selection:
    """What becomes samples, oldest first, and by turn what does not."""

    branches: tuple[Branch, ...]
    dropped: Mapping[str, Dropped]


def selected(tree: TraceTree, select: SelectConfig) -> Selection:
    """Choose branches as `select` says.

    A turn is dropped only where no chosen branch holds it, for the reason of the oldest branch that does:

    - `unadopted`: siblings answered one request, and the agent went on from another of them. Where it went on from
      none, all are kept: so many samples of the last call.
    - `role`: a turn of another role than those in `select.roles` is not trained, and a branch ends at its last turn
      that is. A compaction is left out so, and the conversation that it sums up is not.
    - `overlong`: a branch of more than `select.max_tokens` tokens is left out, or cut there.
    """
    continued = _continued(tree)
    reasons: dict[str, DropReason] = {}
    branches = []
    for number, leaf in enumerate(tree.leaves()):
        if select.unadopted == "drop" and _is_unadopted(tree, leaf, continued):
            reasons[leaf] = "unadopted"  # the turns before it are on its sibling's branch as well
            continue
        path = tree.path_turns(leaf)
        ended = _to_role(tree, path, select)
        fitting = _to_role(tree, _to_limit(tree, ended, select), select)
        _note(reasons, path[len(ended) :], "role")
        _note(reasons, ended[len(fitting) :], "overlong")
        if fitting:
            end = tree.node(fitting[-1]).end
            length = min(end, select.max_tokens or end)
            truncated = length < tree.node(ended[-1]).end
            branches.append(Branch(number, tuple(fitting), length, truncated))
    chosen = list(_outermost(branches))
    if select.tokens == "every_branch":
        chosen = [replace(branch, trains=frozenset(branch.turns)) for branch in chosen]
    else:
        chosen = _claimed(tree, chosen, continued)
    others = {turn for branch in chosen for turn in branch.turns if tree.turn(turn).role not in select.roles}
    chosen = [replace(branch, trains=branch.trains - others) for branch in chosen]
    return Selection(tuple(chosen), _dropped(tree, chosen, reasons, others))


def _continued(tree: TraceTree) -> set[str]:
    """The turns that another goes on from: by its ids, or by its conversation where that was rendered anew."""
    turns = tree.turns
    by_ids = {turn for turn in turns if tree.node(turn).children}
    return by_ids | {parent for turn in turns if (parent := tree.parent(turn)) is not None}


def _is_unadopted(tree: TraceTree, turn: str, continued: Collection[str]) -> bool:
    """Whether the agent went on not from `turn` but from a sibling of it, another answer to the same prompt."""
    before = tree.node(turn).parent
    if turn in continued or before is None:
        return False
    return any(isinstance(sibling, Output) and sibling.turn.id in continued for sibling in before.children)


def _to_role(tree: TraceTree, path: list[str], select: SelectConfig) -> list[str]:
    """The turns up to the last one of a role that is trained."""
    return path[: next((n for n in range(len(path), 0, -1) if tree.turn(path[n - 1]).role in select.roles), 0)]


def _to_limit(tree: TraceTree, path: list[str], select: SelectConfig) -> list[str]:
    """The turns that are within the limit or begin there; none, where an overlong branch is dropped."""
    if not path or select.max_tokens is None or tree.node(path[-1]).end <= select.max_tokens:
        return path
    if select.overlong == "drop":
        return []
    return [turn for turn in path if tree.node(turn).start < select.max_tokens]


def _note(reasons: dict[str, DropReason], turns: Iterable[str], reason: DropReason) -> None:
    for turn in turns:
        reasons.setdefault(turn, reason)


def _dropped(
    tree: TraceTree, branches: Sequence[Branch], reasons: Mapping[str, DropReason], others: Collection[str]
) -> dict[str, Dropped]:
    """What none of `branches` trains: turns that none holds or that are of `others`, and the ends of those cut."""
    held = {turn for branch in branches for turn in branch.turns}
    dropped = {
        turn: Dropped(len(tree.turn(turn).output_ids), reason) for turn, reason in reasons.items() if turn not in held
    }
    dropped |= {turn: Dropped(len(tree.turn(turn).output_ids), "role") for turn in others}
    for branch in branches:
        if (num_cut := tree.node(branch.turns[-1]).end - branch.length) > 0:
            dropped[branch.turns[-1]] = Dropped(num_cut, "overlong")
    return dropped


def _outermost(branches: Sequence[Branch]) -> Iterator[Branch]:
    """Leave out what is the beginning of another, now that branches may end early."""
    ends = {turn for branch in branches for turn in branch.turns[:-1]}
    for branch in branches:
        if branch.turns[-1] not in ends:
            ends.add(branch.turns[-1])
            yield branch


def _claimed(tree: TraceTree, branches: Sequence[Branch], continued: Collection[str]) -> list[Branch]:
    """Give each turn to one branch: the oldest main one that was adopted, else the oldest."""

    def comes_later(branch: Branch) -> bool:
        end = branch.turns[-1]
        return tree.turn(end).role != "main" or _is_unadopted(tree, end, continued)

    claimed: set[str] = set()
    claiming = []
    for branch in sorted(branches, key=comes_later):
        claiming.append(replace(branch, trains=frozenset(branch.turns) - claimed))
        claimed.update(branch.turns)
    return sorted(claiming, key=lambda branch: branch.number)
