"""Budgets: how much all runs together may use within a period, in any unit: tokens, requests, money."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ..errors import DeclarationError, did_you_mean
from .gates import check_shared
from .outcome import Dead


@dataclass(frozen=True)
class Limit:
    """At most ``most`` of a unit within any ``seconds``."""

    unit: str
    most: float
    seconds: float


@dataclass(frozen=True)
class Budget:
    """A named budget. Declared with ``mill.budget(...)``, spent by handlers with ``await job.spend(...)``."""

    name: str
    limits: tuple[Limit, ...]
    #: The environment, or the URL of the database, that holds it for all environments; None: each holds its own.
    shared: str | None = field(default=None, repr=False)

    @classmethod
    def declare(cls, name: str, units: Mapping[str, Any], shared: str | None = None) -> Budget:
        """``Budget.declare("gemini", {"tokens": [(4000, per_minute), (100_000, per_day)]})``."""
        if not units:
            raise DeclarationError(f"budget {name!r} limits nothing", hint="tokens=(4000, timedelta(minutes=1))")
        if shared is not None:
            check_shared(f"budget {name!r}", shared)
        limits = tuple(limit for unit, given in units.items() for limit in _limits(name, unit, given))
        return cls(name, limits, shared)

    def asked(self, amounts: Mapping[str, float], *, used: bool = False) -> list[tuple[Limit, float]]:
        """Return the limits that these amounts count against.

        Raises for an unknown unit, and for an amount above a limit unless it is ``used`` already.
        """
        if not amounts:
            raise DeclarationError(
                f"budget {self.name!r}: spend() needs an amount, such as tokens=100", hint="tokens=1200"
            )
        known = {limit.unit for limit in self.limits}
        for unit, amount in amounts.items():
            if unit not in known:
                raise DeclarationError(
                    f"budget {self.name!r} has no unit {unit!r}", hint=did_you_mean(unit, sorted(known))
                )
            if isinstance(amount, bool) or not isinstance(amount, (int, float)) or amount != amount:
                raise DeclarationError(f"budget {self.name!r}: {amount!r} is not an amount of {unit}")
        limits = [(limit, float(amounts[limit.unit])) for limit in self.limits if limit.unit in amounts]
        for limit, amount in limits:
            if amount > limit.most and not used:
                raise Dead(
                    f"{amount:g} {limit.unit} can never be spent: the budget {self.name!r} is {limit.most:g} in"
                    f" {timedelta(seconds=limit.seconds)}"
                )
        return limits


@dataclass
class Spent:
    """What one run has taken from the budgets, and when, so that returned amounts go back to the same period."""

    taken: dict[str, list[tuple[float, dict[Limit, float]]]] = field(default_factory=dict)

    def note(self, budget: str, asked: Sequence[tuple[Limit, float]], at: float) -> None:
        """Record an amount as taken at that time, in the database's seconds since 1970."""
        self.taken.setdefault(budget, []).append((at, {limit: amount for limit, amount in asked if amount > 0}))

    def returned(self, budget: str, asked: Sequence[tuple[Limit, float]]) -> list[tuple[Limit, float, float]]:
        """Convert negative amounts to limit, amount and the time when it was taken.

        The oldest amount is returned first, so what is still within a period is never counted too low. A run cannot
        return more than it has taken.
        """
        given_back = []
        for limit, amount in asked:
            left = max(-amount, 0.0)
            for at, amounts in self.taken.get(budget, ()):
                some = min(left, amounts.get(limit, 0.0))
                if some > 0:
                    amounts[limit] -= some
                    left -= some
                    given_back.append((limit, some, at))
        return given_back


def _limits(name: str, unit: str, given: Any) -> list[Limit]:
    several: Sequence[Any] = given if isinstance(given, list) else [given]
    limits = []
    for one in several:
        try:
            most, per = one
            limit = Limit(unit, float(most), per.total_seconds())
        except (TypeError, ValueError, AttributeError):
            limit = Limit(unit, 0, 0)
        if limit.most <= 0 or limit.seconds <= 0:
            raise DeclarationError(
                f"budget {name!r}: {unit}={one!r} is not an amount and a period",
                hint=f"{unit}=(4000, timedelta(minutes=1)), or a list of such pairs",
            )
        limits.append(limit)
    return limits
