"""The Python snippets of docs/how-to/monitor.md, run in their order as one program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sentry_sdk
from prometheus_client import REGISTRY
from starlette.responses import Response

from databases import Db
from farm import JOBS
from rowmill import Mill

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "monitor.md").read_text()


async def test_the_snippets_of_the_page_work(lite: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    """C12, E8: Sentry, Prometheus and OpenTelemetry, each by the lines that the page gives."""
    lite.execute(JOBS["sqlite"])
    mill = Mill(lite.url)
    mill.lane(
        "jobs", name="fetch", ready={"status": "queued"}, running={"status": "running"}, done={"status": "done"},
        dead={"status": "dead"},
    )(lambda job: None)  # fmt: skip
    started: list[dict[str, object]] = []
    monkeypatch.setattr(sentry_sdk, "init", lambda **options: started.append(options))
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    names: dict[str, object] = {"mill": mill, "Response": Response}
    for block in blocks:
        exec(block, names)
    assert started[0]["release"] == "shop@1.4"
    lite.execute("insert into jobs (note) values ('a')")
    await mill.worker(drain=True).run()
    answer = await names["metrics"](None)  # type: ignore[operator]
    await names["standing"].close()  # type: ignore[attr-defined]
    assert b'rowmill_rows{environment="default",lane="fetch",state="ready"} 0.0' in answer.body
    assert REGISTRY.get_sample_value("rowmill_claims_total", {"lane": "fetch", "environment": "default"}) == 1
