"""Arms of a serving bench: an env file each, which names a server to start, or one that runs already."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from bigpool.errors import ArgumentError

OURS = {"BIGPOOL_COMMAND": "command", "BIGPOOL_BASE_URL": "base_url", "BIGPOOL_MODEL": "model", "BIGPOOL_API_KEY": "api_key"}
PORT = "{port}"
AGAIN = " again"
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
WHERE = "bigpool bench serving"


@dataclass(frozen=True)
class ServingArm:
    """`command` starts the server, {port} in it a free port; without it `base_url` has to answer. `env` is the server's."""

    name: str
    file: str
    command: str = ""
    base_url: str = ""
    model: str = ""
    api_key: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    same_as: str | None = None

    def again(self) -> ServingArm:
        """The same under another name: for A/A."""
        return replace(self, name=self.name + AGAIN, same_as=self.name)

    def to_json(self) -> dict[str, object]:
        """Without keys and passwords."""
        return {
            "name": self.name,
            "file": self.file,
            "command": self.command,
            "base_url": without_login(self.base_url),
            "env": {name: "hidden" if SECRET.search(name) else value for name, value in self.env.items()},
            "same_as": self.same_as,
        }


def read(path: Path, command: str = "") -> ServingArm:
    """The arm of a file of NAME=VALUE lines. `command`: what starts its server where the file does not say."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "bytes that are no UTF-8"
        raise ArgumentError(
            WHERE, f"--arm: expected a file of NAME=VALUE lines, got {path}: {why}; see docs/bench-serving.md"
        ) from None
    values = dict(filter(None, (_value(path, number, line) for number, line in enumerate(lines, 1))))
    ours = {OURS[name]: values.pop(name) for name in list(values) if name in OURS}
    if not ours.get("base_url"):
        ours.setdefault("command", command)
    arm = ServingArm(path.stem, path.name, env=values, **ours)
    if fault := _fault(arm):
        raise ArgumentError(WHERE, f"--arm: {fault} ({path})")
    return arm


def _value(path: Path, number: int, line: str) -> tuple[str, str] | None:
    text = line.strip().removeprefix("export ").strip()
    if not text or text.startswith("#"):
        return None
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        fault = f"--arm: expected NAME=VALUE, got {line.strip()!r:.60} in line {number} of {path}; # begins a comment"
        raise ArgumentError(WHERE, fault)
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return name, value[1:-1] if quoted else value


def _fault(arm: ServingArm) -> str:
    if not arm.command and not arm.base_url:
        return "expected BIGPOOL_COMMAND or BIGPOOL_BASE_URL, got neither; say how to start the server, or where it is"
    if arm.base_url and not re.match(r"https?://[^/]", arm.base_url):
        return f"expected BIGPOOL_BASE_URL such as http://127.0.0.1:8000/v1, got {arm.base_url!r}; name the scheme too"
    if arm.command and not arm.base_url and PORT not in arm.command:
        return f"expected {PORT} in BIGPOOL_COMMAND, got {arm.command!r}; write --port {PORT}, or set BIGPOOL_BASE_URL too"
    try:
        shlex.split(arm.command)
    except ValueError as error:
        return f"expected a command as a shell reads it, got {arm.command!r}: {error}; close the quotes"
    return ""


def without_login(url: str) -> str:
    """The address without a user and a password in it."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
