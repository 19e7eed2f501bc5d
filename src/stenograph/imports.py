"""Callables named in the config as `module:function`, looked up from the current folder first."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stenograph.errors import ConfigError


def load_callable(name: str, setting: str) -> Callable[..., Any]:
    """Import `module:function`. Raises ConfigError naming `setting`."""
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"{setting}: write module:function, got {name!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as e:
        raise ConfigError(f"{setting}: cannot import {module_name!r} from {here}: {e}") from e
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"{setting}: {module_name} has no function {attribute!r}")
    return found
