"""Every setting: an environment variable, its default, and what it means. README.md has the same table."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

from rowmill.errors import DeclarationError

#: Environment -> the variable with its database's URL, in the order in which a worker serves them.
ENVIRONMENTS = {"prod": "PROD_DATABASE_URL", "staging": "STAGING_DATABASE_URL", "dev": "DEV_DATABASE_URL"}

#: Variable -> default. A site's own three are made from its prefix: see ``sites.py``.
DEFAULTS = {
    "ENVIRONMENTS": "",
    "WORKER_COUNT": "3",
    "WORKER_SLOTS": "1",
    "WORKER_KINDS": "",
    "WORKER_INSTANCE": "1",
    "STUCK_AFTER_SECONDS": "300",
    "STUCK_AT_START_SECONDS": "120",
    "SITE_TIMEOUT_SECONDS": "30",
    "DOWNLOAD_TIMEOUT_SECONDS": "300",
    "BREAKER_FAILURES": "5",
    "BREAKER_MINUTES": "5",
    "EVIDENCE_DIR": "evidence",
    "CHROMIUM_PATH": "",
    "HEADLESS": "1",
}


class Environments(Mapping[str, str]):
    """The environments that ``ENVIRONMENTS`` names, in its order, or those whose variable is set; read when asked."""

    def _set(self) -> dict[str, str]:
        if named := [name.strip() for name in text("ENVIRONMENTS").split(",") if name.strip()]:
            return {name: _url(name) for name in named}
        found = {name: os.environ[variable] for name, variable in ENVIRONMENTS.items() if os.environ.get(variable)}
        if not found:
            raise DeclarationError(
                f"no environment is set: none of {', '.join(ENVIRONMENTS.values())}",
                hint="PROD_DATABASE_URL=postgresql://user:password@host/database, or DEV_DATABASE_URL=sqlite:///dev.db",
            )
        return found

    def __getitem__(self, name: str) -> str:
        return self._set()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._set())

    def __len__(self) -> int:
        return len(self._set())


def _url(environment: str) -> str:
    """The database of an environment that was named; its variable is its name's in capitals."""
    variable = f"{environment.upper().replace('-', '_')}_DATABASE_URL"
    if not os.environ.get(variable):
        raise DeclarationError(
            f"ENVIRONMENTS names {environment!r}, and {variable} is not set", hint=f"{variable}=postgresql://..."
        )
    return os.environ[variable]


def text(name: str) -> str:
    """A setting as it stands in the environment, or its default."""
    return os.environ.get(name) or DEFAULTS[name]


def number(name: str, *, least: float) -> float:
    """A setting that is a number."""
    given = text(name)
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if value < least:
        raise DeclarationError(f"{name}={given!r} is no number of at least {least:g}", hint=f"{name}={DEFAULTS[name]}")
    return value


def whole(name: str) -> int:
    """A setting that is a count."""
    value = number(name, least=1)
    if value != int(value):
        raise DeclarationError(f"{name}={value:g} is no whole number", hint=f"{name}={DEFAULTS[name]}")
    return int(value)


def seconds(name: str) -> timedelta:
    """A setting that is a length of time."""
    return timedelta(seconds=number(name, least=0.1))


def outage() -> timedelta:
    """How long nothing is asked of a site or a storage that is in trouble."""
    return timedelta(minutes=number("BREAKER_MINUTES", least=0.001))


@dataclass(frozen=True)
class Access:
    """Where a site is, and who logs in there."""

    url: str
    user: str = ""
    password: str = ""

    def __repr__(self) -> str:
        return f"Access({self.url!r}, {self.user!r})"


def access(prefix: str, *, login: bool) -> Access:
    """A site's address and account: ``{prefix}_URL``, ``{prefix}_USER``, ``{prefix}_PASSWORD``."""
    names = [f"{prefix}_URL", *([f"{prefix}_USER", f"{prefix}_PASSWORD"] if login else [])]
    if missing := [name for name in names if not os.environ.get(name)]:
        raise DeclarationError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set",
            hint="set what apps/registre/README.md says of the sites; for a trial: python -m apps.registre.standin",
        )
    url, *account = (os.environ[name] for name in names)
    return Access(url.rstrip("/"), *account)
