// What every runner answers to, for Node; protocol.py has the words.
import { createInterface } from "node:readline";

const [action, dsn, text] = process.argv.slice(2);
export const options = JSON.parse(text);

const url = new URL(dsn.replace("@/", "@localhost/"));
export const postgres = {
  host: url.searchParams.get("host"),
  user: url.username,
  database: url.pathname.slice(1),
};

const now = () => Number(process.hrtime.bigint()) / 1e9;
const pause = (seconds) => new Promise((done) => setTimeout(done, Math.max(0, seconds * 1000)));
const range = (first, end) => Array.from({ length: end - first }, (_, k) => first + k);

// Resolves when the line is out: a process that ends earlier would cut a long one.
const say = (words) => new Promise((done) => process.stdout.write(JSON.stringify(words) + "\n", done));

class Recorder {
  numbers = [];
  times = [];

  hit(number) {
    this.times.push(now());
    this.numbers.push(number);
  }

  async waitForGo() {
    const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
    await say({ ready: true });
    await lines.next();
    let told = 0;
    setInterval(() => {
      if (this.numbers.length === told) return;
      told = this.numbers.length;
      say({ count: told, first: this.times[0] });
    }, 20);
    lines.next().then(async () => {
      await say({ numbers: [...this.numbers], times: this.times.slice(0, this.numbers.length) });
      process.exit(0);
    });
  }
}

async function enqueue(runner) {
  const { first, n, chunk } = options;
  const began = now();
  if (chunk === 1) for (const number of range(first, first + n)) await runner.add(number);
  else
    for (let start = first; start < first + n; start += chunk)
      await runner.addMany(range(start, Math.min(start + chunk, first + n)));
  await say({ seconds: now() - began });
}

async function pulse(runner) {
  const { n, every, per } = options;
  await runner.add(-1);
  const sent = [];
  const start = now();
  for (let tick = 0, number = 0; number < n; tick++, number += per) {
    await pause(start + tick * every - now());
    const numbers = range(number, Math.min(number + per, n));
    const before = now();
    await (per === 1 ? runner.add(number) : runner.addMany(numbers));
    for (const k of numbers) sent.push([k, before]);
  }
  await say({ sent, seconds: now() - start });
}

export const sleep = () => (options.sleep ? pause(options.sleep) : undefined);

export async function serve(runner) {
  await runner.open(action);
  if (action === "setup") await runner.setup();
  if (action === "enqueue") await enqueue(runner);
  if (action === "pulse") await pulse(runner);
  if (action === "work") return runner.work(new Recorder());
  process.exit(0);
}
