"""A callable is found by module or by file; whatever is wrong with it names the setting."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stenograph.errors import ConfigError
from stenograph.imports import load_callable

SETTING = "agent.callable"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder; what is imported from it is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_module_in_the_current_folder(folder: Path) -> None:
    (folder / "steno_here.py").write_text("def f(): return 1\n")
    assert load_callable("steno_here:f", SETTING)() == 1


def test_the_current_folder_comes_first(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "steno_twice.py").write_text("def f(): return 'elsewhere'\n")
    (folder / "steno_twice.py").write_text("def f(): return 'here'\n")
    sys.path.insert(0, str(folder / "elsewhere"))
    sys.path.append(str(folder))
    assert load_callable("steno_twice:f", SETTING)() == "here"


def test_a_module_of_a_package_and_an_installed_one(folder: Path) -> None:
    (folder / "steno_package").mkdir()
    (folder / "steno_package" / "inner.py").write_text("def f(): return 2\n")
    assert load_callable("steno_package.inner:f", SETTING)() == 2
    assert load_callable("json:dumps", SETTING)({}) == "{}"


def test_a_file_is_imported_once_and_files_of_one_name_do_not_meet(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "agent.py").write_text(
            f"loaded = []\ndef f(): loaded.append(1); return {name!r}, len(loaded)\n"
        )
    assert load_callable("a/agent.py:f", SETTING)() == ("a", 1)
    assert load_callable(f"{folder}/a/agent.py:f", SETTING)() == ("a", 2)
    assert load_callable("b/agent.py:f", SETTING)() == ("b", 1)


def test_a_file_sees_the_files_beside_it_as_a_script_would(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "steno_beside.py").write_text("VALUE = 3\n")
    (folder / "sub" / "agent.py").write_text("from steno_beside import VALUE\ndef f(): return VALUE\n")
    assert load_callable("sub/agent.py:f", SETTING)() == 3


def test_the_files_beside_it_hide_nothing(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "colorsys.py").write_text("raise RuntimeError('not this one')\n")
    (folder / "sub" / "agent.py").write_text("import colorsys\ndef f(): return colorsys.ONE_THIRD\n")
    assert load_callable("sub/agent.py:f", SETTING)() == pytest.approx(1 / 3)


def test_dataclasses_work_in_a_file(folder: Path) -> None:
    source = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    (folder / "held.py").write_text(source + "@dataclass\nclass Held:\n    x: int = 4\n")
    assert load_callable("held.py:Held", SETTING)().x == 4


def test_a_file_that_failed_is_tried_again(folder: Path) -> None:
    (folder / "agent.py").write_text("raise ValueError('unfinished')\n")
    with pytest.raises(ConfigError, match=r"agent\.callable: cannot import agent\.py: ValueError: unfinished"):
        load_callable("agent.py:f", SETTING)
    (folder / "agent.py").write_text("def f(): return 'finished'  # of another size than before\n")
    assert load_callable("agent.py:f", SETTING)() == "finished"


@pytest.mark.parametrize("name", ["", ":", "module", "module:", ":f", "agent.py"])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"agent\.callable: write module:function or file\.py:function, got"):
        load_callable(name, SETTING)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("steno_nowhere:f", "cannot import steno_nowhere: ModuleNotFoundError"),
        ("..relative:f", "cannot import ..relative: "),
        ("missing.py:f", r"cannot import missing\.py: FileNotFoundError"),
        ("syntax.py:f", r"cannot import syntax\.py: SyntaxError"),
        ("name.py:f", r"cannot import name\.py: NameError"),
        ("leaves.py:f", r"cannot import leaves\.py: SystemExit"),
        ("good.py:functoin", r"good\.py has no function 'functoin'; close matches: function"),
        ("good.py:number", "good.py:number is a int, not a function"),
    ],
)
def test_what_cannot_be_had(folder: Path, name: str, told: str) -> None:
    (folder / "syntax.py").write_text("def f(:\n")
    (folder / "name.py").write_text("undefined\n")
    (folder / "leaves.py").write_text("import sys\nsys.exit(0)  # a script without `if __name__ == '__main__'`\n")
    (folder / "good.py").write_text("def function(): ...\nnumber = 1\n")
    with pytest.raises(ConfigError, match=rf"agent\.callable: {told}"):
        load_callable(name, SETTING)
