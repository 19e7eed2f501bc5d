"""docs/forks.md names what the code knows, neither more nor less."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from stenograph.traces.drift import Cause
from stenograph.traces.equivalences import NAMES
from stenograph.types import BranchRole

PAGE = (Path(__file__).parents[3] / "docs" / "forks.md").read_text()


def first_column(title: str) -> list[str]:
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def test_equivalences_causes_and_roles_are_those_of_the_code() -> None:
    assert sorted(first_column("Differences that are accepted")) == sorted(NAMES)
    assert first_column("Causes of forks") == list(get_args(Cause))
    assert sorted(first_column("Roles")) == sorted(get_args(BranchRole))
