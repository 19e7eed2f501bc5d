"""A run read back for people: its steps, a session's tree, a turn's tokens. Reads files, changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import orjson
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text
from rich.tree import Tree

from stenograph.config import SelectConfig
from stenograph.errors import ConfigError, TraceError, UnknownSession, boundary
from stenograph.rundir import load_session, open_journal, read_rows, read_select
from stenograph.traces.export import session_row
from stenograph.traces.journal import Journal
from stenograph.traces.samples import flatten
from stenograph.traces.selection import selected
from stenograph.traces.session import Opening, SessionRecord
from stenograph.traces.trace import EMPTY
from stenograph.types import BranchRole, Mask

Decode = Callable[[list[int]], str]


def overview(run: Path) -> tuple[dict[str, Any], RenderableType]:
    """The run's state and its steps."""
    rollouts = _rollouts(run)
    steps = read_rows(run, "metrics.jsonl") if (run / "metrics.jsonl").exists() else []  # none, where the first failed
    summary = _read_json(run / "summary.json")
    shown = ("session", "task_id", "reward", "status", "num_turns", "error")
    last = [{name: row.get(name) for name in shown} for row in rollouts[-8:]]
    data = {"summary": summary, "steps": steps, "num_rollouts": len(rollouts), "last_rollouts": last}
    table = Table("step", "reward", "rollouts", "tokens", "loss", "grad norm", "Δlogp p99", "seconds")
    for row in steps:
        names = ("step", "reward_mean", "num_rollouts", "num_tokens", "loss", "grad_norm", "logprob_difference_p99")
        table.add_row(*(_shown(row.get(name)) for name in names), _shown(row.get("seconds")))
    sessions = Table(Column("session", overflow="fold"), "task", "reward", "status", "turns", title="last rollouts")
    for row in last:
        cells = (row["session"], _shown(row["task_id"]), _shown(row["reward"]), row["status"], str(row["num_turns"]))
        sessions.add_row(*cells)
    errors = Counter(row["error"] for row in last if row["error"])
    told = [Text(f"{count} of them: {error}") for error, count in errors.most_common(3)]
    state = summary.get("status", "running, or killed before its summary was written")
    state += f": {summary['error']}" if summary.get("error") else ""
    if not (run / "rollouts.jsonl").exists():
        return data, Group(Text(f"{run}: what a gateway recorded"), sessions)
    return data, Group(Text(f"{run}: {state}"), table, sessions, *told)


def session(run: Path, name: str) -> tuple[list[dict[str, Any]], RenderableType]:
    """A session's branches: what was rendered, what was sampled, and where they part."""
    rows = _session_rows(run, name)
    tree = Tree(f"{name}  task {rows[0]['task_id']}  reward {_shown(rows[0]['reward'])}")
    seen: dict[str, Tree] = {}
    number = 0
    for row in rows:
        at, position = tree, 0
        for span in row["turns"]:
            known = seen.get(span["turn"])
            if known is None:
                at.add(Text(f"context {span['start'] - position} tokens", style="dim"))
                known = at.add(_turn_line(row, span, number))
                seen[span["turn"]] = known
                number += 1
            at, position = known, span["end"]
    return rows, tree


def turn(run: Path, name: str, number: int, decode: Decode) -> tuple[dict[str, Any], RenderableType]:
    """One turn's tokens, each with its mask and log-probability. Turns are numbered as `session` shows them."""
    rows = _session_rows(run, name)
    spans: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for row in rows:
        for span in row["turns"]:
            spans.setdefault(span["turn"], (row, span))
    if not 0 <= number < len(spans):
        raise ConfigError(f"--turn {number}: session {name} has turns 0 to {len(spans) - 1}")
    row, span = list(spans.values())[number]
    earlier = [other["end"] for other in row["turns"] if other["end"] <= span["start"]]
    begin = max(earlier, default=0)
    table = Table("position", "id", "token", "mask", "logprob", "version", title=f"turn {number} ({span['turn']})")
    tokens = []
    for i in range(begin, span["end"]):
        id, mask = int(row["ids"][i]), int(row["loss_mask"][i])
        logprob, version = float(row["rollout_logprobs"][i]), int(row["versions"][i])
        text = decode([id])
        tokens.append({"position": i, "id": id, "token": text, "mask": mask, "logprob": logprob, "version": version})
        sampled = version >= 0
        cells = (str(i), str(id), repr(text), str(mask), f"{logprob:.4f}" if sampled else "", str(version))
        table.add_row(*(Text(cell) for cell in cells), style="" if sampled else "dim")
    return {"turn": span, "tokens": tokens}, table


def drift(run: Path, session: str = "") -> tuple[dict[str, Any], RenderableType]:
    """Forks per cause, with what was rendered again for them and the first of each; differences that were accepted.

    Of sessions whose ids begin with `session`.
    """
    rows = _rollouts(run, session)
    records = [{"session": row["session"], **record} for row in rows for record in row["drift"]]
    accepted = Counter[str]()
    for row in rows:
        accepted.update(row["accepted"])
    counts = Counter(record["cause"] for record in records)
    causes, shown = {}, []
    for cause, count in counts.most_common():
        of_cause = [record for record in records if record["cause"] == cause]
        first, rerendered = of_cause[0], sum(record["rerendered"] for record in of_cause)
        causes[cause] = {"forks": count, "rerendered": rerendered, "first": first}
        told = f"{cause}: {count} {'fork' if count == 1 else 'forks'}, {rerendered} tokens rendered again"
        shown.append(Text(told, style="bold"))
        shown += map(Text, _first(first))
    shown += [] if shown else [Text("no forks")]
    shown += [Text(f"accepted on {count} turns: {name}") for name, count in accepted.most_common()]
    return {"causes": causes, "accepted": dict(accepted), "records": records}, Group(*shown)


