"""Settings: each of them from the environment, each of them in the README."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta as td
from pathlib import Path

import pytest

from apps.enrichment import enrich
from apps.enrichment.settings import PREFIX, Settings
from rowmill import Concurrency, RowmillError


def test_by_default_the_lane_is_what_the_requirements_say() -> None:
    """C3, C5, C7, C8, C9: batches of 10, two tries, ten minutes of lease, five until the second try, two per domain."""
    assert (enrich.batch, enrich.max_attempts, enrich.lease, enrich.backoff(1)) == (
        10,
        2,
        td(minutes=10),
        td(minutes=5),
    )
    assert list(enrich.gates) == [Concurrency(2, by="domain")]


def test_settings_are_read_from_the_environment() -> None:
    """C7: to be tuned without touching the code."""
    given = {
        "ENRICHMENT_BATCH": "20",
        "ENRICHMENT_ALLOW_PRIVATE": "true",
        "ENRICHMENT_FETCH_SECONDS": "2.5",
        "OTHER": "1",
    }
    assert Settings.read(given) == Settings(batch=20, allow_private=True, fetch_seconds=2.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [("BATCH", "many"), ("BATCH", "0"), ("BATCH", "2.5"), ("LEASE_SECONDS", "nan"), ("ALLOW_PRIVATE", "maybe")],
)
def test_a_setting_that_does_not_fit_is_named(name: str, value: str) -> None:
    """C7: a user's mistake gets a sentence with the name in it."""
    with pytest.raises(RowmillError, match=f"ENRICHMENT_{name}='{value}'"):
        Settings.read({f"ENRICHMENT_{name}": value})


def test_the_readme_lists_every_setting_with_its_default() -> None:
    """C7: none is hidden."""
    readme = Path(__file__).parents[1].joinpath("README.md").read_text()
    for field in fields(Settings):
        default = str(field.default).lower().removesuffix(".0")
        assert f"| `{PREFIX}{field.name.upper()}` | {f'`{default}`' if default else 'none'} |" in readme, field.name
