"""A vLLM server is named in the config, served from, and not trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from stenograph.config import Config, EngineConfig, load_config
from stenograph.engines.vllm import VllmEngine
from stenograph.errors import ConfigError
from stenograph.progress import Progress
from stenograph.rendering import load_rendering
from stenograph.run import build_engine, train
from support.vllm import fake_vllm


async def test_the_config_builds_it() -> None:
    with fake_vllm() as server:
        config = load_config(None, ["engine.kind=vllm", f"engine.url={server.url}"])
        engine = await build_engine(config, load_rendering(config.model), None)
        await engine.aclose()
    assert isinstance(engine, VllmEngine)


def test_an_address_is_needed() -> None:
    with pytest.raises(ConfigError, match=r'engine\.kind = "vllm" needs engine\.url'):
        load_config(None, ["engine.kind=vllm"])
    with pytest.raises(ConfigError, match=r"engine\.url: .*, got 'localhost:8000'"):
        load_config(None, ["engine.kind=vllm", "engine.url=localhost:8000"])


async def test_it_cannot_be_trained(tmp_path: Path) -> None:
    config = Config(engine=EngineConfig(kind="vllm", url="http://127.0.0.1:9"))
    with pytest.raises(ConfigError, match=r'"vllm" cannot be given new weights: set engine\.kind = "local"'):
        await train(config, tmp_path / "run", Progress(1), lambda _: None)
    assert not (tmp_path / "run").exists()
