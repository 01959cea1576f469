"""The pictures of docs/how-to/dashboard.md: an empty system, a busy one, and one with 10,000 errors.

They are written to docs/images only when asked for: ROWMILL_SCREENSHOTS=1 pytest tests/browser/test_screenshots.py
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser

import dashboard
from dashboard import Site, Visitor
from databases import Db
from rowmill import Mill

IMAGES = Path(__file__).parents[2] / "docs" / "images"
DESKTOP, PHONE = (1280, 820), (390, 820)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with dashboard.browser() as found:
        yield found


def picture(chromium: Browser, site: Site, path: str, name: str, size: tuple[int, int], scheme: str) -> None:
    """What a reader sees first of a page; it must show something."""
    viewport = {"width": size[0], "height": size[1]}
    context = chromium.new_context(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
    visitor = Visitor(context.new_page(), site).open(path)
    visitor.page.wait_for_selector("#pulse.live")
    assert not visitor.overflows()
    image = Image.open(io.BytesIO(visitor.page.screenshot()))
    context.close()
    assert image.size == size
    assert len(image.convert("L").getcolors(256) or ()) > 20, "nothing but background"
    if os.environ.get("ROWMILL_SCREENSHOTS"):
        IMAGES.mkdir(exist_ok=True)
        few = image.convert("RGB").quantize(96, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        few.save(IMAGES / f"{name}.png", optimize=True)


def history(db: Db, lane: str, per_minute: int) -> None:
    """An hour of work that nobody has to wait for."""
    db.execute(f"""insert into rowmill_minutes (lane, minute, started, done, retried, dead, run_us, t5, t6, t7, t8)
select '{lane}', floor(extract(epoch from now()) / 60)::bigint - i, w + 6, w, 4 + i % 3, (i % 9 = 0)::int * 3,
  w * 400000,
  w / 4, w / 2, w / 4, 4 + i % 5
from (select i, ({per_minute} * (1 + 0.35 * sin(i / 6.0)))::int as w from generate_series(1, 59) i) x
on conflict (lane, minute) do nothing""")


def test_an_empty_system(pg: Db, chromium: Browser) -> None:
    pg.execute(dashboard.DOCUMENTS["postgresql"])
    with Site(dashboard.declare(Mill(pg.url)), pg) as site:
        picture(chromium, site, "/", "overview-empty", DESKTOP, "light")
        picture(chromium, site, "/workers", "workers-empty", PHONE, "dark")


def test_a_busy_system_and_one_with_ten_thousand_errors(pg: Db, chromium: Browser) -> None:
    pg.execute(dashboard.DOCUMENTS["postgresql"])
    with Site(dashboard.declare(Mill(pg.url)), pg) as site:
        site.add("fails", 6, domain="slow.example")
        site.add("dies", 3)
        site.add("fine", 40)
        site.drain(["extract"])
        for lane, rate in (("extract", 220), ("ocr", 180)):
            history(pg, lane, rate)
        pg.execute("""insert into documents (title, domain, status, created_at) select 'Document ' || i,
  (array['a.example', 'b.example', 'c.example'])[1 + i % 3], case when i % 3 = 0 then 'extracted' else 'new' end,
  now() - interval '5 minutes' from generate_series(1, 2400) i;
insert into documents (title, status) select 'Document ' || i, 'read' from generate_series(1, 9000) i;
update documents set status = 'reading', worker = 'worker-1', claimed_at = now() - interval '3 s', heartbeat_at = now()
  where id in (select id from documents where status = 'extracted' limit 9);
insert into rowmill_workers (id, incarnation, host, pid, lanes, started_at, seen_at, state, completed, failed, lost,
  version, memory, current)
select 'worker-' || i, i::text, 'mill-' || i, 4000 + i, '["extract", "ocr"]', now(), now() + interval '1 hour', 'busy',
  81000 + i * 977, 310 + i, i % 2, '0.1.0', 91000000 + i * 3000000,
  '[{"slot": "ocr-1", "lane": "ocr", "environment": "default", "id": "' || 50 + i || '", "seconds": 4.2,
    "progress": [0.66, "page 2 of 3"]}]'
from generate_series(1, 3) i""")
        picture(chromium, site, "/", "overview-light", DESKTOP, "light")
        picture(chromium, site, "/", "overview-dark", DESKTOP, "dark")
        picture(chromium, site, "/", "overview-phone", PHONE, "light")
        picture(chromium, site, "/lane?lane=extract&state=waiting", "lane", DESKTOP, "light")
        picture(chromium, site, "/lane?lane=extract", "lane-phone", PHONE, "dark")
        failed = pg.value("select min(id) from documents where title = 'fails'")
        picture(chromium, site, f"/row?lane=extract&id={failed}", "row", DESKTOP, "light")
        picture(chromium, site, "/workers", "workers", DESKTOP, "dark")
        picture(chromium, site, "/health", "health", DESKTOP, "light")
        pg.execute("""insert into rowmill_failures
  (at, lane, row_id, attempt, worker, outcome, class, fingerprint, message)
select now() - (i % 80000) * interval '1 second' * random(), 'extract', i::text, 1, 'worker-1', 'retry',
  (array['transient', 'permanent', 'rate'])[1 + i % 3], 'family' || i % 12,
  (array['TimeoutError: no answer from host ', 'ValueError: no title on page ', 'HTTPStatusError: 429 for page '])
    [1 + i % 3] || i || ' of ' || (array['news', 'forum', 'shop', 'blog'])[1 + i % 4]
from generate_series(1, 10000) i""")
        picture(chromium, site, "/errors", "errors", DESKTOP, "light")
        picture(chromium, site, "/errors", "errors-phone", PHONE, "dark")
