"""What a request is, judged on its method and normalised path alone."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from urllib.parse import unquote

GENERATION = {"/v1/chat/completions", "/v1/messages", "/v1/responses"}
COUNT_TOKENS = "/v1/messages/count_tokens"
POSTED = {*GENERATION, COUNT_TOKENS}
_SERVED = {*POSTED, "/v1/models"}


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


def meant(path: str) -> str | None:
    """The address of this gateway that `path` is but for its /v1, forgotten or doubled."""
    words = path.split("/")[1:]
    while words and words[0] == "v1":
        del words[0]
    address = "/v1/" + "/".join(words)
    return address if address != path and address in _SERVED else None


# Under /v1/ or beside it: what vLLM, SGLang, LMDeploy and llama.cpp serve that changes the engine for everyone ...
_CONTROLS = {
    "load_lora_adapter", "unload_lora_adapter", "load_lora_adapter_from_tensors", "lora-adapters", "slots",
    "pause", "resume", "pause_generation", "continue_generation", "abort_request", "abort_requests",
    "sleep", "wake_up", "wakeup", "release_memory_occupation", "resume_memory_occupation",
    "update_weights", "update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_distributed",
    "update_weights_from_ipc", "update_weight_version", "init_weights_update_group", "destroy_weights_update_group",
    "init_weight_transfer_engine", "start_weight_update", "start_draft_weight_update", "finish_weight_update",
    "weight_checker", "flush_cache", "reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache",
    "collective_rpc", "scale_elastic_ep", "start_profile", "stop_profile", "set_internal_state",
    "configure_logging", "slow_down", "open_session", "close_session", "terminate", "distserve", "nodes",
}  # fmt: skip

# ... and what samples tokens, itself or at an address below.
_SAMPLES = {
    "audio", "batches", "chat", "completion", "completions", "completions_qos", "decisions", "fim", "generate",
    "images", "inference", "infill", "invocations", "messages", "realtime", "responses", "videos",
}  # fmt: skip


def is_engine_control(path: str) -> bool:
    """Whether `path` is for the engine's owner alone."""
    return _first(path) in _CONTROLS


def is_unrecorded_generation(method: str, path: str) -> bool:
    """Whether the engine would sample tokens there that no session would hear of."""
    if method.upper() != "POST" or path in POSTED:
        return False
    return _first(path) in _SAMPLES and path.rpartition("/")[2] not in ("render", "cancel", "input_tokens")


def _first(path: str) -> str:
    """The first word of a normalised path, /v1 apart."""
    words = path.split("/")[1:]
    return words[1] if words[0] == "v1" and len(words) > 1 else words[0]
