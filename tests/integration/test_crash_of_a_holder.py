"""With a process that is killed go the payloads of its requests and samples; those of sessions and checkpoints stay."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from stenograph.traces.experts import routed_experts
from stenograph.traces.payloads import Holder
from stenograph.traces.sqlite import SqliteTraceStore
from stenograph.types import Payload
from support.payloads import is_there

CHILD = """
import json, os, signal, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from stenograph.traces.payloads import Holder
from stenograph.traces.session import Opening
from stenograph.traces.sqlite import SqliteTraceStore
from support.turns import make_turn

store = SqliteTraceStore(Path(sys.argv[1]))
store.open(Opening("s"))
request, sample, checkpoint = (Holder(kind, "1") for kind in ("request", "sample", "checkpoint"))
value = np.arange(4, dtype=np.uint8).reshape(2, 1, 2)
held = {kind: store.payloads.put(value, holder) for kind, holder in
        [("request", request), ("sample", sample), ("checkpoint", checkpoint), ("session", request)]}
store.commit("s", None, replace(make_turn([1, 2], [3, 4]), experts=held["session"]))
store.samples("s", holder=sample)
print(json.dumps({kind: payload.id for kind, payload in held.items()}), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_holds_nothing_but_what_its_sessions_and_checkpoints_do(tmp_path: Path) -> None:
    path, tests = tmp_path / "traces.db", Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)], cwd=tests, stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    held = {kind: Payload(id, "uint8", (2, 1, 2)) for kind, id in json.loads(done.stdout).items()}
    with closing(SqliteTraceStore(path)) as store:
        there = {kind: is_there(store.payloads, payload) for kind, payload in held.items()}
        assert there == {"request": False, "sample": False, "checkpoint": True, "session": True}
        (sample,) = store.samples("s", holder=Holder("sample", "2"))
        assert store.release(["s"]) == ["s"]
        routed = routed_experts(sample, store.payloads.get)  # for whoever had its sample, it is there all the same
        assert routed is not None
        assert routed[0].reshape(4, 2).tolist() == [[0, 0], [0, 1], [2, 3], [0, 0]]
        assert routed[1].tolist() == [False, True, True, False]
        assert store.payloads.release([Holder("sample", "2")]) == [held["session"].id]
        assert store.payloads.release([Holder("checkpoint", "1")]) == [held["checkpoint"].id]
