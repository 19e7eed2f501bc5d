"""A config read: command line before environment before file before default, and one line where something is wrong."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_settings import EnvSettingsSource

from stenograph.config import Config
from stenograph.errors import ConfigError


def load_config(file: Path | None = None, overrides: list[str] | None = None) -> Config:
    """Read `file` (TOML), the environment and `a.b=VALUE` overrides. Relative paths in the file are the file's own.

    Raises ConfigError with one line that names the field and the remedy.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as e:
            raise ConfigError(f"cannot read the config {file}: {e.strerror}; give the path of a TOML file") from e
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
            raise ConfigError(f"{file} is not TOML: {e}") from e
        _refuse_secrets(values, str(file))
        values = _anchor_paths(values, file.resolve().parent)
    return _loaded(values, file, overrides or [])


def recorded_config(text: str, where: Path) -> Config:
    """A config that was recorded as TOML at `where`; the environment comes first here too. Raises as `load_config`."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"the config in {where} is not TOML: {e}") from e
    return _loaded(values, where, [])


def _loaded(values: dict[str, Any], file: Path | None, overrides: list[str]) -> Config:
    environment = EnvSettingsSource(Config, env_prefix="STENO_", env_nested_delimiter="__", env_ignore_empty=True)
    try:
        _merge(values, environment())
    except ValueError as e:
        raise ConfigError(f"environment: {e}") from e
    for override in overrides:
        given = _parse_override(override)
        _refuse_secrets(given, "--set")
        _merge(values, given)
    try:
        return Config(**values)
    except ValidationError as e:
        raise ConfigError(_one_line(e, file)) from e


# What names files: in a config file, relative to that file.
_FILES = (
    ("model", "chat_template"), ("model", "response_schema"), ("engine", "script"),
    ("store", "path"), ("tasks", "path"),
)  # fmt: skip
_CALLABLES = (("tasks", "callable"), ("agent", "callable"), ("judge", "callable"))
_COMMANDS = (("agent", "command"), ("judge", "command"))


def _anchor_paths(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make the file's relative paths absolute: of files, of `file.py:function`, of a command's own files."""
    held_out = values.get("evaluation", {})
    scopes = [values, held_out if isinstance(held_out, dict) else {}]
    for section, field in (*_FILES, *_CALLABLES, *_COMMANDS):
        for scope in scopes:
            held = scope.get(section)
            if isinstance(held, dict) and field in held:
                held[field] = _anchored(held[field], folder, whole=(section, field) in _FILES)
    return values


def _anchored(value: Any, folder: Path, *, whole: bool) -> Any:
    if isinstance(value, list):
        return [str(folder / word) if isinstance(word, str) and (folder / word).is_file() else word for word in value]
    if not isinstance(value, str):
        return value
    return str(folder / value) if whole or value.partition(":")[0].endswith(".py") else value


def _refuse_secrets(values: dict[str, Any], where: str) -> None:
    engine = values.get("engine")
    if isinstance(engine, dict) and "api_key" in engine:
        told = "engine.api_key is a secret; give it in the environment, as STENO_ENGINE__API_KEY"
        raise ConfigError(f"{where}: {told}")


def _merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _parse_override(override: str) -> dict[str, Any]:
    path, sign, text = override.partition("=")
    if not sign or not path.strip():
        raise ConfigError(f"--set {override!r}: write section.field=VALUE")
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    for name in reversed(path.strip().split(".")):
        value = {name: value}
    return value


def _one_line(error: ValidationError, file: Path | None) -> str:
    first = error.errors()[0]
    field = ".".join(str(x) for x in first["loc"])
    where = f"{file}: " if file is not None else ""
    if first["type"] == "extra_forbidden":
        return f"{where}unknown setting {field!r}; {_known(first['loc'])}"
    message = first["msg"].removeprefix("Value error, ")
    return (
        f"{where}{field}: {message}, got {first['input']!r}"
        if field and first["type"] != "value_error"
        else f"{where}{field}{': ' if field else ''}{message}"
    )


def _known(loc: tuple[int | str, ...]) -> str:
    model: type[BaseModel] | None = Config
    for name in loc[:-1]:
        annotation = model.model_fields[str(name)].annotation if model and str(name) in model.model_fields else None
        model = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    return f"known here: {', '.join(sorted(model.model_fields))}" if model else "remove it"
