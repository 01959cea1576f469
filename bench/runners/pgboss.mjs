// pg-boss. Its handler gets a whole batch, so the jobs of a batch run side by side and end together.
import { PgBoss } from "pg-boss";
import { options, postgres, serve, sleep } from "./protocol.mjs";

let boss;

await serve({
  async open(action) {
    boss = new PgBoss({ ...postgres, max: options.pool, useListenNotify: action === "work" });
    boss.on("error", console.error);
    await boss.start();
  },
  setup: () => boss.createQueue("bench", { notify: true }),
  add: (number) => boss.send("bench", { number }),
  addMany: (numbers) => boss.insert("bench", numbers.map((number) => ({ data: { number } }))),
  async work(recorder) {
    await recorder.waitForGo();
    await boss.work("bench", options.work, async (jobs) => {
      for (const job of jobs) recorder.hit(job.data.number);
      await sleep();
    });
  },
});
