"""What is read from pages, what becomes of it in a prompt, and what the settings refuse."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta as td
from pathlib import Path

import pytest

from apps.analysis import content, prompts
from apps.analysis.settings import Settings
from apps.analysis.tests import world
from apps.analysis.website import open_web
from apps.standins import sites
from apps.standins.internet import Internet
from apps.standins.model import Model
from rowmill import DeclarationError

PAGE = """<!doctype html><html lang="de-AT"><head><title>Stühle &amp; Tische</title>
<meta name="Description" content="Alles  aus Holz"><meta name="generator" content="Hugo 0.120">
<script src="https://cdn.shopify.com/x.js"></script><script>var text = "not content";</script>
<script type="application/ld+json">{"@graph": [{"contactPoint": {"telephone": "+43 1 23", "email": "ld@holz.example"}}]}
</script></head><body><header>Kopf</header><nav>Home Impressum</nav>
<main><h1>Holz</h1><p>Wir bauen St\x00ühle.</p><script>more()</script><p hidden>versteckt</p></main>
<aside>Werbung</aside><footer><a href="mailto:Info@Holz.example?subject=x">Mail</a> oder büro@holz.example
<a href="tel:+43%201%2024">Tel</a><a href="https://www.linkedin.com/company/holz">in</a> logo@2x.png</footer></body>"""


def test_the_main_content_technologies_and_contacts_of_a_page_are_found() -> None:
    """E1: what website-analysis stores: text without menus and scripts, what the site is made with, contacts."""
    found = content.read(PAGE, {"server": "nginx"})
    assert (found["title"], found["description"], found["language"]) == ("Stühle & Tische", "Alles aus Holz", "de-at")
    assert found["text"] == "Holz Wir bauen Stühle."
    assert found["technologies"] == ["Shopify", "Hugo 0.120", "Server: nginx"]
    assert found["contacts"] == {
        "emails": ["info@holz.example", "büro@holz.example", "ld@holz.example"],
        "phones": ["+43 1 24", "+43 1 23"],
        "social": ["https://www.linkedin.com/company/holz"],
    }


@pytest.mark.parametrize("source", ["", "<", "<title>", "<script type='application/ld+json'>[[{</script>", "\x00" * 9])
def test_a_page_that_is_hardly_one_is_read_all_the_same(source: str) -> None:
    """E1: nothing that a site sends breaks the phase."""
    assert content.read(source, {})["words"] in (0, 1)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("piece", ["<div>", "<main>", "<b><p>", "a.a-", "jquery.1", "<a href=mailto:a@b.example>x"])
def test_a_page_without_end_is_read_in_bounded_time(piece: str) -> None:
    """E1: tags inside each other, words without end: one site does not hold up the others."""
    assert content.read(f"<title>Here</title>{piece * (400_000 // len(piece))}", {})["title"] == "Here"


async def test_a_fetch_is_bounded_in_size_and_time_and_reads_odd_charsets(net: Internet, model: Model) -> None:
    """E1: a body without end is cut, a slow site fails in time, a charset that is not one is not fatal."""
    settings = world.settings_of(net, model, fetch_seconds=1.0, fetch_bytes=100_000)
    net.sites |= {
        "endless.example": sites.endless(), "slow.example": sites.page(latency=5),
        "latin.example": sites.saying("<p>caf\xe9".encode("latin-1"), content_type="text/html; charset=latin-1"),
        "odd.example": sites.saying("<p>café".encode(), content_type="text/html; charset=klingon"),
        "moved.example": sites.redirecting("https://here.example/"),
    }  # fmt: skip
    async with open_web(settings) as web:
        assert len((await web.fetch("https://endless.example/")).source) == 100_000
        with pytest.raises(TimeoutError, match="more than 1 s"):
            await web.fetch("https://slow.example/")
        assert (await web.fetch("https://latin.example/")).source == "<p>café"
        assert (await web.fetch("https://odd.example/")).source == "<p>café"
        assert (await web.fetch("http://moved.example/")).url == "https://here.example/"


def test_a_prompt_keeps_to_its_budget_of_tokens() -> None:
    """E1: prompt-forming fills a template; the site's text is cut at a word until the whole fits."""
    template = prompts.load("")
    site = {"title": "Chairs", "text": "größe " * 5000, "contacts": {"emails": ["a@b.c"], "phones": []}}
    short = prompts.form(template, "https://a.example/", {**site, "text": "brief"}, 2000)
    assert "Title: Chairs" in short.text
    assert "Contacts: a@b.c" in short.text
    assert short.left_out == 0
    long = prompts.form(template, "https://a.example/", site, 2000)
    assert 1900 < long.tokens <= 2000
    assert long.text.rstrip("-\n").endswith("größe")
    assert long.left_out > 20_000
    assert long.hash != short.hash
    assert long == prompts.form(template, "https://a.example/", site, 2000)
    with pytest.raises(DeclarationError, match="template alone takes more than 50 tokens"):
        prompts.form(template, "https://a.example/", site, 50)


def test_a_template_of_ones_own_is_checked_before_any_row_is_taken(tmp_path: Path) -> None:
    """E1: a template with an unknown field, or without the text, is refused with the fields there are."""
    for words, match in (("$title $texts", r"a \$field that is not known"), ("$title", "leaves out the site's text")):
        (tmp_path / "a.txt").write_text(words)
        with pytest.raises(DeclarationError, match=match):
            prompts.load(str(tmp_path / "a.txt"))
    with pytest.raises(DeclarationError, match="cannot be read"):
        prompts.load(str(tmp_path / "none.txt"))
    (tmp_path / "a.txt").write_text("$$5 for $text")
    assert prompts.form(prompts.load(str(tmp_path / "a.txt")), "", {"text": "me"}, 100).text == "$5 for me"


def test_settings_come_from_the_environment_and_wrong_ones_are_named() -> None:
    """E2, E4, E5, E6: the defaults are the specification's; a variable that has no effect is an error."""
    settings = Settings.from_environ({"ANALYSIS_PACE_STARTS": "7", "ANALYSIS_ALLOW_PRIVATE": "yes", "PATH": "/"})
    assert (settings.pace_starts, settings.allow_private, settings.seconds("poll")) == (7, True, td(minutes=1))
    assert Settings.from_environ(settings.environ()) == settings
    for environ, match in (
        ({"ANALYSIS_PACE": "7"}, "there is no setting ANALYSIS_PACE"),
        ({"ANALYSIS_BATCH": "many"}, "ANALYSIS_BATCH='many' is not a number"),
        ({"ANALYSIS_BATCH": "0"}, "ANALYSIS_BATCH=0 must be above 0"),
        ({"ANALYSIS_WORKER": "maybe"}, "neither true nor false"),
        ({"ANALYSIS_PROVIDER": "oracle"}, "ANALYSIS_PROVIDER='oracle' is not known"),
        ({"ANALYSIS_TOKENS_PER_MINUTE": "100"}, "the budget never has as many at once"),
    ):
        with pytest.raises(DeclarationError, match=match):
            Settings.from_environ(environ)


def test_the_readme_names_every_setting_with_its_default() -> None:
    """E1 to E8: what can be set is told."""
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    for field in fields(Settings):
        default = str(field.default).lower() if isinstance(field.default, bool) else f"{field.default or 'none'}"
        line = f"| `ANALYSIS_{field.name.upper()}` | {default.removesuffix('.0')} |"
        assert line in readme, line
