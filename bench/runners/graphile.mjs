// Graphile Worker. Finished jobs are deleted: it knows no other way.
import { Logger, makeWorkerUtils, run } from "graphile-worker";
import pg from "pg";
import { options, postgres, serve, sleep } from "./protocol.mjs";

const logger = new Logger(() => () => {});
const pgPool = new pg.Pool({ ...postgres, max: options.pool });
pgPool.on("error", console.error);
pgPool.on("connect", (client) => client.on("error", console.error));
let utils;

await serve({
  async open(action) {
    if (action !== "work") utils = await makeWorkerUtils({ pgPool, logger });
    else await pgPool.query("select 1");
  },
  setup: () => utils.migrate(),
  add: (number) => utils.addJob("noop", { number }),
  addMany: (numbers) => utils.addJobs(numbers.map((number) => ({ identifier: "noop", payload: { number } }))),
  async work(recorder) {
    await recorder.waitForGo();
    const noop = async ({ number }) => {
      recorder.hit(number);
      await sleep();
    };
    await run({ pgPool, logger, preset: { worker: options.worker }, taskList: { noop }, noHandleSignals: true });
  },
});
