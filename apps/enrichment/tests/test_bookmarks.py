"""Bookmark files as browsers write them, and as they are found."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from apps.enrichment.bookmarks import NotBookmarks, read

CHROME = """<!DOCTYPE NETSCAPE-Bookmark-file-1>
<!-- This is an automatically generated file. DO NOT EDIT! -->
<META HTTP-EQUIV="Content-Type" CONTENT="text/html; charset=UTF-8">
<TITLE>Bookmarks</TITLE>
<H1>Bookmarks</H1>
<DL><p>
    <DT><H3 ADD_DATE="1700000000" LAST_MODIFIED="0" PERSONAL_TOOLBAR_FOLDER="true">Bookmarks bar</H3>
    <DL><p>
        <DT><A HREF="https://a.example/?x=1&amp;y=2" ADD_DATE="1700000001" ICON="data:image/png,iVBOR=">A &amp; B</A>
        <DT><H3>Inner</H3>
        <DL><p>
            <DT><A HREF="https://b.example/">B</A>
        </DL><p>
        <DT><A HREF="https://c.example/">C</A>
    </DL><p>
    <DT><A HREF="https://d.example/">D</A>
</DL><p>
"""
FIREFOX = """<!DOCTYPE NETSCAPE-Bookmark-file-1>
<META HTTP-EQUIV="Content-Type" CONTENT="text/html; charset=UTF-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'self'; script-src 'none'; img-src data: *"></meta>
<TITLE>Bookmarks</TITLE>
<H1>Bookmarks Menu</H1>

<DL><p>
    <DT><A HREF="place:sort=8&maxResults=10" ADD_DATE="1700000000000000">Most Visited</A>
    <HR>    <DT><H3 ADD_DATE="1700000000" UNFILED_BOOKMARKS_FOLDER="true">Other Bookmarks</H3>
    <DD>What else there is
    <DL><p>
        <DT><A HREF="https://a.example/" ADD_DATE="1700000000" TAGS="one,two" ICON_URI="https://a.example/i.ico">A</A>
        <DD>A description of A
        <DT><A HREF="https://b.example/" SHORTCUTURL="b">B</A>
    </DL><p>
</DL>
"""
SAFARI = """<!DOCTYPE NETSCAPE-Bookmark-file-1>
	<HTML>
	<META HTTP-EQUIV="Content-Type" CONTENT="text/html; charset=UTF-8">
	<Title>Bookmarks</Title>
	<H1>Bookmarks</H1>
	<DT><H3 FOLDED>Favorites</H3>
	<DL><p>
		<DT><A HREF="https://a.example/">A</A>
	</DL><p>
	<DT><H3 FOLDED id="com.apple.ReadingList">Reading List</H3>
	<DL><p>
		<DT><A HREF="https://b.example/">B</A>
	</DL><p>
	<DT><A HREF="https://c.example/">C</A>
	</HTML>
"""


def found(text: str | bytes) -> list[tuple[str, str, tuple[str, ...]]]:
    content = text.encode() if isinstance(text, str) else text
    return [(mark.url, mark.title, mark.folder) for mark in read(content)]


def test_chrome_s_folders_titles_and_times_are_kept() -> None:
    """C2: an import reads a browser's exported bookmarks: Chrome."""
    assert found(CHROME) == [
        ("https://a.example/?x=1&y=2", "A & B", ("Bookmarks bar",)),
        ("https://b.example/", "B", ("Bookmarks bar", "Inner")),
        ("https://c.example/", "C", ("Bookmarks bar",)),
        ("https://d.example/", "D", ()),
    ]
    times = [mark.added_at for mark in read(CHROME.encode())]
    assert times == [datetime.fromtimestamp(1700000001, UTC), None, None, None]


def test_firefox_s_descriptions_and_separators_are_no_links() -> None:
    """C2: an import reads a browser's exported bookmarks: Firefox."""
    assert found(FIREFOX) == [
        ("place:sort=8&maxResults=10", "Most Visited", ()),
        ("https://a.example/", "A", ("Other Bookmarks",)),
        ("https://b.example/", "B", ("Other Bookmarks",)),
    ]
    assert next(read(FIREFOX.encode())).added_at == datetime.fromtimestamp(1700000000, UTC)


