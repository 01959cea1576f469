"""check --strict over the five applications, each on its own fresh tables: no errors, and no warnings."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import apps.analysis.tables
import apps.enrichment
import apps.ocr.lane
import apps.ocr.settings
import apps.prices.schema
import apps.registre.lanes
import apps.registre.tables
from apps.analysis.phases import build
from apps.analysis.settings import Settings
from apps.enrichment.mill import create_tables
from databases import Db
from rowmill import Mill
from rowmill.ops.check import check_mill


async def prices(url: str, patch: pytest.MonkeyPatch) -> Mill:
    async def no_functions(*given: object) -> None: ...

    mill = apps.prices.schema.mill
    patch.setattr(mill, "_given", url)
    patch.setattr(apps.prices.schema, "install_functions", no_functions)
    await apps.prices.schema.setup()
    return mill


async def analysis(url: str, patch: pytest.MonkeyPatch) -> Mill:
    mill = build(Settings(), url)
    ((_, database),) = mill.databases()
    await apps.analysis.tables.create(database)
    await database.close()
    return mill


async def enrichment(url: str, patch: pytest.MonkeyPatch) -> Mill:
    patch.setattr(apps.enrichment.mill, "_given", url)
    await create_tables(url)
    await apps.enrichment.mill.prepare()  # rowmill's own tables, which a worker makes at its start
    await apps.enrichment.mill.close()
    return apps.enrichment.mill


async def registre(url: str, patch: pytest.MonkeyPatch) -> Mill:
    mill = apps.registre.lanes.mill
    patch.setattr(mill, "_given", {"prod": url})
    await apps.registre.tables.migrate_all(mill)
    return mill


async def ocr(url: str, patch: pytest.MonkeyPatch) -> Mill:
    mill = Mill({"prod": url})
    await apps.registre.tables.migrate_all(mill)
    apps.ocr.lane.declare(mill, apps.ocr.settings.Settings())
    return mill


App = Callable[[str, pytest.MonkeyPatch], Coroutine[Any, Any, Mill]]
#: Two of them need PostgreSQL.
FRESH = [(app, dialect) for app in (analysis, registre, ocr) for dialect in ("sqlite", "postgresql")]
FRESH += [(app, "postgresql") for app in (prices, enrichment)]


@pytest.mark.parametrize(("app", "dialect"), FRESH, ids=[f"{app.__name__}-{dialect}" for app, dialect in FRESH])
async def test_an_application_passes_check_strict_on_its_fresh_tables(
    app: App, dialect: str, fresh: Callable[[str], Db], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 19.13: each warning on the applications' own tables is resolved, or acknowledged in the declaration."""
    mill = await app(fresh(dialect).url, monkeypatch)
    checked, _ = await check_mill(mill)
    assert {each.lane.name for each in checked if each.lane} == set(mill.lanes)
    assert [(each.lane and each.lane.name, finding.text) for each in checked for finding in each.findings] == []


@pytest.mark.parametrize("app", [registre, ocr], ids=["registre", "ocr"])
async def test_rows_of_the_other_program_on_the_same_table_are_no_warning(
    app: App, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A11, B2: registre and ocr share extraction_queue, and each knows the other's states."""
    mill = await app(db.url, monkeypatch)
    rows = [{"document_number": str(status.value), "status_id": status.value} for status in apps.registre.tables.Status]
    db.insert("extraction_queue", rows)
    checked, _ = await check_mill(mill)
    assert "left_alone" not in {finding.code for each in checked for finding in each.findings}
