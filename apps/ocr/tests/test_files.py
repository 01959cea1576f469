"""Files that cannot be read end at once, with a reason; large ones are read page by page."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta as td
from pathlib import Path

import pytest
from PIL import Image

from apps.ocr import lane
from apps.ocr.pages import Unreadable, opened
from apps.ocr.tests.office import Office, small_print
from apps.registre.standin.pdfs import document_pdf
from apps.registre.tests.refusing import refusing_s3
from databases import Db
from rowmill.testing import Kit

SCAN = document_pdf("1", "actes", 2, 1)[0]
UNREADABLE = {
    "empty": (b"", "the file is empty (0 bytes)"),
    "a web page": (b"<!DOCTYPE html><html>Erreur</html>", "the file is not a PDF: it begins with b'<!DOCTYPE html><'"),
    "an image": (b"\x89PNG\r\n\x1a\n0000", "the file is not a PDF"),
    "truncated": (SCAN[: len(SCAN) * 2 // 3], "the PDF is truncated"),
    "encrypted": (small_print(password="secret", owner="other"), "the PDF is encrypted with a password"),
    "damaged": (b"%PDF-1.4\n" + b"x" * 500 + b"\n%%EOF\n", "the PDF is damaged"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
async def test_a_file_that_cannot_be_read_is_dead_at_once_with_a_reason(
    kind: str, lite: Db, make_office: Callable[..., Office]
) -> None:
    """B3, B6: no attempt is wasted, ocr_error says what to do, and error_message is left alone."""
    data, words = UNREADABLE[kind]
    office = make_office(lite)
    (key,) = office.add(data)
    async with Kit(office.mill()) as kit:
        assert (await kit.step()).outcome == "dead"
    row = office.row(key)
    assert (row["status_id"], row["ocr_attempts"], row["error_message"]) == (4, 1, None)
    assert words in row["ocr_error"]
    assert "Try: " in row["ocr_error"]


async def test_a_row_without_a_file_is_dead_at_once(lite: Db, make_office: Callable[..., Office]) -> None:
    """B3: status 3 without a stored file."""
    office = make_office(lite)
    (key,) = office.add(file_path=None)
    async with Kit(office.mill()) as kit:
        await kit.step()
    assert "no file_path" in office.row(key)["ocr_error"]


def test_a_pdf_that_anybody_may_open_is_read_although_it_is_encrypted(tmp_path: Path) -> None:
    """B3: an owner's password keeps nobody from reading."""
    (tmp_path / "a.pdf").write_bytes(small_print(owner="other"))
    with opened(tmp_path / "a.pdf", 72, 1_000_000) as document:
        assert document.image(0).size == (100, 100)


def test_a_pdf_without_pages_is_refused(tmp_path: Path) -> None:
    """B3: nothing to read is an error, not an empty text."""
    nothing = small_print().replace(b"/Count 1", b"/Count 0").replace(b"/Kids [3 0 R]", b"/Kids []     ")
    (tmp_path / "a.pdf").write_bytes(nothing)
    with (
        pytest.raises(Unreadable, match=r"the PDF (is damaged|has no pages)"),
        opened(tmp_path / "a.pdf", 72, 1_000_000),
    ):
        pass


def test_a_page_has_no_more_dots_than_is_allowed(tmp_path: Path) -> None:
    """B3: the plan of a whole district does not fill the memory."""
    (tmp_path / "a.pdf").write_bytes(small_print(size=(14_400, 14_400)))
    with opened(tmp_path / "a.pdf", 300, 1_000_000) as document:
        image = document.image(0)
    assert image.width * image.height <= 1_010_000
    assert image.mode == "L"


async def test_one_page_of_a_long_document_is_in_memory_at_a_time(
    lite: Db, make_office: Callable[..., Office], tmp_path: Path
) -> None:
    """B3: pages are rendered one by one, and told one by one."""
    seen: list[Image.Image] = []
    most, told = 0, list[tuple[float, str]]()

    def is_open(page: Image.Image) -> bool:
        try:
            page.getpixel((0, 0))
        except ValueError:
            return False
        return True

    class Watching:
        name = "watching"

        async def read(self, page: Image.Image, job: object) -> str:
            nonlocal most
            seen.append(page)
            most = max(most, sum(map(is_open, seen)))
            return f"page of {page.width} dots"

    class Told:
        async def progress(self, fraction: float, note: str) -> None:
            told.append((round(fraction, 3), note))

    file = tmp_path / "long.pdf"
    file.write_bytes(small_print(pages=80))
    texts = await lane._read(Told(), file, Watching(), make_office(lite).settings)  # type: ignore[arg-type]
    assert (len(texts), most) == (80, 1)
    assert told[0] == (0.012, "page 1 of 80")
    assert told[-1] == (0.988, "page 80 of 80")


async def test_a_damaged_download_is_tried_again(lite: Db, make_office: Callable[..., Office]) -> None:
    """B5: the storage's file is not what registre stored: not read, but not given up at once either."""
    office = make_office(lite)
    (key,) = office.add(checksum="0" * 64)
    async with Kit(office.mill()) as kit:
        assert (await kit.step()).outcome == "retry"
    assert "is damaged" in office.row(key)["ocr_error"]


@pytest.mark.parametrize("path", ["prod", "../../../etc/passwd", "/etc/passwd", ".uploads/1.part", "prod/1\0.pdf"])
async def test_a_path_that_leads_to_no_object_is_this_documents_failure_alone(
    path: str, lite: Db, make_office: Callable[..., Office]
) -> None:
    """B5: retried as one that is missing; the breaker, which is for an outage of all, does not count it."""
    office = make_office(lite, breaker_failures=1)
    (key,) = office.add(b"%PDF-", file_path=path)
    office.add(b"", file_path="prod/other.pdf")
    async with Kit(office.mill()) as kit:
        assert [(await kit.step()).outcome for _ in range(2)] == ["retry", "retry"]
    assert "Try: " in office.row(key)["ocr_error"]
    assert office.left() == []


async def test_a_storage_that_refuses_stops_the_lane_before_all_documents_have_lost_their_attempts(
    lite: Db, make_office: Callable[..., Office], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B5: so many failures in a row, and nothing is taken for a while; the error says what to look at."""
    office = make_office(lite, retry_seconds=15.0, breaker_failures=2)
    keys = office.add(b"", n=4)
    with refusing_s3() as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        async with Kit(office.mill()) as kit:
            assert [(await kit.step()).outcome for _ in range(2)] == ["retry"] * 2
            assert await kit.step() is None
            kit.advance(td(minutes=6))
            assert len(await kit.claim(count=4)) == 1  # one document as a probe
    rows = [office.row(key) for key in keys]
    assert sum(row["ocr_attempts"] for row in rows) == 3
    assert "STORAGE_KEY" in rows[0]["ocr_error"]
