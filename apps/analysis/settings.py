"""Every setting of the application, from environment variables that begin with ``ANALYSIS_``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from rowmill import DeclarationError
from rowmill.errors import did_you_mean

PREFIX = "ANALYSIS_"


@dataclass(frozen=True)
class Settings:
    """The defaults are those of the specification; tests and the demo shorten the times."""

    # Phases
    processors: int = 10
    batch: int = 10
    pace_starts: int = 3
    pace_seconds: float = 5.0
    poll_seconds: float = 60.0
    untouched_seconds: float = 30.0
    stuck_seconds: float = 300.0
    sweep_seconds: float = 300.0
    backoff_seconds: float = 30.0
    health_seconds: float = 30.0

    # Websites
    fetch_seconds: float = 20.0
    fetch_bytes: int = 2_000_000
    allow_private: bool = False
    internet: str = ""

    # Prompts
    template: str = ""
    prompt_tokens: int = 3000

    # The model
    provider: str = "openai"
    model_url: str = ""
    model_key: str = ""
    model_name: str = ""
    model_seconds: float = 120.0
    answer_tokens: int = 600
    tokens_per_minute: int = 60_000
    tokens_per_day: int = 2_000_000
    minute_seconds: float = 60.0

    # The web application
    worker: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value, name = getattr(self, field.name), PREFIX + field.name.upper()
            if field.type in ("int", "float") and not value > 0:
                raise DeclarationError(f"{name}={value} must be above 0", hint=f"{name}={field.default}")
        if self.provider not in ("openai", "gemini"):
            raise DeclarationError(
                f"{PREFIX}PROVIDER={self.provider!r} is not known", hint=f"{PREFIX}PROVIDER=openai or gemini"
            )
        least = self.prompt_tokens + self.answer_tokens
        if least > min(self.tokens_per_minute, self.tokens_per_day):
            raise DeclarationError(
                f"a prompt and its answer may take {least} tokens, and the budget never has as many at once",
                hint=f"{PREFIX}TOKENS_PER_MINUTE={least * 10}, or smaller {PREFIX}PROMPT_TOKENS",
            )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """What the environment says; an unknown ``ANALYSIS_`` variable is an error, since it has no effect."""
        environ = os.environ if environ is None else environ
        kinds = {PREFIX + field.name.upper(): field for field in fields(cls)}
        given: dict[str, Any] = {}
        for name, text in environ.items():
            if name.startswith(PREFIX):
                if name not in kinds:
                    raise DeclarationError(f"there is no setting {name}", hint=did_you_mean(name, kinds))
                given[kinds[name].name] = _read(name, text, str(kinds[name].type))
        return cls(**given)

    def environ(self) -> dict[str, str]:
        """These settings as variables, for processes that are started with them; only those that are not defaults."""
        return {
            PREFIX + field.name.upper(): str(value)
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    def seconds(self, name: str) -> timedelta:
        """A setting that is a time."""
        return timedelta(seconds=getattr(self, f"{name}_seconds"))


def _read(name: str, text: str, kind: str) -> Any:
    if kind == "bool":
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if text.strip().lower() in words:
            return words[text.strip().lower()]
        raise DeclarationError(f"{name}={text!r} is neither true nor false", hint=f"{name}=true")
    try:
        return {"int": int, "float": float}.get(kind, str)(text)
    except ValueError:
        raise DeclarationError(
            f"{name}={text!r} is not a number", hint=f"{name}={10 if kind == 'int' else 2.5}"
        ) from None
