"""An import and its links, from the file to the last counter."""

from __future__ import annotations

import asyncio
from datetime import timedelta as td

from apps.enrichment.tests.conftest import App, netscape
from apps.standins import sites
from apps.standins.internet import Internet
from rowmill.ops.row_actions import Operator, Selection
from rowmill.store.inspect.lane_view import LaneView

FIVE_MINUTES = td(minutes=5)


async def test_an_import_runs_until_its_last_link_is_over(app: App, net: Internet) -> None:
    """C2: total, processed and failed follow the links; the import ends with the last of them."""
    net.default = sites.page()
    net.sites["shut.example"] = sites.captcha()
    id = await app.imported("https://a.example/1", "https://a.example/2#x", "https://shut.example/", "javascript:x()")
    assert app.standing(id) == ("running", 4, 1, 1)
    seen = []
    while await app.kit.step("enrich"):
        seen.append(app.standing(id))
    assert [processed for _, _, processed, _ in seen] == [2, 3, 4]
    assert seen[-1] == ("succeeded", 4, 4, 2)
    assert app.job("https://a.example/2")["title"] == "Page /2 at a.example"
    row = app.db.one("select * from import_jobs")
    assert row["created_at"] <= row["started_at"] <= row["finished_at"]
    assert app.db.value("select count(*) from import_files") == 0


async def test_folders_are_kept_as_placements(app: App) -> None:
    """C2: each bookmark has its place, with the address as it was bookmarked, also where two are one link."""
    content = """<DL><H3>A</H3><DL><H3>B</H3><DL><DT><A HREF="https://x.example/?utm_source=a">one</A></DL></DL>
        <DT><A HREF="HTTPS://X.example">two</A><DT><A HREF="about:blank">three</A></DL>"""
    app.upload(content)
    await app.kit.step("read")
    places = app.db.query("select * from placements order by position")
    assert [(p["folder"], p["title"], p["url"]) for p in places] == [
        (["A", "B"], "one", "https://x.example/?utm_source=a"),
        ([], "two", "HTTPS://X.example"),
        ([], "three", "about:blank"),
    ]
    assert places[0]["link_canonical_id"] == places[1]["link_canonical_id"] is not None
    assert places[2]["link_canonical_id"] is None
    assert "only http and https" in places[2]["refused"]


async def test_an_import_that_cannot_be_read_fails_with_a_sentence(app: App) -> None:
    """C2: failed, with why and when; nothing of it is left."""
    id = app.upload(b"%PDF-1.7")
    await app.kit.step("read")
    row = app.db.one("select * from import_jobs where id = ?", id)
    assert (row["status"], row["total_items"]) == ("failed", 0)
    assert row["last_error"].startswith("this is not a bookmarks file")
    assert row["finished_at"] is not None
    assert app.db.value("select count(*) from import_files") == 0


async def test_an_import_without_links_that_wait_is_over_at_once(app: App) -> None:
    """C2: nothing to wait for, nothing waited for."""
    empty, refused = app.upload(netscape()), app.upload(netscape("javascript:1", "about:blank"))
    await app.kit.drain("read")
    assert app.standing(empty) == ("succeeded", 0, 0, 0)
    assert app.standing(refused) == ("succeeded", 2, 2, 2)


async def test_one_enrichment_per_canonical_link(app: App, net: Internet) -> None:
    """C4: however many folders, imports and users hold it; none where one is running or succeeded."""
    net.default = sites.page()
    urls = ["https://a.example/x", "https://a.example/x/", "https://a.example/x?utm_source=b#c"]
    first, second = await app.imported(*urls), await app.imported(urls[1])
    assert app.db.value("select count(*) from enrichment_jobs") == 1
    (claim,) = await app.kit.claim("enrich")
    running = await app.imported(urls[2])
    assert app.job(urls[0])["status"] == "running"
    await app.kit.run(claim)
    assert [app.standing(id) for id in (first, second, running)] == [
        ("succeeded", 3, 3, 0), ("succeeded", 1, 1, 0), ("succeeded", 1, 1, 0),
    ]  # fmt: skip
    succeeded = await app.imported(*urls)
    assert app.standing(succeeded) == ("succeeded", 3, 3, 0)
    assert await app.kit.step("enrich") is None
    assert len(net.visits_of("a.example", "/x")) == 1


