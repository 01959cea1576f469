"""The dashboard in a real browser: every page, every action, hostile values, phone and desktop, light and dark."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, expect

import dashboard
from dashboard import HOSTILE, PAGES, Site, Visitor
from databases import Db
from rowmill import Mill


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with dashboard.browser() as found:
        yield found


@pytest.fixture
def site(db: Db) -> Iterator[Site]:
    db.execute(dashboard.DOCUMENTS[db.dialect])
    with Site(dashboard.declare(Mill(db.url)), db) as site:
        yield site


@pytest.fixture
def pg_site(pg: Db) -> Iterator[Site]:
    pg.execute(dashboard.DOCUMENTS["postgresql"])
    with Site(dashboard.declare(Mill(pg.url)), pg) as site:
        yield site


@pytest.fixture
def lite_site(lite: Db) -> Iterator[Site]:
    lite.execute(dashboard.DOCUMENTS["sqlite"])
    with Site(dashboard.declare(Mill(lite.url)), lite) as site:
        yield site


Visit = Callable[..., Visitor]


@pytest.fixture
def visit(chromium: Browser) -> Iterator[Visit]:
    """Makes a visitor of a site; at the end nothing may have gone wrong on any of his pages."""
    contexts, visitors = [], []

    def make(site: Site, width: int = 1280, scheme: str = "light") -> Visitor:
        context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
        contexts.append(context)
        visitors.append(Visitor(context.new_page(), site))
        return visitors[-1]

    yield make
    for context in contexts:
        context.close()
    assert [wrong for visitor in visitors for wrong in visitor.wrong] == []


def busy(site: Site) -> None:
    """Rows in every state, failures on record, a worker that was there."""
    site.add("fine", 6)
    site.add("fails once", 3)
    site.add("dies", 2)
    site.drain()
    site.add("fine", 4)


def hold(site: Site, row: object) -> None:
    """Let a row be in somebody's hands."""
    claimed = "status = 'extracting', worker = 'w', claimed_at = created_at"
    site.db.execute(f"update documents set {claimed} where id = ?", row)


@pytest.mark.timeout(300)  # axe looks at every element of ten pages
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (375, "dark")])
def test_every_page_is_accessible_and_fits_at_any_width(pg_site: Site, visit: Visit, width: int, scheme: str) -> None:
    busy(pg_site)
    visitor = visit(pg_site, width, scheme)
    row = pg_site.db.value("select min(id) from documents where status = 'extract_failed'")
    visitor.open("/errors")
    family = visitor.page.locator(".family h3 a").first.get_attribute("href")
    assert family
    for path in (*PAGES, f"/row?lane=extract&id={row}", family):
        visitor.open(path)
        assert visitor.serious() == [], path
        assert not visitor.overflows(), path
    assert visitor.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")


def test_the_overview_has_each_table_as_its_state_diagram_with_phases_in_a_row(site: Site, visit: Visit) -> None:
    busy(site)
    visitor = visit(site).open("/")
    counts = {
        (box.get_attribute("class") or "").split()[1]: box.locator(".count").text_content()
        for box in visitor.page.locator(".pipeline.several .lane").first.locator("a.state").all()
    }
    assert counts == {"ready": "4", "running": "0", "done": "0", "waiting": "3", "dead": "2"}
    assert visitor.page.locator(".pipeline.several h3").all_inner_texts() == ["extract", "ocr"]
    flows = visitor.page.locator(".pipeline.several .lane").first.locator(".flow").all_text_contents()
    assert len(flows) == 4
    assert all(flow.endswith(("/min", "/h")) for flow in flows)
    assert "Oldest ready" in visitor.text()
    assert visitor.page.locator(".chart .bar.done").count() >= 1


def test_counts_change_on_the_page_without_a_reload(lite_site: Site, visit: Visit) -> None:
    visitor = visit(lite_site).open("/")
    ready = visitor.page.locator(".lane a.state.ready .count").first
    assert ready.text_content() == "0"
    visitor.page.wait_for_selector("#pulse.live")
    lite_site.add("fine", 3)
    expect(ready).to_have_text("3", timeout=30_000)
    assert visitor.page.evaluate("performance.getEntriesByType('navigation').length") == 1