def test_safari_s_folders_without_a_list_around_them_are_read() -> None:
    """C2: an import reads a browser's exported bookmarks: Safari."""
    assert found(SAFARI) == [
        ("https://a.example/", "A", ("Favorites",)),
        ("https://b.example/", "B", ("Reading List",)),
        ("https://c.example/", "C", ()),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # a link, a heading and a list that nobody closed
        ('<DL><DT><A HREF="x:1">one<DT><A HREF="x:2">two', [("x:1", "one", ()), ("x:2", "two", ())]),
        ('<DL><DT><H3>F<DL><DT><A HREF="x:1">one</A>', [("x:1", "one", ("F",))]),
        # one end too many
        (
            '<DL><H3>F</H3><DL></DL></DL></DL><DL><A HREF="x:1">one</A><H3>G</H3><DL><A HREF="x:2">two</A>',
            [("x:1", "one", ()), ("x:2", "two", ("G",))],
        ),
        # a folder inside a link, and a link without an address
        (
            '<DL><A HREF="x:1">one<H3>F</H3></A><DL><A>none</A><A HREF=x:2>two</A></DL>',
            [("x:1", "one", ()), ("x:2", "two", ("F",))],
        ),
        # not even a doctype; a title in pieces; NUL
        ('<a href="x:1">o<b>n</b>\n e\x00</a>', [("x:1", "on e", ())]),
    ],
)  # fmt: skip
def test_broken_nesting_loses_no_link(text: str, expected: list[tuple[str, str, tuple[str, ...]]]) -> None:
    """C2: files are broken in every way; what can be read is read."""
    assert found(text) == expected


@pytest.mark.parametrize(
    "content",
    [
        "<DL><DT><A HREF='x:1'>Café Zürich</A>".encode(),
        "\ufeff<DL><DT><A HREF='x:1'>Café Zürich</A>".encode(),
        "<DL><DT><A HREF='x:1'>Café Zürich</A>".encode("utf-16"),
        "<META CONTENT='text/html; charset=ISO-8859-1'><DL><DT><A HREF='x:1'>Café Zürich</A>".encode("latin-1"),
        # says one thing and is another, or says what nobody knows
        "<META CONTENT='text/html; charset=UTF-8'><DL><DT><A HREF='x:1'>Café Zürich</A>".encode("cp1252"),
        "<META CONTENT='text/html; charset=klingon'><DL><DT><A HREF='x:1'>Café Zürich</A>".encode(),
        "<META CONTENT='text/html; charset=base64'><DL><DT><A HREF='x:1'>Café Zürich</A>".encode(),
    ],
)
def test_odd_encodings_are_read(content: bytes) -> None:
    """C2: by the byte order mark, by what a file says of itself, or by what it looks like."""
    assert found(content) == [("x:1", "Café Zürich", ())]


def test_other_encodings_by_what_the_file_says() -> None:
    """C2: Shift_JIS and the like."""
    text = "<META CONTENT='text/html; charset=Shift_JIS'><DL><DT><A HREF='x:1'>日本語のページ</A>"
    assert found(text.encode("shift_jis")) == [("x:1", "日本語のページ", ())]


def test_what_is_no_bookmarks_file_is_told_so() -> None:
    """C2: a user's mistake gets a sentence."""
    page = b"<html><body><p>What is what</p><dl><dt>Term</dt><dd>Meaning</dd></dl></body></html>"
    binary = b"\x89PNG\r\n\x1a\n\x00\x00<dl>\xff\xfe<a \x00\x01" + bytes(range(256))
    for content in (b"", b"%PDF-1.7 ...", b'{"a": 1}', b"\x00\x01\x02", b"<DL></DL>", page, binary):
        with pytest.raises(NotBookmarks, match="not a bookmarks file"):
            list(read(content))


def test_an_export_without_bookmarks_is_an_export() -> None:
    """C2: somebody has none."""
    assert found("<!DOCTYPE NETSCAPE-Bookmark-file-1>\n<H1>Bookmarks</H1>\n<DL><p>\n</DL><p>") == []


def test_deep_folders_do_not_break_it() -> None:
    """C2: whatever was nested, every link has a place."""
    deep = "".join(f"<H3>{n}</H3><DL>" for n in range(5_000))
    ((_, _, folder),) = found(f"<DL>{deep}<A HREF='x:1'>one</A>")
    assert 0 < len(folder) <= 100
