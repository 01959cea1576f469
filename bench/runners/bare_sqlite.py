"""The least that a worker on a SQLite file could do: no fence, no leases, no heartbeat, no wake-up.

Claims ``batch`` rows of the same table, calls an empty coroutine for each, and settles them together with the next
claim, in one transaction.
"""

from __future__ import annotations

import asyncio
import json

from ..tables import table
from .protocol import Recorder, order, serve
from .rows import SqliteRows

_NOW = "strftime('%Y-%m-%d %H:%M:%f', 'now')"


class Runner(SqliteRows):
    batch = 500

    async def work(self, recorder: Recorder) -> None:
        name = self.table.names[0]
        claim = f"""update {name} set status = 'running', updated_at = {_NOW}, heartbeat_at = {_NOW},
                locked_at = {_NOW}, locked_by = 'bare', attempts = attempts + 1
            where id in (select id from {name} where status in ('queued', 'failed') and run_after <= {_NOW}
                order by run_after, id limit ?)
            returning id, url"""
        settle = f"""update {name} set status = 'succeeded', updated_at = {_NOW}
            where id in (select value from json_each(?))"""

        async def noop(url: str) -> None:
            recorder.hit(int(url.rpartition("/")[2]))

        recorder.wait_for_go()
        run, done = self.connection.execute, list[str]()
        while True:
            run("begin immediate")
            run(settle, (json.dumps(done),))
            taken = run(claim, (self.batch,)).fetchall()
            run("commit")
            for _, url in taken:
                await noop(url)
            done = [key for key, _ in taken]
            if not taken:
                await asyncio.sleep(0.01)


action, dsn, options = order()
asyncio.run(serve(Runner(dsn, table(options)), action, options))
