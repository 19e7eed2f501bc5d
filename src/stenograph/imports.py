"""Callables named in the config: found when a run starts, and kept from ending anything but themselves."""

from __future__ import annotations

import asyncio
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from stenograph.errors import ConfigError

T = TypeVar("T")


class TookTooLong(Exception):
    """Our deadline passed; a TimeoutError is the callable's own."""


def load_callable(name: str, setting: str) -> Callable[..., Any]:
    """Import `module:function` or `file.py:function`; modules are looked up in the current folder first.

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


async def finish(work: Awaitable[T], timeout_s: float) -> T:
    """Await what a callable returned. Our deadline and our cancellation hold, whatever it makes of them.

    It has a task of its own, so that nothing it raises passes for either. Raises TookTooLong, or what it raised:
    a RuntimeError in place of a SystemExit or a CancelledError, which would end more than this call.
    """
    task = asyncio.create_task(_contained(work))
    try:
        await asyncio.wait([task], timeout=timeout_s)
        late = not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if late:
        raise TookTooLong(f"took longer than {timeout_s:g} s") from task.exception()
    return task.result()


async def _contained(work: Awaitable[T]) -> T:
    try:
        return await work
    except (SystemExit, asyncio.CancelledError) as e:
        raise RuntimeError(f"it raised {e!r}") from e


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