async def test_a_dead_link_that_was_not_refused_is_tried_again_for_a_new_import(app: App, net: Internet) -> None:
    """C4: what is dead by accident may live; what its site refuses is not asked again. The old import stays."""
    net.sites["tired.example"] = sites.failing(2, sites.page())
    net.sites["captcha.example"] = sites.captcha()
    urls = ("https://tired.example/", "https://captcha.example/")
    old = await app.imported(*urls)
    await app.kit.drain("enrich")
    app.kit.advance(FIVE_MINUTES)
    await app.kit.drain("enrich")
    assert app.standing(old) == ("succeeded", 2, 2, 2)
    new = await app.imported(*urls)
    assert app.standing(new) == ("running", 2, 1, 1)
    await app.kit.drain("enrich")
    assert app.standing(new) == ("succeeded", 2, 2, 1)
    assert app.standing(old) == ("succeeded", 2, 2, 2)
    assert len(net.visits_of("captcha.example", "/")) == 1


async def test_a_link_that_ends_while_an_import_joins_it_is_counted(app: App, net: Internet) -> None:
    """C2: the import's counters are right also where its links end while it is being read."""
    net.default = sites.page()
    urls = [f"https://a{n}.example/" for n in range(30)]
    imports = [await app.imported(*urls)] + [app.upload(netscape(*urls)) for _ in range(5)]
    await app.kit.drain("read", "enrich")
    assert {app.standing(id) for id in imports} == {("succeeded", 30, 30, 0)}
    assert app.db.value("select count(*) from enrichment_jobs where attempts = 1") == 30


async def test_a_canceled_import_is_no_longer_counted_nor_worked_for(app: App, net: Internet) -> None:
    """C2: canceled; its waiting links go, but for those that another import waits for."""
    net.default = sites.page()
    canceled = await app.imported("https://a.example/1", "https://a.example/2", "https://b.example/")
    other = await app.imported("https://b.example/")
    app.db.execute("update import_jobs set status = 'canceled', finished_at = now() where id = ?", canceled)
    await app.kit.drain("withdraw", "enrich")
    assert app.standing(canceled) == ("canceled", 3, 0, 0)
    assert app.standing(other) == ("succeeded", 1, 1, 0)
    assert [visit.host for visit in net.visits if visit.path == "/"] == ["b.example"]
    again = await app.imported("https://a.example/1")
    await app.kit.drain("enrich")
    assert app.standing(again) == ("succeeded", 1, 1, 0)


async def test_an_import_canceled_while_it_is_read_leaves_nothing(app: App) -> None:
    """C2: the worker that reads it has lost it, and with it all that it would have written."""
    id = app.upload(netscape("https://a.example/"))
    (claim,) = await app.kit.claim("read")
    app.db.execute("update import_jobs set status = 'canceled', finished_at = now() where id = ?", id)
    assert (await app.kit.run(claim)).outcome == "lost"
    assert app.standing(id) == ("canceled", 0, 0, 0)
    assert app.db.value("select count(*) from placements") == app.db.value("select count(*) from enrichment_jobs") == 0


async def test_the_first_failure_waits_five_minutes_and_the_second_is_the_last(app: App, net: Internet) -> None:
    """C5, C9: queued, running, failed, running, dead; a failed row is claimed directly when it is due, not before."""
    net.default = sites.refusing(500)
    id = await app.imported("https://a.example/")
    first = await app.kit.step("enrich")
    row = app.job("https://a.example/")
    assert first is not None
    assert first.outcome == "retry"
    assert (row["status"], row["attempts"], row["locked_at"], row["locked_by"]) == ("failed", 1, None, None)
    waits = app.db.value("select run_after - now() from enrichment_jobs")
    assert FIVE_MINUTES - td(seconds=10) < waits <= FIVE_MINUTES
    app.kit.advance(FIVE_MINUTES - td(seconds=15))
    assert await app.kit.step("enrich") is None
    app.kit.advance(td(seconds=15))
    (claim,) = await app.kit.claim("enrich")
    assert app.job("https://a.example/")["status"] == "running"
    assert (await app.kit.run(claim)).outcome == "dead"
    row = app.job("https://a.example/")
    assert (row["status"], row["attempts"], row["last_error"]) == ("dead", 2, "FetchFailed: HTTP 500: a.example")
    assert app.standing(id) == ("succeeded", 1, 1, 1)


