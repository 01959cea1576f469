"""A lane over a Django model's table: real settings, real migrations, and the ORM to fill it and to look at it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from databases import Db
from foreign import Place

pytestmark = pytest.mark.no_pooler("the other library connects to the database by itself, with settings of its own")

SETTINGS = """
SECRET_KEY = "test"
INSTALLED_APPS = ["post"]
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {{"default": {{"ENGINE": "django.db.backends.postgresql", "NAME": {name!r}, "HOST": {host!r},
                          "USER": {user!r}}}}}
"""
MODELS = """
import uuid
from django.db import models


class Letter(models.Model):
    class Status(models.TextChoices):
        DRAFT = "draft"
        POSTING = "posting"
        POSTED = "posted"
        RETURNED = "returned"
        LOST = "lost"

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    status = models.CharField(max_length=12, choices=Status, default=Status.DRAFT)
    address = models.CharField(max_length=100)
    stamp = models.IntegerField(null=True)
    attempts = models.PositiveSmallIntegerField(default=0)
    error = models.CharField(max_length=15, blank=True, default="")
    locked_by = models.CharField(max_length=80, null=True)
    locked_at = models.DateTimeField(null=True)
    heartbeat_at = models.DateTimeField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)
"""
ORM = """
import json, os, django
os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
django.setup()
from django.db.models import F
from post.models import Letter
"""


@pytest.fixture
def place(pg: Db, tmp_path: Path) -> Place:
    here = Place(tmp_path, pg, "letters_lane.py")
    url = urlsplit(pg.url)
    host = parse_qs(url.query)["host"][0]
    here.write("settings.py", SETTINGS.format(name=url.path.lstrip("/"), host=host, user=url.username))
    here.write("post/__init__.py", "")
    here.write("post/models.py", MODELS)
    here.environment["DJANGO_SETTINGS_MODULE"] = "settings"
    here.run("-m", "django", "makemigrations", "post")
    here.run("-m", "django", "migrate")
    return here


def test_rows_that_the_orm_created_are_worked_off_and_the_orm_sees_them_finished(pg: Db, place: Place) -> None:
    """Issue 3, foreign tables: choices, UUID keys, short text columns; auto_now is kept right."""
    place.script(ORM + "\nfor address in ('near', 'far away', ''): Letter.objects.create(address=address)")
    place.drain("letters_lane")
    seen = place.script(
        ORM
        + """
letters = Letter.objects.order_by("created_at")
told = [[l.address, l.status, l.get_status_display(), l.stamp, l.attempts, l.error] for l in letters]
print(json.dumps([told, Letter.objects.filter(updated_at__gt=F("created_at"), locked_by__isnull=False).count()]))
"""
    )
    assert seen == [[["near", "posted", "Posted", 100, 1, ""],
                     ["far away", "posted", "Posted", 200, 2, "TimeoutError: …"],
                     ["", "lost", "Lost", None, 1, "no address"]], 3]  # fmt: skip
    place.run("-m", "django", "makemigrations", "--check", "--dry-run", "post")
