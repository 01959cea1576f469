"""Settings from the environment, and the words for those that cannot be used."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from apps.ocr.__main__ import command
from apps.ocr.settings import SettingError, Settings


def test_settings_are_read_from_the_environment() -> None:
    """B1, B4, B7: and have their defaults where nothing is set, or an empty value."""
    given = {"OCR_WORKER_COUNT": "4", "OCR_LEASE_SECONDS": "1.5", "GEMINI_API_KEY": "k", "OCR_DPI": " "}
    settings = Settings.from_environment(given)
    assert (settings.worker_count, settings.lease_seconds, settings.gemini_key) == (4, 1.5, "k")
    assert settings.dpi == Settings().dpi


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("OCR_WORKER_COUNT", "two", "OCR_WORKER_COUNT='two' is not a whole number"),
        ("OCR_WORKER_COUNT", "0", "OCR_WORKER_COUNT='0' is less than 1"),
        ("OCR_LEASE_SECONDS", "nan", "OCR_LEASE_SECONDS='nan' is less than 1"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_name(variable: str, value: str, words: str) -> None:
    """B1: with what to write instead."""
    with pytest.raises(SettingError) as raised:
        Settings.from_environment({variable: value})
    assert raised.value.message == words
    assert raised.value.hint is not None
    assert raised.value.hint.startswith(f"{variable}=1")


def test_one_worker_is_worker_1_too() -> None:
    """B1: ids are worker-1 to worker-N, whatever N is."""
    assert command(Settings(worker_count=1))[4:8] == ["--processes", "1", "--worker-id", "worker-1"]
    assert command(Settings(worker_count=3))[4:8] == ["--processes", "3", "--worker-id", "worker"]


def test_every_setting_is_explained_in_the_readme() -> None:
    """Issue 7: every setting, with its default."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    for each in fields(Settings):
        assert f"`{each.metadata['variable']}`" in readme
