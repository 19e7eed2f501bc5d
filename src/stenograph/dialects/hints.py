"""What a body says of its client's own session and agent: hints, which open nothing."""

from __future__ import annotations

from stenograph.dialects.fields import Fields

_MAX_LENGTH = 4096  # of one


def read_hints(fields: Fields) -> dict[str, str]:
    """The texts among them, by their names; other values are the client's own affair, here and in any protocol."""
    metadata, client_metadata = fields.values.get("metadata"), fields.values.get("client_metadata")
    hints = {"prompt_cache_key": fields.values.get("prompt_cache_key")}
    if isinstance(metadata, dict):
        hints["user_id"] = metadata.get("user_id")
    if isinstance(client_metadata, dict):
        hints |= {f"client_metadata.{name}": value for name, value in client_metadata.items()}
    return {name: value[:_MAX_LENGTH] for name, value in hints.items() if isinstance(value, str)}
