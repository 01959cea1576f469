"""A lane over a table that Alembic made, declared by the SQLAlchemy model itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from databases import Db
from foreign import Place

pytestmark = pytest.mark.no_pooler("the other library connects to the database by itself, with settings of its own")

INI = "[alembic]\nscript_location = migrations\n"
ENV = """
import os
from alembic import context
from sqlalchemy import create_engine
from models import Base

engine = create_engine(os.environ["SQLALCHEMY_URL"])
with engine.connect() as connection:
    context.configure(connection=connection, target_metadata=Base.metadata)
    with context.begin_transaction():
        context.run_migrations()
"""
MAKO = """
from alembic import op
import sqlalchemy as sa
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
def upgrade():
    ${upgrades if upgrades else "pass"}
def downgrade():
    ${downgrades if downgrades else "pass"}
"""
SESSION = """
import json, os
from sqlalchemy import create_engine, select
from sqlalchemy.orm import Session
from models import Report, State

session = Session(create_engine(os.environ["SQLALCHEMY_URL"]))
"""


@pytest.fixture
def place(pg: Db, tmp_path: Path) -> Place:
    here = Place(tmp_path, pg, "models.py", "reports_lane.py")
    here.environment["SQLALCHEMY_URL"] = pg.url.replace("postgresql://", "postgresql+psycopg://", 1)
    here.write("alembic.ini", INI)
    here.write("migrations/env.py", ENV)
    here.write("migrations/script.py.mako", MAKO)
    (tmp_path / "migrations" / "versions").mkdir()
    here.run("-m", "alembic", "revision", "--autogenerate", "-m", "first")
    here.run("-m", "alembic", "upgrade", "head")
    return here


def test_rows_that_the_session_added_are_worked_off_and_the_session_sees_them_finished(pg: Db, place: Place) -> None:
    """Issue 3, foreign tables: a real migration, a Python enum, JSON; the model is asked for the outcome."""
    place.script(
        SESSION
        + """
for customer, figures in (("Ada", {"sold": [1, 2]}), ("Bo", {"sold": [5]}), ("Cy", {"sold": ["x" * 500]})):
    session.add(Report(customer=customer, figures=figures))
session.commit()
"""
    )
    place.drain("reports_lane")
    seen = place.script(
        SESSION
        + """
rows = session.scalars(select(Report).order_by(Report.id)).all()
print(json.dumps([[r.customer, r.state.name, r.sent_to, r.failures, (r.last_error or "")[:9]] for r in rows]))
"""
    )
    assert seen == [["Ada", "SENT", ["Ada", 3], 0, ""], ["Bo", "SENT", ["Bo", 5], 0, ""],
                    ["Cy", "BROKEN", None, 2, "TypeError"]]  # fmt: skip

    # Nothing was added to the table, and rowmill's own is where Alembic does not look; beside the models' it would.
    assert pg.value("select count(*) from rowmill.rowmill_workers") == 1
    assert "No new upgrade operations detected" in place.run("-m", "alembic", "check")
    pg.execute("create table rowmill_workers (id text)")
    place.run("-m", "alembic", "check", code=255)
