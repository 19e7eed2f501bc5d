"""Headers on their way through a gateway: those that belong to one connection stay behind."""

from __future__ import annotations

from multidict import CIMultiDict, MultiMapping

_HOPS = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer", "transfer-encoding",
    "upgrade",
}  # fmt: skip
_DECODED = {"gzip", "deflate", "br", "zstd"}  # aiohttp's server undoes these before anyone reads the body


def passed_on(headers: MultiMapping[str]) -> CIMultiDict[str]:
    """Headers less those that belong to one connection: by their names, and by what `Connection` names."""
    named = {name.strip().lower() for value in headers.getall("connection", []) for name in value.split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _HOPS | named)


def sent_on(headers: MultiMapping[str], *left_out: str) -> CIMultiDict[str]:
    """The headers that a request is asked again with, its body as aiohttp read it."""
    sent = passed_on(headers)
    for name in ("content-length", "expect", *left_out):
        sent.popall(name, None)
    if sent.get("content-encoding", "").lower() in _DECODED:
        del sent["content-encoding"]
    return sent
