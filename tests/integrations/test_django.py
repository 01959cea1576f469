"""A real Django project, with migrations, models as tables, the management command and Django's own test runner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from databases import Db

pytestmark = pytest.mark.no_pooler("the other library connects to the database by itself, with settings of its own")

SETTINGS = """
SECRET_KEY = "test"
INSTALLED_APPS = ["rowmill.django", "post"]
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {{"default": {database!r}}}
ROWMILL_APP = "post.jobs:mill"
"""
MODELS = """
from django.db import models


class Letter(models.Model):
    class Status(models.TextChoices):
        DRAFT = "draft"
        POSTING = "posting"
        POSTED = "posted"
        LOST = "lost"

    state = models.CharField(max_length=12, choices=Status, default=Status.DRAFT, db_column="letterState")
    address = models.CharField(max_length=100)
    answers = models.ForeignKey("self", null=True, on_delete=models.CASCADE)
    stamp = models.IntegerField(null=True)
    tries = models.PositiveSmallIntegerField(default=0)
    error = models.TextField(blank=True, default="")
    locked_by = models.CharField(max_length=80, null=True)
    locked_at = models.DateTimeField(null=True)
    heartbeat_at = models.DateTimeField(null=True)
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        db_table = "Letters.of the post"


class Note(models.Model):
    text = models.TextField()
"""
JOBS = """
from datetime import timedelta as td

from post.models import Letter, Note
from rowmill import Dead, Key, fixed
from rowmill.django import Mill

mill = Mill()


@mill.lane(
    Letter, ready={"state": [Letter.Status.DRAFT]}, running={"state": Letter.Status.POSTING},
    done={"state": Letter.Status.POSTED}, dead={"state": Letter.Status.LOST},
    roles={"attempts": "tries"}, order_by="-pk", max_attempts=2, backoff=fixed(td(0)),
)
def deliver(job):
    if not job["address"]:
        raise Dead("no address")
    Note.objects.create(text=f"a letter to {job['address']}")
    return {"stamp": 100}


@mill.task
def remember(text: str) -> int:
    return Note.objects.create(text=text).pk


@mill.task
async def recall(text: str) -> int:
    return await Note.objects.filter(text=text).acount()


@mill.task(isolation="process")
def apart(text: str) -> int:
    return Note.objects.create(text=text).pk
"""
MANAGE = """
import os, sys
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project_settings")
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
"""
SETUP = """
import contextlib, io, json, os, django
os.environ["DJANGO_SETTINGS_MODULE"] = "project_settings"
django.setup()
from django.core.management import CommandError, call_command
from django.db import connection, transaction
"""
FIRST = (
    SETUP
    + """
call_command("makemigrations", "post", verbosity=0)
call_command("migrate", verbosity=0)
call_command("migrate", verbosity=0)  # again: nothing is made twice
from post.models import Letter, Note
from post.jobs import Key, apart, mill, recall, remember
from rowmill import KeyTaken

def jobs():
    with connection.cursor() as cursor:
        cursor.execute("select count(*) from rowmill_jobs")
        return cursor.fetchone()[0]

class Undo(Exception): ...

told = {}
try:
    with transaction.atomic():
        Letter.objects.create(address="never sent")
        remember.enqueue_sync("never")
        remember.enqueue_many_sync([{"text": "never"}] * 3)
        mill.chain_sync(remember.call("never"), recall.call("never"))
        told["inside"] = jobs()
        raise Undo
except Undo:
    told["rolled back"] = [jobs(), Letter.objects.count()]
with transaction.atomic():
    first = Letter.objects.create(address="near")
    Letter.objects.create(address="", answers=first)
    remember.enqueue_sync("committed", key="k")
    try:
        remember.enqueue_sync("again", key=Key("k", conflict="raise"))
    except KeyTaken:
        pass
    told["still usable"] = Letter.objects.count()
    try:
        with transaction.atomic():  # a savepoint
            remember.enqueue_sync("undone")
            raise Undo
    except Undo:
        pass
told["committed"] = jobs()
remember.enqueue_sync("by itself")
mill.chain_sync(remember.call("a link"), recall.call("a link"))
mill.batch_sync([remember.call("of a batch")] * 2, then=recall.call("of a batch"))
apart.enqueue_sync("apart")
told["all"] = jobs()
print(json.dumps(told))
"""
)
DRAIN = """
from django.core.management import CommandError
try:
    call_command("rowmill", "run", "--drain", "--log-level", "warning")
except CommandError as error:
    assert error.returncode == 3, error
"""
LAST = (
    SETUP
    + """
