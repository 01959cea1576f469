"""What the stand-in's registers hold. All of it follows from what is asked for, so a test knows the answer.

Numbers that begin with 9 are refused, those that begin with 8 take their time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import date, timedelta

CIRCONSCRIPTIONS = ("Montréal", "Québec", "Sherbrooke", "Trois-Rivières")
_TRADES = ("Boulangerie", "Quincaillerie", "Menuiserie", "Imprimerie", "Fromagerie", "Garage")
_NAMES = ("Côté", "Lévesque", "Bélanger", "Desrosiers", "Gagné", "Thériault", "L'Écuyer", "Fréchette")
_STREETS = ("rue Saint-Denis", "chemin Sainte-Foy", "boulevard René-Lévesque", "côte d'Abraham")
_KINDS = ("nom", "nom antérieur", "autre nom")
_NATURES = ("Hypothèque conventionnelle", "Réserve de propriété", "Droit du crédit-bailleur", "Hypothèque légale")


@dataclass(frozen=True)
class Name:
    """A name that a company bears or bore."""

    name: str
    kind: str


@dataclass(frozen=True)
class Company:
    """An entry of the company register."""

    neq: str
    name: str
    status: str
    address: str
    registered_on: date
    names: tuple[Name, ...]


@dataclass(frozen=True)
class Inscription:
    """An entry of the movable-rights register."""

    number: str
    nature: str
    registered_on: date
    debtor: str
    creditor: str
    amount_cents: int

    @property
    def amount(self) -> str:
        """As the register shows it: 12 345,67 $, with narrow no-break spaces."""
        whole, cents = divmod(self.amount_cents, 100)
        return f"{whole:,}".replace(",", "\u202f") + f",{cents:02d}\u00a0$"


def refused(number: str) -> bool:
    """The registry has no such document."""
    return number.startswith("9")


def slow(number: str) -> bool:
    """The registry takes its time."""
    return number.startswith("8")


def companies(asked: str) -> list[Company]:
    """What the company register finds under a name."""
    chance = random.Random(f"req {asked}")
    return [] if _nothing(asked) else [_company(asked, chance) for _ in range(chance.randint(1, 4))]


def company(asked: str, neq: str) -> Company | None:
    """One of them, by its number."""
    return next((found for found in companies(asked) if found.neq == neq), None)


def inscriptions(asked: str) -> list[Inscription]:
    """What the movable-rights register finds under a name."""
    chance = random.Random(f"rdprm {asked}")
    return [] if _nothing(asked) else [_inscription(asked, chance) for _ in range(chance.randint(1, 8))]


def _nothing(asked: str) -> bool:
    return asked.lower().startswith("aucun")


def _company(asked: str, chance: random.Random) -> Company:
    bearer = f"{chance.choice(_TRADES)} {chance.choice(_NAMES)} inc."
    names = [Name(f"{asked} {chance.choice(_NAMES)} & Fils <{n}>", _KINDS[n % 3]) for n in range(chance.randint(1, 4))]
    return Company(
        neq=f"11{chance.randrange(10**8):08d}",
        name=bearer,
        status=chance.choice(("Immatriculée", "Radiée d'office")),
        address=f"{chance.randint(1, 9999)}, {chance.choice(_STREETS)}, {chance.choice(CIRCONSCRIPTIONS)}",
        registered_on=_day(chance),
        names=tuple(names),
    )


def _inscription(asked: str, chance: random.Random) -> Inscription:
    day = _day(chance)
    return Inscription(
        number=f"{day.year % 100:02d}-{chance.randrange(10**7):07d}-{chance.randint(1, 9999):04d}",
        nature=chance.choice(_NATURES),
        registered_on=day,
        debtor=asked,
        creditor=f"Caisse Desjardins de {chance.choice(CIRCONSCRIPTIONS)}",
        amount_cents=chance.randrange(100_000, 90_000_000),
    )


def _day(chance: random.Random) -> date:
    return date(1995, 1, 1) + timedelta(days=chance.randrange(11_000))
