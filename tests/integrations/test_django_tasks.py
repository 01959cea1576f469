"""Django's ``TASKS`` setting with rowmill as its backend: a real project, real workers, the admin's pages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import django
import pytest

from databases import Db

pytestmark = pytest.mark.no_pooler("the other library connects to the database by itself, with settings of its own")

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "django-tasks.md"
PAGE_FILES = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))

SETTINGS = """
SECRET_KEY = "test"
DEBUG = True
INSTALLED_APPS = ["django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes",
                  "django.contrib.sessions", "django.contrib.messages", "shop"]
MIDDLEWARE = ["django.contrib.sessions.middleware.SessionMiddleware",
              "django.contrib.auth.middleware.AuthenticationMiddleware",
              "django.contrib.messages.middleware.MessageMiddleware"]
TEMPLATES = [{{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True, "OPTIONS": {{
    "context_processors": ["django.template.context_processors.request", "django.contrib.auth.context_processors.auth",
                           "django.contrib.messages.context_processors.messages"]}}}}]
ROOT_URLCONF = "project_urls"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {{"default": {database!r}}}
"""
URLS = """
from django.contrib import admin
from django.urls import path
from shop import views
urlpatterns = [path("admin/", admin.site.urls), path("order", views.order), path("look/<job>", views.look)]
"""
MODELS = """
from django.db import models


class Order(models.Model):
    email = models.EmailField()
"""
#: What the page's tasks do not show.
MORE = """
class Odd(Exception):
    pass


RUN = []


@task
def plain(*args, **kwargs):
    RUN.append(args)
    return [list(args), kwargs]


@task
def fails():
    raise Odd("as it\\nmust: be")


@task
async def fails_async():
    raise ValueError("no")


@task
def unfit():
    return object()


@task
def gives_up():
    from rowmill import Dead
    raise Dead("hopeless")


@task(takes_context=True)
def told(context, word):
    result = context.task_result
    return [word, context.attempt, result.id, str(result.status)]
"""
#: A task in a module that no worker imports by itself.
ELSEWHERE = """
from django_tasks import task


@task
def far(n: int) -> int:
    return n + 1
"""
SETUP = """
import json, os, sys, django
os.environ["DJANGO_SETTINGS_MODULE"] = "project_settings"
django.setup()
from datetime import timedelta
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.utils import timezone
"""
SCRIPT = (
    SETUP
    + """
call_command("makemigrations", "shop", verbosity=0)
call_command("migrate", verbosity=0)
call_command("makemigrations", "--check", "--dry-run", verbosity=0)
call_command("check", fail_level="WARNING", verbosity=0)
import asyncio
from django.contrib.auth.models import User
from django.test import Client
from django_tasks import TaskResultStatus, default_task_backend, task_backends
from django_tasks.exceptions import InvalidTaskError, TaskResultDoesNotExist, TaskResultMismatch
from django_tasks.signals import task_enqueued, task_finished, task_started
from rowmill.integrations.django import TaskBackend
from shop import elsewhere, tasks
from shop.models import Order

assert isinstance(task_backends["default"], TaskBackend)
signals = []
def note(name):
    def receive(sender, task_result, **_):
        assert sender is TaskBackend
        signals.append([name, task_result.task.name, str(task_result.status)])
    return receive
receivers = [note(name) for name in ("enqueued", "started", "finished")]
for signal, receive in zip((task_enqueued, task_started, task_finished), receivers):
    signal.connect(receive)

def jobs():
    with connection.cursor() as cursor:
        cursor.execute("select count(*) from rowmill_jobs")
        return cursor.fetchone()[0]