async def test_a_claim_writes_who_when_and_how_often(app: App) -> None:
    """C3, C6: running, locked_at, locked_by, attempts + 1, updated_at; ten rows at once; nothing that is not due."""
    await app.imported(*[f"https://a{n}.example/" for n in range(15)])
    app.db.execute("update enrichment_jobs set run_after = now() + interval '1 hour' where domain = 'a1.example'")
    app.db.execute("update enrichment_jobs set locked_at = now() - interval '9 minutes' where domain = 'a2.example'")
    app.db.execute("update enrichment_jobs set locked_at = now() - interval '11 minutes' where domain = 'a3.example'")
    assert len(await app.kit.claim("enrich", 10)) == 10
    rows = app.db.query("select * from enrichment_jobs where status = 'running'")
    assert len(rows) == 10
    assert {(row["attempts"], row["locked_by"], row["max_attempts"]) for row in rows} == {(1, "test-worker", 2)}
    assert all(abs(row["locked_at"] - row["updated_at"]) < td(seconds=1) for row in rows)
    assert all(row["updated_at"] > row["created_at"] for row in rows)
    await app.kit.claim("enrich", 10)
    left = app.db.query("select domain from enrichment_jobs where status = 'queued' order by domain")
    assert [row["domain"] for row in left] == ["a1.example", "a2.example"]


async def test_a_row_past_its_lease_is_taken_back(app: App, net: Internet) -> None:
    """C5, C6, C9: never stuck in running: after ten minutes it is claimed again. The claim costs an attempt, and
    attempts against max_attempts are what makes a failure the last one.
    """
    net.default = sites.refusing(500)
    await app.imported("https://a.example/", "https://b.example/")
    app.db.execute("update enrichment_jobs set max_attempts = 3 where domain = 'b.example'")
    await app.kit.claim("enrich", 2)
    app.kit.advance(td(minutes=9))
    assert await app.kit.sweep("enrich") == []
    app.kit.advance(td(minutes=2))
    assert [swept.worker for swept in await app.kit.sweep("enrich")] == ["test-worker"] * 2
    await app.kit.drain("enrich")
    assert [app.job(f"https://{host}.example/")["attempts"] for host in "ab"] == [2, 2]
    assert [app.job(f"https://{host}.example/")["status"] for host in "ab"] == ["dead", "failed"]


async def test_a_row_that_kills_every_worker_ends_and_is_counted_with_its_end(app: App, net: Internet) -> None:
    """C2, C5: taken back too often it is dead, and its imports know in the same transaction."""
    net.default = sites.page()
    id = await app.imported("https://a.example/")
    swept = []
    for _ in range(6):
        assert app.standing(id) == ("running", 1, 0, 0)
        await app.kit.claim("enrich")
        app.kit.advance(td(minutes=11))
        swept += await app.kit.sweep("enrich")
    assert [row.poison for row in swept] == [False] * 5 + [True]
    assert app.job("https://a.example/")["status"] == "dead"
    assert app.standing(id) == ("succeeded", 1, 1, 1)


async def test_links_that_an_operator_cancels_are_counted(app: App) -> None:
    """C2: counters are right by whatever hands a link ends."""
    id = await app.imported("https://a.example/1", "https://a.example/2")
    store = await app.kit.store("enrich")
    view = LaneView(store, has_workers_table=True)
    async for _ in Operator(view).cancel(Selection(("ready",)), "not any more"):
        pass
    assert app.standing(id) == ("succeeded", 2, 2, 2)
    assert app.job("https://a.example/1")["last_error"] == "not any more"