from post.models import Letter, Note
letters = Letter.objects.order_by("pk")
letters = [[l.address, l.state, l.get_state_display(), l.stamp, l.tries, l.error] for l in letters]
with connection.cursor() as cursor:
    cursor.execute("select task, state, result from rowmill_jobs where task = 'recall' order by id")
    recalled = [[task, state, json.loads(result) if isinstance(result, str) else result]
                for task, state, result in cursor.fetchall()]
    cursor.execute("select distinct state from rowmill_jobs")
    states = cursor.fetchall()
call_command("makemigrations", "--check", "--dry-run", verbosity=0)
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    call_command("rowmill", "status", "--json")
counts = {lane["lane"]: lane["counts"]["done"] for lane in json.loads(printed.getvalue())["lanes"]}
try:
    call_command("rowmill", "run", "--lanes", "nothing")
except CommandError as error:
    wrong = str(error)
notes = sorted(Note.objects.values_list("text", flat=True))
print(json.dumps([letters, recalled, states, notes, counts, wrong]))
"""
)
TESTS = """
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection
from django.test import TestCase

from post.jobs import mill, remember
from rowmill.testing import enqueued


class InATestCase(TestCase):
    def test_what_is_enqueued_is_in_the_tests_transaction(self):
        for _ in range(2):
            remember.enqueue_sync("x")
        self.assertEqual([job.args for job in enqueued(mill, remember, tx=connection)], [{"text": "x"}] * 2)

    def test_and_is_gone_in_the_next(self):
        self.assertEqual(enqueued(mill, tx=connection), [])

    def test_a_worker_needs_a_file(self):
        with self.assertRaises(CommandError):
            call_command("rowmill", "status")
"""


class Project:
    """A Django project in a folder."""

    def __init__(self, folder: Path, db: Db) -> None:
        self.folder = folder
        if db.dialect == "sqlite":
            database: dict[str, Any] = {
                "ENGINE": "django.db.backends.sqlite3", "NAME": db.url.removeprefix("sqlite:///"),
            }  # fmt: skip
        else:
            url = urlsplit(db.url)
            host, user = parse_qs(url.query)["host"][0], url.username
            database = {
                "ENGINE": "django.db.backends.postgresql", "NAME": url.path.lstrip("/"), "HOST": host, "USER": user,
            }  # fmt: skip
        (folder / "post").mkdir()
        for name, text in {
            "project_settings.py": SETTINGS.format(database=database), "manage.py": MANAGE, "post/__init__.py": "",
            "post/models.py": MODELS, "post/jobs.py": JOBS, "post/tests.py": TESTS,
        }.items():  # fmt: skip
            (folder / name).write_text(text)

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        # From elsewhere: the processes that are started find the project all the same.
        ended = subprocess.run(
            [sys.executable, *words], cwd="/", env={**os.environ, "PYTHONPATH": str(self.folder)},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended

    def script(self, text: str) -> list[Any]:
        """What a script prints, line by line."""
        return [json.loads(line) for line in self.run("-c", text).stdout.splitlines()]

    def manage(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        ended = subprocess.run(
            [sys.executable, str(self.folder / "manage.py"), *words],
            cwd="/", env=os.environ, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended


@pytest.fixture
def project(db: Db, tmp_path: Path) -> Project:
    return Project(tmp_path, db)


def test_a_project_enqueues_in_its_transactions_and_works_on_its_models(db: Db, project: Project) -> None:
    """Issue 5, Django: what atomic() rolls back leaves nothing; models are tables; handlers use the ORM."""
    if db.dialect == "sqlite":
        (told,) = project.script(FIRST)
        ended = project.manage("rowmill", "run", "--drain", "--log-level", "warning", code=3)
        assert "9 done, 1 failed attempt, 1 dead" in ended.stderr, ended.stderr
        (last,) = project.script(LAST)
    else:  # the same in one process
        told, last = project.script(FIRST + DRAIN + LAST)
    assert told == {"inside": 6, "rolled back": [0, 0], "still usable": 2, "committed": 1, "all": 8}
    letters, recalled, states, notes, counts, wrong = last
    assert letters == [
        ["near", "posted", "Posted", 100, 1, ""],
        ["", "lost", "Lost", None, 1, "no address"],
    ]
    assert recalled == [["recall", "done", 1], ["recall", "done", 2]]
    assert states == [["done"]]
    assert notes == ["a letter to near", "a link", "apart", "by itself", "committed", "of a batch", "of a batch"]
    assert counts == {"deliver": 1, "default": 7, "apart": 1}
    assert wrong == "rowmill run --lanes nothing: exit code 1"


def test_djangos_test_runner_has_the_tables_also_in_memory(tmp_path: Path, lite: Db) -> None:
    ended = Project(tmp_path, lite).manage("test", "post")
    assert "Ran 3 tests" in ended.stderr
    assert "OK" in ended.stderr