def test_rows_are_filtered_by_any_column_and_paged_by_key(site: Site, visit: Visit) -> None:
    site.add("needle", domain="b.example")
    site.add("hay", 60)
    visitor = visit(site).open("/lane?lane=extract")
    ids = visitor.page.locator("td.id").all_inner_texts()
    assert ids == [str(n) for n in range(61, 11, -1)]
    with visitor.page.expect_navigation():
        visitor.page.get_by_role("link", name="Next page").click()
    assert visitor.page.locator("td.id").all_inner_texts() == [str(n) for n in range(11, 0, -1)]
    visitor.page.select_option("select[name=col]", "domain")
    visitor.page.fill("input[name=val]", "b.example")
    visitor.click("Show")
    assert visitor.page.locator("td.id").all_inner_texts() == ["1"]
    visitor.open("/lane?lane=extract&col=id&op=gt&val=59&order=oldest")
    assert visitor.page.locator("td.id").all_inner_texts() == ["60", "61"]
    visitor.open("/lane?lane=extract&q=NEEDLE")
    assert visitor.page.locator("td.id").all_inner_texts() == ["1"]
    visitor.open("/lane?lane=extract&state=done")
    assert "No rows" in visitor.text("#live_rows")


def test_a_filter_that_the_database_cannot_read_is_told_and_the_page_stays(pg_site: Site, visit: Visit) -> None:
    visitor = visit(pg_site).open("/lane?lane=extract&col=id&op=eq&val=seven")
    assert "seven" in visitor.text("p.notice.bad")
    visitor.open("/lane?lane=extract&col=nothing&op=eq&val=1")
    assert "has no column 'nothing'" in visitor.text("p.notice.bad")
    visitor.open("/lane?lane=extract&after=x'--")
    assert "is not an id" in visitor.text("p.notice.bad")


def test_a_row_shows_all_of_itself_and_is_retried_canceled_released_and_put_off(site: Site, visit: Visit) -> None:
    (dead,) = site.add("dies")
    (waiting,) = site.add("fails")
    site.drain()
    visitor = visit(site).open(f"/row?lane=extract&id={dead}")
    assert "is not there" in visitor.text(".timeline")
    assert f"page {dead}: not there" in visitor.text(".runlog")
    visitor.page.locator(".timeline summary").first.click()
    assert "raise Dead" in visitor.text(".timeline pre")
    visitor.click("Retry now")
    assert (visitor.notice(), site.status(dead)) == (f"{dead} made ready.", "new")
    visitor.page.fill("input[name=at]", "2099-01-31T08:00")
    visitor.click("Schedule")
    assert "2099-01-31" in str(site.db.value("select run_after from documents where id = ?", dead))
    assert "scheduled: due in " in visitor.text(".why")
    visitor.page.fill("input[name=reason]", "no longer wanted")
    visitor.click("Cancel")
    assert site.status(dead) == "extract_failed"
    assert site.db.value("select error from documents where id = ?", dead) == "no longer wanted"
    site.db.execute(
        "update documents set status = 'extracting', worker = 'w', claimed_at = created_at where id = ?", waiting
    )
    visitor.open(f"/row?lane=extract&id={waiting}").click("Release from its worker")
    assert site.status(waiting) == "new"
    visitor.click("Cancel")
    assert site.db.value("select error from documents where id = ?", waiting) == "canceled by an operator"
    done = site.db.query("select action, outcome from rowmill_audit order by id")
    assert [entry["action"] for entry in done] == ["retry", "schedule", "cancel", "release", "cancel"]
    assert {entry["outcome"] for entry in done} == {"done"}


def test_an_action_that_does_not_fit_the_row_any_more_says_why(lite_site: Site, visit: Visit) -> None:
    (row,) = lite_site.add("fine")
    visitor = visit(lite_site).open(f"/row?lane=extract&id={row}")
    lite_site.db.execute(
        "update documents set status = 'extracting', worker = 'w', claimed_at = created_at where id = ?", row
    )
    visitor.click("Retry now")
    assert visitor.notice() == f"{row} was not made ready: it is running."


