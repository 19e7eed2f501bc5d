"""Callables named in the config: `module:function`, or `file.py:function`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from stenograph.errors import ConfigError


def load_callable(name: str, setting: str) -> Callable[..., Any]:
    """Import what `name` says; modules are looked up in the current folder first.

    Raises ConfigError naming `setting`.
    """
    module_name, colon, attribute = name.rpartition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"{setting}: write module:function or file.py:function, got {name!r}")
    try:
        module = _from_file(Path(module_name)) if module_name.endswith(".py") else _from_path(module_name)
    except (Exception, SystemExit) as e:  # whatever the user's module does while it is imported
        raise ConfigError(f"{setting}: cannot import {module_name}: {type(e).__name__}: {e}") from e
    found = getattr(module, attribute, None)
    if found is None:
        raise ConfigError(f"{setting}: {module_name} has no function {attribute!r}{_close(attribute, module)}")
    if not callable(found):
        raise ConfigError(f"{setting}: {name} is a {type(found).__name__}, not a function")
    return found


def _close(attribute: str, module: ModuleType) -> str:
    matches = difflib.get_close_matches(attribute, dir(module), n=3)
    return f"; close matches: {', '.join(matches)}" if matches else ""


def _from_path(name: str) -> ModuleType:
    here = str(Path.cwd())
    if sys.path[:1] != [here]:
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _from_file(path: Path) -> ModuleType:
    path = path.resolve()
    name = f"stenograph_user_{path.stem}_{abs(hash(path)):x}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # it may import the files beside it; last, so that they hide nothing
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
