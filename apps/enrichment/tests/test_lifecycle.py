"""An import and its links, from the file to the last counter."""

from __future__ import annotations

from apps.enrichment.tests.conftest import App
from apps.standins import sites
from apps.standins.internet import Internet


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