def test_all_rows_of_a_state_are_changed_only_after_a_second_word(pg_site: Site, visit: Visit) -> None:
    rows = pg_site.add("dies", 3)
    pg_site.drain()
    visitor = visit(pg_site).open("/lane?lane=extract")
    visitor.page.locator("summary", has_text="retry").click()
    visitor.click("Retry all dead")
    assert "3 rows of lane extract" in visitor.text()
    assert {pg_site.status(row) for row in rows} == {"extract_failed"}
    visitor.click("Retry them")
    assert visitor.notice() == "3 rows made ready."
    assert {pg_site.status(row) for row in rows} == {"new"}


def test_all_ready_rows_are_canceled_and_all_stuck_ones_released(pg_site: Site, visit: Visit) -> None:
    waiting, stuck = pg_site.add("fine", 2), pg_site.add("fine", 2)
    pg_site.db.execute(
        "update documents set status = 'extracting', worker = 'gone', claimed_at = now() - interval '1 day'"
        " where id = any(?)",
        stuck,
    )
    visitor = visit(pg_site).open("/lane?lane=extract")
    visitor.page.locator("summary", has_text="retry").click()
    visitor.click("Release all stuck")
    visitor.click("Release them")
    assert {pg_site.status(row) for row in stuck} == {"new"}
    visitor.open("/lane?lane=extract").page.locator("summary", has_text="retry").click()
    visitor.click("Cancel all ready")
    visitor.click("Cancel them")
    assert {pg_site.status(row) for row in (*waiting, *stuck)} == {"extract_failed"}


def test_lanes_and_environments_are_paused_and_resumed(lite_site: Site, visit: Visit) -> None:
    lite_site.add("fine", 2)
    visitor = visit(lite_site).open("/lane?lane=extract")
    visitor.page.locator("summary", has_text="Pause").click()
    visitor.page.fill("input[name=reason]", "maintenance")
    visitor.click("Pause the lane")
    assert "Lane extract is paused: maintenance" in visitor.text("#live_lane")
    visitor.click("Resume")
    assert visitor.notice() == "Lane extract is resumed."
    lite_site.drain()
    visitor.open("/")
    visitor.page.locator("summary", has_text="Pause environment default").click()
    visitor.click("Pause every lane")
    assert "Environment default is paused" in visitor.text()
    visitor.click("Resume")
    assert "is paused" not in visitor.text("#live_overview")


def test_a_gate_is_paused_by_key_given_another_limit_and_reset(pg_site: Site, visit: Visit) -> None:
    pg_site.add("fails", 2)
    pg_site.drain()
    visitor = visit(pg_site).open("/lane?lane=extract")
    row = "#live_gates tbody tr"
    assert visitor.page.locator(f"{row} td").first.inner_text() == "a.example"
    visitor.click("Pause", row)
    assert "paused" in visitor.text(row)
    visitor.click("Resume", row)
    visitor.page.fill(f"{row} input[name=most]", "7")
    visitor.click("Set limit", row)
    assert visitor.notice() == "a.example: at most 7 running."
    assert pg_site.db.value("select most from rowmill_gates where key = 'a.example' and most is not null") == 7
    visitor.click("Reset", row)
    assert pg_site.db.query("select 1 from rowmill_gates where most is not null or streak > 0") == []


def test_exactly_one_family_of_failures_is_retried_or_buried(site: Site, visit: Visit) -> None:
    dead, other = site.add("dies", 3), site.add("dies again", 2)
    failed = site.add("fails", 2)
    site.drain()
    visitor = visit(site).open("/errors")
    shapes = visitor.page.locator(".family h3").all_inner_texts()
    assert len(shapes) == 3
    with visitor.page.expect_navigation():
        visitor.page.get_by_role("link", name="again").click()
    visitor.click("Retry this family").click("Retry them")
    assert visitor.notice() == "2 rows of the family made ready."
    assert {site.status(row) for row in other} == {"new"}
    assert {site.status(row) for row in dead} == {"extract_failed"}
    visitor.open("/errors")
    with visitor.page.expect_navigation():
        visitor.page.get_by_role("link", name="no answer from").click()
    assert "ConnectionError" in visitor.text("pre")
    visitor.click("Cancel this family").click("Cancel them")
    assert {site.status(row) for row in failed} == {"extract_failed"}
    assert {site.status(row) for row in other} == {"new"}