def _first(record: dict[str, Any]) -> list[str]:
    """An example of a fork, in lines."""
    where = [f"{name} {record[name]}" for name in ("message", "role", "field") if record[name] is not None]
    lines = [f"  first in session {record['session']}: {', '.join(where) or 'at its beginning'}"]
    if record["field"] is not None:
        before, after = _around(record)
        lines += [f"    before {before}", f"    after  {after}"]
    return lines + ([f"    accepted with {record['setting']}"] if record["setting"] else [])


def _around(record: dict[str, Any]) -> list[str]:
    """What stood before and what came, on a line each, from shortly before their first difference on."""
    before, after = record["before"] or "", record["after"] or ""
    pairs = enumerate(zip(before, after, strict=False))
    start = max(0, next((i for i, (a, b) in pairs if a != b), min(len(before), len(after))) - 10)
    return [repr(text[start : start + 50]) for text in (before, after)]


def ledger(run: Path, session: str = "") -> tuple[dict[str, Any], RenderableType]:
    """Where every sampled token of the run ended, or of those of its sessions whose ids begin with `session`."""
    total: dict[str, Any] = {"sampled": 0, "trained": 0, "masked": Counter(), "dropped": Counter(), "in_flight": 0}
    for row in _rollouts(run, session):
        for name, value in row["ledger"].items():
            if isinstance(value, dict):
                total[name].update(value)
            else:
                total[name] += value
    table = Table("where", "tokens")
    for name in ("sampled", "trained", "in_flight"):
        table.add_row(name, str(total[name]))
    for name in ("masked", "dropped"):
        for reason, count in total[name].items():
            table.add_row(f"{name}: {reason}", str(count))
    return {**total, "masked": dict(total["masked"]), "dropped": dict(total["dropped"])}, table


def _session_rows(run: Path, name: str) -> list[dict[str, Any]]:
    """The branches of a session, by its id or the beginning of it, selected or not; their masks say what is trained."""
    record = load_session(run, name)
    trained: dict[str, Mask] = {}
    for sample in record.samples(read_select(run)):
        for span in sample.turns:
            mask = sample.loss_mask[span.start : span.end]
            trained[span.turn] = trained.get(span.turn, mask) | mask
    every = selected(record.tree, _EVERY)
    samples = flatten(record.id, record.tree, every, record.reward, record.turn_rewards, record.opening.metadata)
    rows = []
    for sample in samples:
        loss_mask = np.zeros_like(sample.loss_mask)
        for span in sample.turns:
            mask = trained.get(span.turn, EMPTY)
            loss_mask[span.start : span.start + len(mask)] = mask
        rows.append(session_row(replace(sample, loss_mask=loss_mask), record.tree))
    if not rows:
        raise ConfigError(f"--session {name}: no turn is recorded in it")
    return rows


_EVERY = SelectConfig(tokens="every_branch", roles=get_args(BranchRole), unadopted="keep")


def _rollouts(run: Path, begin: str = "") -> list[dict[str, Any]]:
    """A row a session: of a training run as the rollouts were written down, else as the journal has them.

    `begin` is how their ids do. Raises ConfigError where none does.
    """
    if (run / "rollouts.jsonl").exists():
        rows = [row for row in read_rows(run, "rollouts.jsonl") if row["session"].startswith(begin)]
    else:
        with open_journal(run) as journal:
            rows = []
            for session in journal.sessions():
                if session.startswith(begin):
                    with suppress(UnknownSession):  # it was pruned meanwhile
                        rows.append(_rollout(journal, session))
    if begin and not rows:
        raise ConfigError(f"--session {begin}: no such session in {run}; `steno inspect {run}` lists some")
    return rows


def _rollout(journal: Journal, session: str) -> dict[str, Any]:
    try:
        record, error = journal.load(session), None
    except UnknownSession:
        raise
    except TraceError as e:
        record, error = SessionRecord(Opening(session)), str(e)
    accepted = Counter(name for turn in record.tree.turns.values() for name in turn.accepted)
    return {
        "session": record.id,
        "task_id": record.opening.metadata.get("task_id"),
        "reward": record.reward,
        "status": record.status or _state(record, error),
        "num_turns": len(record.tree.turns),
        "error": error,
        "ledger": asdict(record.ledger()),
        "drift": [asdict(drift) for drift in record.drift],
        "accepted": dict(accepted),
    }


def _state(record: SessionRecord, error: str | None) -> str:
    return "damaged" if error is not None else "released" if record.released else record.state


def _turn_line(row: dict[str, Any], span: dict[str, Any], number: int) -> Text:
    here = slice(span["start"], span["end"])
    logprobs, mask = row["rollout_logprobs"][here], row["loss_mask"][here]
    mean = sum(logprobs) / max(len(logprobs), 1)
    told = f"turn {number}: {len(logprobs)} tokens, {sum(mask)} trainable, ended by {span['ended_by']}, "
    told += f"mean logprob {mean:.3f}" + (f", reward {_shown(span['reward'])}" if span["reward"] is not None else "")
    return Text(told, style="bold")


def _read_json(path: Path) -> dict[str, Any]:
    with boundary(ConfigError, f"read {path}"):
        return orjson.loads(path.read_bytes()) if path.exists() else {}


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
