"""A model's weights as others take them: each tensor once, and a folder that is complete or absent."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel

from stenograph.errors import CheckpointError, boundary


class ModelWeights:
    """The `WeightSource` of a model: parameters and saved buffers, not copied, tied ones once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        saved = self._model.state_dict().keys()
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()
        for name, buffer in self._model.named_buffers():
            if name in saved:
                yield name, buffer.detach()


def save_model(model: PreTrainedModel, path: Path) -> None:
    """Export `model` to the folder `path` in Hugging Face's format; one that stands there is replaced.

    Raises CheckpointError where it cannot be written; `path` is then what it was.
    """
    with boundary(CheckpointError, f"save the model to {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
            new, old = Path(folder, "new"), Path(folder, "old")
            model.save_pretrained(new)
            if path.exists():
                os.rename(path, old)
            os.rename(new, path)
            shutil.rmtree(old, ignore_errors=True)
