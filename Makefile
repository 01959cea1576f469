# Two commands matter: `make demo` and `make test`. Both set up everything they need.
APPS := analysis enrichment prices registre
.PHONY: demo test check bench bench-quick bench-enrichment chaos chaos-quick fleet format browser node ocr $(APPS)
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

$(STAMP): pyproject.toml
	@echo 'Setting up $(VENV) (once, a minute or two) ...'
	@test -x $(PY) || python3 -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[embedded,web,sentry,otel,prometheus]' \
		--group dev --group apps
	@touch $@

demo: $(STAMP)
	@$(VENV)/bin/rowmill demo

# The applications, each with its stand-ins for the world outside: apps/*/README.md.
$(APPS): $(STAMP)
	@$(PY) -m apps.$@ $(ARGS)

registre: browser

ocr: $(STAMP)
	@$(PY) -m apps.ocr show $(ARGS)

test: check browser node
	$(PY) -m pytest -n 2 --dist worksteal

check: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# The browser of the tests: the system's Chromium, put there where this user may.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || \
		{ apt-get update --quiet --quiet && apt-get install --quiet --quiet --yes --no-install-recommends chromium fonts-dejavu-core; } || \
		{ echo 'No Chromium, and it could not be installed. Try: sudo apt-get install chromium'; exit 1; }

# The database driver of the worker in Node; where there is no Node, or no registry, its test is left out, and says so.
node:
	@test -d apps/prices/workers/node_modules/pg || ! command -v npm >/dev/null || \
		npm --prefix apps/prices/workers install --no-audit --no-fund --no-package-lock --loglevel=error || \
		echo 'The worker in Node is not tested: its driver could not be installed. Try: make node'

format: $(STAMP)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# rowmill beside its peers; bench/README.md. ARGS="--parts growth" and the like choose.
bench: $(STAMP)
	$(PY) -m bench $(ARGS)

bench-quick: $(STAMP)
	$(PY) -m bench --quick $(ARGS)

# 5,000 bookmarks over 300 hosts: the time it took, beside the least that limits and latencies allow.
bench-enrichment: $(STAMP)
	@$(PY) -m bench.enrichment

# Faults injected under load, every row accounted for; chaos/README.md. The long form writes docs/chaos.md.
chaos: $(STAMP)
	$(PY) -m chaos $(ARGS)

chaos-quick: $(STAMP)
	$(PY) -m chaos --quick $(ARGS)

# Five hosts in network namespaces, 50 processes, and what they cost a database when idle.
fleet: $(STAMP)
	$(PY) -m chaos --only-fleet $(ARGS)
