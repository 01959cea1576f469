// A worker in Node, beside the Python ones on the same rows: it asks price guides that answer in JSON. Rates, breakers,
// leases and outcomes are the lane's own, through its database functions.
//
//   DATABASE_URL=... WORKER_ID=node-1 node worker.mjs [--drain]

import pg from 'pg'

const worker = process.env.WORKER_ID ?? `node-${process.pid}-${Date.now()}`
const drain = process.argv.includes('--drain')
const heartbeat = 1000 * Number(process.env.HEARTBEAT_SECONDS ?? 20)
const idle = 1000 * Number(process.env.POLL_SECONDS ?? 5)
const pool = new pg.Pool({ connectionString: process.env.DATABASE_URL, max: 2 })

class Refusal extends Error {}

/** What the guide has under the coin's name, as price points. */
async function collect(source, coin) {
  if (source.kind !== 'api') throw new TypeError(`no adapter for a source of kind ${source.kind}`)
  const asked = new URLSearchParams({ q: coin.title })
  const answer = await fetch(`${source.base_url}/v1/prices?${asked}`, { redirect: 'error', signal: AbortSignal.timeout(15_000) })
  if (!answer.ok) {
    const refusal = new Refusal(`HTTP ${answer.status}`)
    refusal.retryAfter = answer.headers.get('retry-after')
    refusal.permanent = [400, 401, 403, 404, 410].includes(answer.status)
    throw refusal
  }
  const { items } = await answer.json()
  return items
    .filter((item) => item.id != null && item.title.includes(coin.title))
    .map((item) => ({
      dedupe_key: `ext_${item.id}`, external_id: String(item.id), url: item.url, title: item.title,
      price_cents: Math.round(Number(item.price) * 100), price_type: item.type, condition: item.grade ?? 'unknown',
      observed_on: item.date, match_strength: 1,
    }))
}

const UPSERT = `
insert into price_points (intake_id, source_id, dedupe_key, external_id, url, title, price_cents, price_type, condition,
                          observed_on, match_strength)
select distinct on (dedupe_key) i.id, s.id, p.* from coin_intakes i, sources s, jsonb_to_recordset($3::jsonb) as
  p(dedupe_key text, external_id text, url text, title text, price_cents bigint, price_type text, condition text,
    observed_on date, match_strength real)
where i.id = $1 and s.id = $2
order by dedupe_key
on conflict (intake_id, source_id, dedupe_key) do update set
  url = excluded.url, title = excluded.title, price_cents = excluded.price_cents, price_type = excluded.price_type,
  condition = excluded.condition, observed_on = excluded.observed_on, match_strength = excluded.match_strength,
  updated_at = now()
where excluded.match_strength > price_points.match_strength`

/** Points, valuation and outcome commit together, or, where the claim is lost, not at all. */
async function finish(job, held, points) {
  const client = await pool.connect()
  try {
    await client.query('begin')
    await client.query(UPSERT, [job.intake_id, job.source_id, JSON.stringify(points)])
    await client.query('select refresh_valuation($1)', [job.intake_id])
    const { rows } = await client.query('select scrape_complete($1, $2, $3) as kept', held)
    await client.query(rows[0].kept ? 'commit' : 'rollback')
    if (!rows[0].kept) console.error(`job ${job.id}: the claim was lost, nothing was written`)
  } catch (error) {
    await client.query('rollback').catch(() => {})
    throw error
  } finally {
    client.release()
  }
}

async function work(job) {
  const held = [job.id, job.locked_by, job.locked_at]
  const beat = setInterval(() => pool.query('select scrape_heartbeat($1, $2, $3)', held).catch(console.error), heartbeat)
  try {
    const { rows: [source] } = await pool.query('select kind, base_url from sources where id = $1', [job.source_id])
    const { rows: [intake] } = await pool.query('select title from coin_intakes where id = $1', [job.intake_id])
    const title = job.query_params?.title || intake?.title  // what the job lacks, the intake has
    if (!title) throw new TypeError('neither query_params nor the row of coin_intakes has a title')
    await finish(job, held, await collect(source, { title }))
  } catch (error) {
    const seconds = /^\d+$/.test(error.retryAfter ?? '') ? `${Math.min(Number(error.retryAfter), 86_400)} seconds` : null
    const permanent = error instanceof TypeError ? !error.cause : Boolean(error.permanent)  // a lost connection has a cause
    await pool.query(
      'select scrape_fail(id => $1, worker => $2, claimed_at => $3, error => $4, permanent => $5, retry_after => $6)',
      [...held, `${error.name}: ${error.message}`, permanent, seconds],
    )
  } finally {
    clearInterval(beat)
  }
}

const LEFT = "select exists (select 1 from scrape_jobs where status not in ('succeeded', 'failed')) as any"

let stopping = false
process.on('SIGTERM', () => { stopping = true })

while (!stopping) {
  const { rows } = await pool.query('select * from claim_next_pending_job(worker => $1)', [worker])
  if (rows.length) await work(rows[0])
  else if (drain && !(await pool.query(LEFT)).rows[0].any) break
  else await new Promise((resolve) => setTimeout(resolve, idle))
}
await pool.end()
