"""Files and pages of people who mean harm: nothing hangs, nothing grows without end, nothing breaks an import."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest

from apps import markup
from apps.enrichment import bookmarks, fetch
from apps.enrichment.bookmarks import NotBookmarks
from apps.enrichment.mill import create_tables
from apps.enrichment.page import Page
from apps.enrichment.settings import Settings
from apps.enrichment.tests.conftest import App, netscape
from apps.standins import sites
from apps.standins.internet import Answer, Internet
from databases import Db

MEGABYTE = 1_000_000
#: Each would take a parser that is not careful minutes or more.
WITHOUT_END = ["<!--", "<a ", "<![", "<!", '<a href="', "</a", "<![CDATA[", "&#", "<script>", "<h3>"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("piece", WITHOUT_END)
def test_a_file_without_end_is_read_or_refused_in_bounded_time(piece: str) -> None:
    """C2: one user's file does not keep the imports of the others waiting."""
    content = b'<DL><A HREF="https://a.example/">First</A>' + piece.encode() * (MEGABYTE // 2 // len(piece))
    try:
        found = [mark.url for mark in bookmarks.read(content)]
    except NotBookmarks as error:
        found = [error.message]
    assert found[0] in ("https://a.example/", "this is not a bookmarks file: a tag in it has no end")


def test_folders_inside_each_other_and_names_without_end_take_bounded_room() -> None:
    """C2: each bookmark has its folders' names with it, so these are bounded."""
    deep = "<DL>" + f"<H3>{'n' * 1000}</H3><DL>" * 1000 + '<A HREF="https://a.example/">x</A>'
    (mark,) = bookmarks.read(deep.encode())
    assert (len(mark.folder), {len(name) for name in mark.folder}) == (bookmarks.DEEPEST - 1, {bookmarks.NAME})
    tracemalloc.start()
    name = "n" * MEGABYTE
    (one, *_) = bookmarks.read(f"<DL><H3>{name}</H3><DL><A HREF='https://a.example/'>{name}</A>".encode() * 10)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (one.folder, one.title) == ((name[: bookmarks.NAME],), name[: bookmarks.TITLE])
    assert peak < 200 * MEGABYTE


def test_more_bookmarks_than_anybody_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: with what to do."""
    monkeypatch.setattr(bookmarks, "MOST", 100)
    with pytest.raises(NotBookmarks, match="more than 100 bookmarks"):
        list(bookmarks.read(netscape(*(f"https://a.example/{n}" for n in range(101))).encode()))


def test_a_tag_without_end_is_told() -> None:
    """C2: with what to do."""
    with pytest.raises(NotBookmarks, match=r"(?s)a tag in it has no end.*export it"):
        list(bookmarks.read(b"<DL><A " + b"x " * MEGABYTE))


@pytest.mark.timeout(240)
async def test_encodings_that_no_page_has_are_not_believed(app: App) -> None:
    """C2: they take hours, or make characters that no database stores; the import is read all the same."""
    odd = ("punycode", "idna", "unicode_escape", "raw_unicode_escape", "utf-7", "undefined")
    for charset in odd:
        link = f"https://a.example/{charset}\\ud800+2AA-"
        app.upload(f'<meta charset="{charset}"><DL><A HREF="{link}">a\\ud800\\x00-{"a9" * 200_000}</A>')
    assert [s.outcome for _ in odd if (s := await app.kit.step("read"))] == ["done"] * len(odd)
    assert app.db.value("select count(*) from placements where refused is null and length(title) = 1000") == len(odd)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "piece", ["<div>", "<main>", "<b><p>", "<ul><li>", "<table><tr><td>", "<svg><title>", "<a><p>"]
)
def test_pages_inside_pages_without_end_are_read_in_bounded_time(piece: str) -> None:
    """C7: a parser looks through all that is open for each tag; a page may be a million bytes."""
    page = Page(f"<title>Here</title>{piece * (MEGABYTE // 2 // len(piece))}</p>text", "https://a.example/")
    assert page.facts()["title"] == "Here"


def test_a_page_as_deep_as_pages_are_is_read_whole() -> None:
    """C13: what is not deep is not cut, however long it is, and whether its tags are closed or not."""
    html = "<p>one<br><ul><li>two<li>three</ul><table><tr><td>four</table><div><b>five</b></div>" * 5000
    assert markup.parse(html + "<i id=last>end</i>").css_first("#last") is not None
    assert markup.parse("<div>" * 400 + "<i id=last>").css_first("#last") is not None


async def test_what_no_database_takes_is_left_out_of_what_is_stored(app: App, net: Internet) -> None:
    """C13, C7: numbers that are none, half characters and null characters, wherever a page may put them."""
    data = '{"a": NaN, "b": 1e400, "c": "x\\ud800\\u0000", "\\ud800": [1, -Infinity], "d": 12345678901234567890}'
    head = f'<base href="http://["><script type="application/ld+json">{data}</script><link rel=icon href="http://[">'
    net.default = sites.page(head=head + '<meta property="og:title" content="a&#xD800;b&#0;c">')
    await app.imported("https://a.example/")
    await app.kit.step("enrich")
    row = app.job("https://a.example/")
    assert (row["status"], row["last_error"], row["icon_url"]) == ("succeeded", None, "https://a.example/icon.png")
    assert '"c": "x"' in row["json_ld"]
    assert "12345678901234567890" in row["json_ld"]


async def test_a_redirect_brings_no_user_and_no_password(net: Internet) -> None:
    """C12: what a site puts into its redirect is neither sent nor stored."""
    net.default = lambda request: (
        Answer("", 302, {"location": "https://ada:s3cret@a.example/there#x"})
        if request.path == "/"
        else Answer(f"<title>{request.headers.get('authorization', 'nobody')}</title>", headers=sites.HTML)
    )
    async with fetch.fetcher(Settings(internet=net.address)) as fetcher:
        facts = await fetcher.facts("https://a.example/")
    assert (facts["final_url"], facts["title"]) == ("https://a.example/there", "nobody")


@pytest.mark.timeout(240)
async def test_robots_rules_that_hang_or_never_end_cost_their_own_site_a_try(net: Internet) -> None:
    """C7, C10: the time for a page is the time for its robots.txt, too."""
    net.sites["hangs.example"] = sites.page(latency=50)
    async with fetch.fetcher(Settings(internet=net.address, fetch_seconds=0.5)) as fetcher:
        with pytest.raises(fetch.FetchFailed, match="timed out"):
            await fetcher.facts("https://hangs.example/")
    rules = "User-agent: *\nDisallow: /" + "*a" * 2000 + "*b\n" + "Allow: /x\n" * 40_000
    net.sites["rules.example"] = sites.robots(rules, sites.page())
    async with fetch.fetcher(Settings(internet=net.address)) as fetcher:
        assert (await fetcher.facts("https://rules.example/" + "a" * 2000))["http_status"] == 200


async def test_tables_may_be_made_by_many_at_once(pg: Db) -> None:
    """C1: two commands, or two machines, that begin on an empty database."""
    await asyncio.gather(*(create_tables(pg.url) for _ in range(8)))
    assert pg.value("select count(*) from import_jobs") == 0
