"""Every program of docs/how-to/frameworks.md is run as it stands, by the real framework."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import quick_processes
from databases import Db
from waiting import eventually

pytestmark = pytest.mark.no_pooler("the other library connects to the database by itself, with settings of its own")

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "frameworks.md"
FILES = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE))
DJANGO = ("settings.py", "shop/models.py", "shop/jobs.py", "shop/views.py")


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(FILES[name])


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=180)


def test_every_program_is_run_here() -> None:
    assert set(FILES) == {"web.py", *DJANGO, "flask_shop.py", "order.py", "conftest.py", "test_shop.py"}


class Web:
    """The FastAPI application under Uvicorn, in a process of its own."""

    def __init__(self, folder: Path, db: Db) -> None:
        write(folder, "web.py")
        self.log = folder / "uvicorn.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "uvicorn", "web:app", "--port", "0"], cwd=folder, stdout=log, stderr=log,
                env={**os.environ, "ROWMILL_DATABASE_URL": db.url}, start_new_session=True,
            )  # fmt: skip
        eventually(lambda: self._address() or self.process.poll() is not None)
        self.http = httpx.Client(base_url=self._address(), timeout=20)

    def _address(self) -> str:
        found = re.search(r"running on (http://127\.0\.0\.1:\d+)", self.log.read_text())
        return found.group(1) if found else ""

    def order(self, **params: Any) -> int:
        answer = self.http.post("/reports", params=params)
        assert answer.status_code == 202, answer.text
        return int(answer.json()["id"])

    def look(self, id: int) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"/reports/{id}").json()
        return found

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=60)


@pytest.fixture
def web(tmp_path: Path, db: Db) -> Iterator[Web]:
    web = Web(tmp_path, db)
    yield web
    web.close()


def test_a_fastapi_application_under_uvicorn_works_and_stops_clean(web: Web, db: Db) -> None:
    """E7, X2: enqueued by HTTP, worked on in the same process; SIGTERM lets runs finish and gives the others back."""
    first = web.order(to="a@example.org")
    eventually(lambda: web.look(first) == {"state": "done", "result": "sent to a@example.org"})
    health = web.http.get("/health")
    assert health.status_code == 200, health.text
    assert web.http.get("/reports/999999").status_code == 404
    # Five slots: four runs that end within the grace, one that does not, and two more that wait for a slot.
    soon = [web.order(to=f"{n}@example.org", seconds=1.5) for n in range(4)]
    late = [web.order(to="late@example.org", seconds=600) for _ in range(2)]
    eventually(lambda: web.http.get("/health").json()["busy"] == 5)
    web.process.send_signal(signal.SIGTERM)
    code = web.process.wait(timeout=60)
    log = web.log.read_text()
    assert code in (0, -signal.SIGTERM), log  # Uvicorn ends by the signal that it was sent
    assert "Application shutdown complete" in log
    assert "Traceback" not in log
    states = {row["id"]: row["state"] for row in db.query("select id, state from rowmill_jobs")}
    assert [states[id] for id in soon] == ["done"] * 4
    assert [states[id] for id in late] == ["ready"] * 2
    assert db.value("select count(*) from rowmill_jobs where state = 'ready' and worker is not null") == 0
    assert [row["state"] for row in db.query("select state from rowmill_workers")] == ["stopped"]


PROVE_DJANGO = """
import json, os, django
os.environ["DJANGO_SETTINGS_MODULE"] = "settings"
django.setup()
from django.core.management import call_command
from django.test import Client
call_command("makemigrations", "shop", verbosity=0)
call_command("migrate", verbosity=0)
assert Client().post("/order", {"email": "a@example.org"}).status_code == 202
call_command("rowmill", "run", "--drain", "--log-level", "warning")
from django.db import connection
from shop.models import Order
with connection.cursor() as cursor:
    cursor.execute("select state, result from rowmill_jobs")
    print(json.dumps([list(Order.objects.values_list("status", flat=True)), cursor.fetchall()]))

import asyncio
from django.core.asgi import get_asgi_application
from shop.jobs import confirm, mill
lifespan = mill.lifespan(worker=True)
application = lifespan.around(get_asgi_application())

async def serve():
    said = []
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    async def receive():
        message = next(messages)
        if message["type"] == "lifespan.shutdown":
            said.append(await (await confirm.enqueue(order_id=1)).result(timeout=60))
        return message
    async def send(message):
        said.append(message["type"])
    await application({"type": "lifespan"}, receive, send)
    print(json.dumps(said))

asyncio.run(serve())
"""


def test_the_django_project_works(tmp_path: Path) -> None:
    write(tmp_path, *DJANGO)
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "shop.sqlite3")}
    before = f"""
SECRET_KEY = "test"
USE_TZ = True
ROOT_URLCONF = "urls"
ALLOWED_HOSTS = ["testserver"]
DATABASES = {{"default": {database!r}}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["shop"]
"""
    (tmp_path / "settings.py").write_text(before + FILES["settings.py"])
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "urls.py").write_text(
        "from django.urls import path\nfrom shop.views import order\nurlpatterns = [path('order', order)]\n"
    )
    ended = run(tmp_path, "-c", PROVE_DJANGO)
    assert ended.returncode == 0, ended.stderr
    worked, served = map(json.loads, ended.stdout.splitlines())
    assert worked == [["sent"], [["done", '"to a@example.org"']] * 2]
    assert served == ["lifespan.startup.complete", "to a@example.org", "lifespan.shutdown.complete"]


PROVE_FLASK = """
import asyncio, os
import flask_shop, order
client = flask_shop.app.test_client()
answer = client.post("/reports", data={"to": "f@example.org"})
assert answer.status_code == 202
pid = os.fork()  # as a server does that loads the application first
if pid == 0:
    os._exit(0 if client.post("/reports", data={"to": "g@example.org"}).status_code == 202 else 1)
assert os.waitpid(pid, 0)[1] == 0
flask_shop.mill.run(drain=True)
print(client.get(f"/reports/{answer.json['id']}").json)
print(client.get("/reports/999").status_code, order.handle.result_sync())
print(flask_shop.mill.tasks["send_report"].handle(5).status_sync().state)
"""


def test_flask_scripts_and_pytest_work(tmp_path: Path) -> None:
    write(tmp_path, "flask_shop.py", "order.py", "conftest.py", "test_shop.py")
    ended = run(tmp_path, "-c", PROVE_FLASK)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "{'result': 'sent to f@example.org', 'state': 'done'}", "404 sent to a@example.org", "done",
    ]  # fmt: skip
    with quick_processes.real_processes():  # pytest warns of plugins that were imported before it
        tested = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert tested.returncode == 0, tested.stdout
    assert "2 passed" in tested.stdout
