"""What the server itself makes of rowmill's statements: pgbench, with no worker in between."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from urllib.parse import parse_qs, urlsplit

from ..peers import Peer
from ..session import Session, session
from .part import Column, Context, Figures, Part

_BATCH = 500
_WORKER = "'pgbench'"
# pgbench keeps one row's columns in variables, so what a worker would read row by row is gathered by the server.
_GATHERED = """select coalesce(array_agg(id), '{}')::text as keys, array_fill(1, array[count(*)::int])::text as groups,
  array[max(locked_at)]::text as times, array[max(attempts)]::text as counts from taken \\gset
"""
_ARRAYS = {"$1": "keys", "$2": "groups", "$3": "times", "$4": "counts"}


def statements(dsn: str) -> tuple[str, str]:
    """Claim and settle as rowmill renders them for this table, from its own command."""
    command = [sys.executable, "-m", "rowmill", "sql", "bench.limit_app:mill", "enrichment_jobs", "--json"]
    environment = {**os.environ, "ROWMILL_DATABASE_URL": dsn}
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    found = {entry["name"]: entry["sql"] for entry in json.loads(said)["statements"]}
    return found["claim"], found["settle, done"]


def scripts(claim: str, settle: str) -> dict[str, str]:
    """As pgbench takes them: two statements for each batch, or the settle and the next claim in one."""
    taking = claim[: claim.rindex("\nselect ")].replace("$1::bigint", str(_BATCH)).replace("$2::text", _WORKER) + "\n"
    settling = settle.replace("$5::text", _WORKER)
    for parameter, variable in _ARRAYS.items():
        settling = settling.replace(f"{parameter}::", f":{variable}::")
    held, update = settling.split("\n)\n", 1)
    merged = f"{held}\n), settled as (\n{update}\n), {taking.removeprefix('with ')}{_GATHERED}"
    return {"apart": f"{taking}{_GATHERED}{settling};\n", "merged": merged}


def measure(context: Context, peer: Peer) -> Figures:
    program = context.server.tool("pgbench")
    if program is None:
        raise FileNotFoundError("there is no pgbench here")
    figures: Figures = {}
    with session(peer, context.server) as run:
        for name, script in scripts(*statements(run.dsn)).items():
            for clients, word in ((1, "one"), (2, "two")):
                run.value("truncate enrichment_jobs")
                figures[f"{name}_{word}"] = _rate(run, program, script, clients, context.jobs(peer))
    return figures


def _rate(run: Session, program: str, script: str, clients: int, rows: int) -> float:
    run.enqueue(rows)
    run.calm()
    address = urlsplit(run.dsn)
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(script)
        file.flush()
        # One more than there are batches: a merged statement settles what the one before it has claimed.
        each = rows // _BATCH // clients + 1
        where = ["-h", parse_qs(address.query)["host"][0], "-U", str(address.username)]
        command = [program, "-n", "-M", "prepared", *where, "-c", str(clients), "-j", str(clients), "-t", str(each)]
        command += [option for variable in _ARRAYS.values() for option in ("-D", f"{variable}={{}}")]
        command += ["-f", file.name, address.path.lstrip("/")]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    done = rows - run.left()
    transactions, per_second = (float(re.search(p, out)[1]) for p in (r"processed: (\d+)", r"tps = ([\d.]+)"))
    return done / (transactions / per_second)


PART = Part(
    "limit",
    "The limit: pgbench with rowmill's own statements",
    f"The same table, the claim and settle statements that `rowmill sql` prints, batches of {_BATCH}, no worker: "
    "what one and two connections get out of this server. Merged: settle and next claim in one statement.",
    measure,
    ("rowmill",),
    (
        Column("apart_one", "2 statements, 1 client, jobs/s", plot="2 statements, 1 client"),
        Column("apart_two", "2 statements, 2 clients", plot="2 statements, 2 clients"),
        Column("merged_one", "merged, 1 client", plot="merged, 1 client"),
        Column("merged_two", "merged, 2 clients", plot="merged, 2 clients"),
    ),
)
