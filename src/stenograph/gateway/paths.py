"""What a request is, judged on its method and normalised path alone."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from urllib.parse import unquote

GENERATION = {"/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """A normalised path, and the session that it names (`/s/{id}/...`)."""

    session: str | None
    path: str


def read(raw_path: str) -> Target:
    """Normalise `raw_path` (`..`, `//`, percent-encoding) and take the session off its front."""
    path = unquote(raw_path.partition("?")[0])
    path = posixpath.normpath("/" + path.lstrip("/"))
    if path.startswith("/s/"):
        session, _, rest = path.removeprefix("/s/").partition("/")
        return Target(session, "/" + rest)
    return Target(None, path)


def is_generation(method: str, path: str) -> bool:
    return method == "POST" and path in GENERATION