def raised(kind, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")

# -- enqueue: what the reference backend's own tests ask of a result
result = tasks.plain.enqueue(1, two=3)
assert result.status == TaskResultStatus.READY and not result.is_finished
assert result.started_at is result.last_attempted_at is result.finished_at is None
assert result.enqueued_at is not None and abs(result.enqueued_at - timezone.now()) < timedelta(minutes=5)
assert raised(ValueError, lambda: result.return_value) == "Task has not finished yet"
assert result.task == tasks.plain and result.backend == "default"
assert (result.args, result.kwargs, result.attempts, result.errors) == ([1], {"two": 3}, 0, [])
assert default_task_backend.get_result(result.id) == result == tasks.plain.get_result(result.id)
assert asyncio.run(tasks.plain.aget_result(result.id)) == result
raised(TaskResultDoesNotExist, default_task_backend.get_result, "987654")
raised(TaskResultDoesNotExist, default_task_backend.get_result, "b3d5c4f2-1111-4222-8333-944445555666")
raised(TaskResultMismatch, tasks.fails.get_result, result.id)
raised(TypeError, tasks.plain.enqueue, object())
raised(InvalidTaskError, tasks.plain.using, queue_name="unknown")
raised(InvalidTaskError, tasks.plain.using, priority=101)
raised(InvalidTaskError, tasks.plain.using, run_after=timezone.now().replace(tzinfo=None))
deferred = asyncio.run(tasks.plain.using(run_after=timezone.now() + timedelta(days=1)).aenqueue("later"))
before = jobs()

# -- in the transaction
class Undo(Exception): ...
try:
    with transaction.atomic():
        tasks.plain.enqueue("never")
        inside = jobs() - before
        raise Undo
except Undo:
    pass
assert (inside, jobs()) == (1, before)
client = Client()
answer = client.post("/order", {"email": "a@example.org"})
assert answer.status_code == 202
confirmed = answer.json()["job"]
with connection.cursor() as cursor:
    cursor.execute("select queue, priority, task from rowmill_jobs where id = %s", [confirmed])
    assert cursor.fetchone() == ("mail", -10, "shop.tasks.confirm")
assert client.get(f"/look/{confirmed}").json() == {"status": "READY", "value": None}

# -- order: the highest priority first, and tasks of every kind
low = tasks.plain.using(priority=-5).enqueue("low")
high = tasks.plain.using(priority=5).enqueue("high")
kinds = {
    "context": tasks.told.enqueue("hello"), "async": tasks.count.enqueue(), "far": elsewhere.far.enqueue(41),
    "odd": tasks.fails.enqueue(), "async error": tasks.fails_async.enqueue(), "unfit": tasks.unfit.enqueue(),
    "dead": tasks.gives_up.enqueue(),
}
from rowmill.django.project import mill
mill.lanes["default"].concurrency = 1
del signals[:]
call_command("rowmill", "retry", "--lane", "default", "--id", str(low.id), "--json")
mill.run(drain=True)
for each in (result, low, high, deferred, *kinds.values()):
    each.refresh()
assert deferred.status == TaskResultStatus.READY
assert result.status == TaskResultStatus.SUCCESSFUL and result.is_finished and result.attempts == 1
assert result.return_value == [[1], {"two": 3}]
assert result.enqueued_at <= result.started_at == result.last_attempted_at <= result.finished_at
assert [word for (word, *_) in tasks.RUN] == ["high", 1, "low"], tasks.RUN
assert client.get(f"/look/{confirmed}").json() == {"status": "SUCCESSFUL", "value": "to a@example.org"}
assert kinds["context"].return_value == ["hello", 1, kinds["context"].id, "RUNNING"]
assert kinds["async"].return_value == [1, 1]
assert kinds["far"].return_value == 42
for name, kind, attempts in (("odd", tasks.Odd, 2), ("async error", ValueError, 2), ("unfit", TypeError, 2)):
    failed = kinds[name]
    assert failed.status == TaskResultStatus.FAILED, name
    assert raised(ValueError, lambda: failed.return_value) == "Task failed"
    assert [error.exception_class for error in failed.errors] == [kind] * attempts, failed.errors
    assert (failed.attempts, failed.started_at < failed.last_attempted_at) == (attempts, True)
    assert "Traceback" in failed.errors[0].traceback
assert kinds["dead"].status == TaskResultStatus.FAILED and kinds["dead"].attempts == 1
assert ["started", "plain", "RUNNING"] in signals and ["finished", "plain", "SUCCESSFUL"] in signals
assert [entry for entry in signals if entry[1] == "fails_async"] == [
    ["started", "fails_async", "RUNNING"]] * 2 + [["finished", "fails_async", "FAILED"]], signals

# -- the admin
User.objects.create_superuser("boss", password="secret")
client.force_login(User.objects.get())
page = client.get("/admin/rowmill/queuedjob/?state=dead").content.decode()
assert "shop.tasks.fails" in page and "shop.tasks.plain" not in page
page = client.get(f"/admin/rowmill/queuedjob/{kinds['odd'].id}/change/").content.decode()
assert "as it" in page and 'name="state"' not in page and "deletelink" not in page
def act(action, *ids):
    form = {"action": action, "_selected_action": ids}
    return client.post("/admin/rowmill/queuedjob/", form, follow=True).content.decode()

text = act("run_again", kinds["odd"].id, result.id)
assert "1 job made ready." in text and "it is done" in text, text
assert "1 job canceled." in act("cancel", kinds["odd"].id)
kinds["odd"].refresh()
with connection.cursor() as cursor:
    cursor.execute("select who, action, lane, outcome, detail from rowmill_audit order by id")
    audit = cursor.fetchall()
assert audit == [("boss", "retry", "default", "done", "1 row"), ("boss", "cancel", "default", "done", "1 row")], audit
print(json.dumps([str(kinds["odd"].status)]))
"""
)


def project(folder: Path, db: Db, settings: str = "", jobs: str | None = None) -> Path:
    """A project with the page's programs in it."""
    if db.dialect == "sqlite":
        database: dict[str, Any] = {"ENGINE": "django.db.backends.sqlite3", "NAME": db.url.removeprefix("sqlite:///")}
    else:
        url = urlsplit(db.url)
        database = {
            "ENGINE": "django.db.backends.postgresql", "NAME": url.path.lstrip("/"),
            "HOST": parse_qs(url.query)["host"][0], "USER": url.username,
        }  # fmt: skip
    given = PAGE_FILES["settings.py"].replace('"max_attempts": 3', '"max_attempts": 2, "backoff": fixed(td(0))')
    (folder / "shop").mkdir()
    for name, text in {
        "project_settings.py": "from datetime import timedelta as td\nfrom rowmill import fixed\n"
        + SETTINGS.format(database=database) + given + settings,
        "project_urls.py": URLS, "shop/__init__.py": "", "shop/models.py": MODELS, "shop/elsewhere.py": ELSEWHERE,
        "shop/tasks.py": PAGE_FILES["shop/tasks.py"] + MORE, "shop/views.py": PAGE_FILES["shop/views.py"],
        **({} if jobs is None else {"shop/jobs.py": jobs}),
    }.items():  # fmt: skip
        (folder / name).write_text(_for_this_django(text))
    return folder


def _for_this_django(text: str) -> str:
    """Django 6 has the task interface itself; the programs are written for Django 5 with the package."""
    if django.VERSION < (6,):
        return text
    return text.replace("django_tasks", "django.tasks").replace("InvalidTaskError", "InvalidTask")


def run(folder: Path, script: str) -> list[Any]:
    """What a script in the project prints, line by line."""
    ended = subprocess.run(
        [sys.executable, "-c", _for_this_django(script)], cwd="/", env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]


def test_every_program_of_the_page_is_in_the_project() -> None:
    assert set(PAGE_FILES) == {"settings.py", "shop/tasks.py", "shop/views.py"}


@pytest.mark.bare
def test_a_projects_tasks_are_jobs_with_every_optional_feature(db: Db, tmp_path: Path) -> None:
    """Issue 25, point 1: defer, async, priority, results, context, signals, atomic() and the admin, without a Mill."""
    assert run(project(tmp_path, db), SCRIPT) == [["FAILED"]]


JOBS = """
from rowmill.django import Mill

from .tasks import plain

mill = Mill()
mill.queue("default", concurrency=2)


@mill.task
def own(word: str) -> str:
    plain.enqueue(word)
    return word
"""


@pytest.mark.bare
def test_tasks_of_both_kinds_share_a_mill_and_a_missing_one_is_left(lite: Db, tmp_path: Path) -> None:
    """A worker that cannot import a task leaves its jobs as they are, for a newer one."""
    folder = project(tmp_path, lite, 'ROWMILL_APP = "shop.jobs:mill"\n', JOBS)
    script = (
        SETUP
        + """
call_command("makemigrations", "shop", verbosity=0)
call_command("migrate", verbosity=0)
from shop.jobs import own
from shop import elsewhere, tasks
with transaction.atomic():
    own.enqueue_sync("both")
elsewhere.far.enqueue(1)
with connection.cursor() as cursor:
    cursor.execute("update rowmill_jobs set task = 'shop.newer.task' where task like '%far'")
try:
    call_command("rowmill", "run", "--drain", "--log-level", "error")
except CommandError as error:
    assert error.returncode == 3
with connection.cursor() as cursor:
    cursor.execute("select task, state, attempts from rowmill_jobs order by id")
    print(json.dumps(cursor.fetchall()))
"""
    )
    assert run(folder, script) == [
        [["own", "done", 1], ["shop.newer.task", "ready", 0], ["shop.tasks.plain", "done", 1]]
    ]


def test_mistakes_in_the_settings_are_named(lite: Db, tmp_path: Path) -> None:
    """manage.py check says what is wrong with TASKS and what to do."""
    folder = project(tmp_path, lite, 'TASKS["default"]["OPTIONS"] = {"databse": "x"}\n')
    script = SETUP.replace("django.setup()", """
try:
    django.setup()
    from shop import tasks
except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]))
    raise SystemExit
""")  # fmt: skip
    ((kind, text),) = run(folder, script)
    assert kind == "ImproperlyConfigured"
    assert "there is no option 'databse'" in text
    assert "database" in text
