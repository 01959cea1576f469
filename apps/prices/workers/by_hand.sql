-- A worker in plain SQL, for psql: one price, read out of a printed guide, for the next coin in line.
--   psql "$DATABASE_URL" -v ON_ERROR_STOP=1 -v worker=clerk-1 -v price_cents=4250 -f by_hand.sql
select job.* from (select 1) one left join claim_next_pending_job(worker => :'worker') job on true \gset job_
\if :{?job_id}
  begin;
  insert into price_points (intake_id, source_id, dedupe_key, url, title, price_cents, price_type, observed_on,
                            match_strength)
  values (:'job_intake_id', :'job_source_id', 'ext_by-hand', 'about:guide', 'printed guide', :price_cents, 'bid',
          current_date, 1)
  on conflict (intake_id, source_id, dedupe_key) do update set price_cents = excluded.price_cents, updated_at = now()
  where excluded.match_strength > price_points.match_strength;
  select refresh_valuation(:'job_intake_id');
  -- False: the claim was lost in the meantime, and then nothing of this is to stand.
  select scrape_complete(:'job_id', :'job_locked_by', :'job_locked_at') as kept \gset
  \if :kept
    commit;
    \echo completed :job_id
  \else
    rollback;
    \echo lost :job_id
  \endif
\else
  \echo nothing to do
\endif
