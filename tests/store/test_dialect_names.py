"""Names as the dialect writes them into SQL."""

from __future__ import annotations

from rowmill.store.dialect import POSTGRES


def test_a_percent_sign_in_a_name_is_not_doubled() -> None:
    """asyncpg sends the text as it is: only drivers with %s placeholders need the sign twice."""
    assert POSTGRES.own("100%", "rowmill_jobs") == '"100%".rowmill_jobs'
    assert POSTGRES.described_columns(None, "percent%s") == (POSTGRES.described_columns(None, "x")[0], ('"percent%s"',))  # type: ignore[index]
    assert POSTGRES.view_kind(None, "percent%s")[1] == ('"percent%s"',)