def test_a_script_in_any_value_is_shown_and_not_run(pg_site: Site, visit: Visit) -> None:
    (row,) = pg_site.add(f"dies {HOSTILE}", domain=HOSTILE, meta={HOSTILE: [HOSTILE]})
    pg_site.add(HOSTILE, domain=HOSTILE)
    pg_site.drain(["extract"])
    visitor = visit(pg_site)
    family = visitor.open("/errors").page.locator(".family h3 a").first.get_attribute("href")
    quoted = visitor.page.evaluate("encodeURIComponent", HOSTILE)
    searched = (f"/lane?lane=extract&q={quoted}", f"/lane?lane=extract&col=domain&op=eq&val={quoted}")
    for path in (*PAGES, f"/row?lane=extract&id={row}", family, *searched, f"/errors?hours={quoted}"):
        visitor.open(str(path))
        visitor.page.wait_for_selector("#pulse.live")
        assert visitor.page.evaluate("window.hit") is None, path
        assert "49" not in visitor.page.inner_text("main h1"), path
    visitor.open(f"/row?lane=extract&id={row}")
    assert HOSTILE in visitor.text("#live_columns")


def test_workers_are_shown_with_their_counts_memory_and_version(lite_site: Site, visit: Visit) -> None:
    busy(lite_site)
    visitor = visit(lite_site).open("/workers")
    assert "No workers" in visitor.text()
    text = visitor.open("/workers?all=1").text(".worker")
    assert "stopped" in text
    assert "Lost claims" in text
    assert "MB" in text


def test_health_names_what_is_missing_and_what_to_do(site: Site, visit: Visit) -> None:
    site.drain()
    text = visit(site).open("/health").text()
    assert "create index" in text
    assert "rowmill migrate APP --apply" in text
    assert "Poll load" in text


def test_tasks_are_shown_with_their_clock_and_their_jobs(lite_site: Site, visit: Visit) -> None:
    async def enqueue() -> None:
        await lite_site.mill.tasks["report"].enqueue(to=HOSTILE)
        await lite_site.mill.close()

    dashboard.run(enqueue())
    visitor = visit(lite_site).open("/tasks")
    assert "0 3 * * *" in visitor.text()
    with visitor.page.expect_navigation():
        visitor.page.locator("tr", has_text="report").get_by_role("link").click()
    with visitor.page.expect_navigation():
        visitor.page.locator("td.id a").first.click()
    assert "window.hit=1" in visitor.text("#live_columns")


def test_the_pages_are_used_with_the_keyboard_alone(pg_site: Site, visit: Visit) -> None:
    pg_site.add("fine", 3)
    visitor = visit(pg_site).open("/lane?lane=extract")
    keys = visitor.page.keyboard
    keys.press("Tab")
    assert visitor.page.evaluate("document.activeElement.textContent") == "Skip to content"
    keys.press("/")
    assert visitor.page.evaluate("document.activeElement.id") == "search"
    visitor.page.evaluate("document.activeElement.blur()")
    keys.press("j")
    keys.press("j")
    assert visitor.page.evaluate("document.activeElement.textContent") == "2"
    with visitor.page.expect_navigation():
        keys.press("Enter")
    assert visitor.page.url.endswith("id=2")
    with visitor.page.expect_navigation():
        keys.press("g")
        keys.press("w")
    assert visitor.page.url.endswith("/workers")


def test_an_environment_that_is_away_is_told_and_the_others_are_shown(fresh: Callable[[str], Db], visit: Visit) -> None:
    """A2: environments side by side, in their order."""
    here, db = fresh("sqlite"), fresh("sqlite")
    for one in (here, db):
        one.execute(dashboard.DOCUMENTS["sqlite"])
    mill = dashboard.declare(Mill({"prod": here.url, "staging": db.url, "dev": "postgresql://127.0.0.1:1/none"}))
    with Site(mill, here) as site:
        site.add("fine", 2)
        visitor = visit(site).open("/")
        assert visitor.page.locator("thead th[colspan]").all_inner_texts() == ["prod", "staging", "dev"]
        assert visitor.page.locator(".matrix tbody tr").first.locator("td").all_inner_texts()[:3] == ["2", "0", "0"]
        assert "unreachable" in visitor.text()
        visitor.page.close()