async def test_links_of_a_batch_do_not_wait_for_each_other_nor_fail_together(app: App, net: Internet) -> None:
    """C7: the rows of a batch are worked on at once; one that fails leaves the others alone."""
    net.default = sites.page(together=asyncio.Barrier(9))  # nobody gets a page before all nine have asked
    net.sites["bad.example"] = sites.dropping()
    urls = [f"https://a{n}.example/" for n in range(9)]
    await app.imported(*urls, "https://bad.example/")
    await app.kit.drain("enrich")
    counts = app.db.query("select status, count(*) as n from enrichment_jobs group by 1 order by 1")
    assert [(row["status"], row["n"]) for row in counts] == [("failed", 1), ("succeeded", 9)]
    spans = [(visit.start, visit.end) for visit in net.visits if visit.path == "/" and visit.host != "bad.example"]
    assert max(start for start, _ in spans) < min(end for _, end in spans)


async def test_a_redirect_to_another_domain_waits_for_that_domain_s_turn(app: App, net: Internet) -> None:
    """C8: two at once of a domain, also of those that others lead to; and no attempt is lost on the way."""
    net.default = sites.page(latency=0.1)
    net.sites["short.example"] = lambda request: sites.redirecting(f"https://long.example{request.path}")(request)
    urls = [f"https://short.example/{n}" for n in range(4)] + [f"https://long.example/x{n}" for n in range(4)]
    id = await app.imported(*urls)
    await app.kit.drain("enrich")
    assert app.standing(id) == ("succeeded", 8, 8, 0)
    assert net.most_at_once()["long.example"] == 2
    row = app.job("https://short.example/1")
    assert (row["domain"], row["final_url"], row["attempts"]) == ("long.example", "https://long.example/1", 1)


async def test_a_domain_that_is_full_keeps_no_other_waiting(app: App) -> None:
    """C8: a row that waits for its domain is not claimed: it holds no lease, and no slot another could use."""
    await app.imported(*[f"https://full.example/{n}" for n in range(20)], "https://free.example/")
    claims = await app.kit.claim("enrich", 10)
    store = await app.kit.store("enrich")
    domains = sorted(store.value(claim.row, "domain") for claim in claims)
    assert domains == ["free.example", "full.example", "full.example"]
    assert await app.kit.claim("enrich", 10) == []
    assert app.db.value("select count(*) from enrichment_jobs where locked_at is not null") == 3


async def test_no_body_has_a_place_to_be_stored(app: App, net: Internet) -> None:
    """C13: neither a screenshot nor a page's text is anywhere in the database."""
    secret = "words of the body that nobody asked for"
    net.default = sites.page(body=f"<p>{secret}</p>" * 100)
    await app.imported("https://a.example/")
    await app.kit.drain("enrich")
    tables = app.db.query("select tablename from pg_tables where schemaname = 'public'")
    for table in (row["tablename"] for row in tables):
        assert app.db.value(f'select count(*) from "{table}" t where t::text like ?', f"%{secret}%") == 0
    types = app.db.query("select data_type from information_schema.columns where table_name = 'enrichment_jobs'")
    assert "bytea" not in {row["data_type"] for row in types}


async def test_two_imports_of_the_same_links_in_opposite_order_do_not_block_each_other(app: App) -> None:
    """C2, C4: links are joined in one order, whatever the order in the file."""
    urls = [f"https://a{n}.example/" for n in range(300)]
    ids = [app.upload(netscape(*urls)), app.upload(netscape(*reversed(urls))), app.upload(netscape(*urls))]
    claims = await app.kit.claim("read", 3)
    stepped = await asyncio.gather(*(app.kit.run(claim) for claim in claims))
    assert [step.outcome for step in stepped] == ["done"] * 3
    assert {app.standing(id) for id in ids} == {("running", 300, 0, 0)}
    assert app.db.value("select count(*) from enrichment_jobs") == 300
