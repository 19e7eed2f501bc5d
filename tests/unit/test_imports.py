"""Imports only point up the list of packages in ARCHITECTURE.md."""

import ast
from pathlib import Path

import pytest

import stenograph

ROOT = Path(stenograph.__file__).parent

# Each package may import those before it. Parts that share a line do not import one another.
LAYERS = [
    {"types", "errors"},
    {"config_training"},
    {"config", "imports", "processes"},
    {"config_loading", "models"},
    {"rendering"},
    {"dialects"},
    {"traces"},
    {"engines", "interchange"},
    {"gateway"},
    {"tasks", "agents", "judges"},
    {"rollouts"},
    {"algorithms"},
    {"training"},
    {"rundir"},
    {"inspecting", "curve", "progress", "watching"},
    {"accounts"},
    {"loop", "resuming"},
    {"run", "replaying"},
    {"workers"},
    {"cli"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Beyond the order: who must never meet whom, at any level of a file.
FORBIDDEN = {
    "gateway": {"torch", "stenograph.training", "stenograph.rollouts", "stenograph.models"},
    "rollouts": {"torch", "stenograph.gateway"},
    "training": {"stenograph.gateway", "stenograph.rollouts"},
    "traces": {"torch"},
    "interchange": {"torch"},
    "types": {"torch"},
    "errors": {"torch"},
}


def modules() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


def package(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_up(path: Path) -> None:
    here = package(path)
    assert here in RANK, f"{here} has no place in the list of packages"
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "stenograph" and len(parts) > 1 and parts[1] in RANK and parts[1] != here:
            assert RANK[parts[1]] < RANK[here], f"{here} imports {parts[1]}, which stands below it"
        assert not any(name == f or name.startswith(f + ".") for f in FORBIDDEN.get(here, ())), f"{here} imports {name}"
