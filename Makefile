# Needs python3 (3.11 or newer), make and git. `make help` lists the targets.
PYTHON ?= python3
PY := .venv/bin/python
STAMP := .venv/.complete

.DEFAULT_GOAL := help
.PHONY: help setup demo test oldest docs notebooks lint types house mutants check full format build notes clean affected durations release-check changelog gpu gpu-kit

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# uv does not read pip's configuration, so an index, a certificate or a folder of wheels set there is handed over.
HAND_OVER = setting() { $(PY) -m pip config get ":env:.$$1" 2>/dev/null || $(PY) -m pip config get "global.$$1" 2>/dev/null || true; }; \
	hand_over() { value=$$(setting "$$2" | tr -s ' \n' "$$3"); value=$${value%"$$3"}; \
	  if [ -n "$$value" ] && [ -z "$$(printenv "$$1")" ]; then export "$$1=$$value"; fi; }; \
	hand_over UV_DEFAULT_INDEX index-url ' '; \
	hand_over UV_INDEX extra-index-url ' '; \
	hand_over UV_FIND_LINKS find-links ','; \
	hand_over SSL_CERT_FILE cert ' '; \
	if [ -n "$$UV_INDEX" ]; then export UV_INDEX_STRATEGY="$${UV_INDEX_STRATEGY:-unsafe-best-match}"; fi

setup: $(STAMP) ## Create .venv with the pinned packages and flowrl itself

$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "flowrl needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make setup PYTHON=python3.12"; \
	  exit 1; }
	@echo "setup: creating .venv"
	@rm -f $(STAMP)
	@$(PYTHON) -m venv .venv
	@$(PY) -m pip install --quiet --disable-pip-version-check 'uv>=0.5'
	@echo "setup: installing requirements.lock (the first time this downloads several GB)"
	@$(HAND_OVER); \
	.venv/bin/uv pip install --quiet --compile-bytecode --python $(PY) -r requirements.lock && \
	.venv/bin/uv pip install --quiet --python $(PY) --no-deps --no-build-isolation -e .
	@touch $(STAMP)
	@echo "setup: done; the command is .venv/bin/flowrl"

demo: $(STAMP) ## Train the embedded model with its embedded reward (minutes on a CPU)
	@.venv/bin/flowrl train
	@echo "report: $$(ls -td runs/*/report.html | head -n 1)"

# What the tests read without importing torch; `make lint` runs it.
READ := tests/test_layers.py tests/test_house.py tests/test_config_comments.py
# Bytecode is kept, whatever the environment says: else each worker and each process that a test starts compiles everything.
TESTS := PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -q -n auto --dist loadfile --no-loadscope-reorder $(addprefix --ignore=,$(READ))

test: $(STAMP) ## Run the tests but the slow ones and what lint runs
	@$(TESTS) -m 'not slow' --representatives

affected: $(STAMP) ## Run the tests that a change can reach, a minute of the nearest: ARGS="BASE --seconds 120 --list"
	@PYTHONDONTWRITEBYTECODE= $(PY) tests/affected.py $(ARGS)

durations: $(STAMP) ## Say where the time of the tests goes; ARGS=--record measures it again
	@PYTHONDONTWRITEBYTECODE= $(PY) tests/tell_durations.py $(ARGS)

oldest: $(STAMP) ## Test the lowest versions that pyproject.toml allows, a file a family; PYTHON=python3.12 for another
	@rm -rf .venv-oldest
	@$(PYTHON) -m venv --without-pip .venv-oldest
	@$(HAND_OVER); \
	.venv/bin/uv pip compile --quiet --no-header --python .venv-oldest/bin/python --extra dev --resolution lowest-direct pyproject.toml \
	  -o .venv-oldest/requirements.txt && \
	.venv/bin/uv pip install --quiet --compile-bytecode --python .venv-oldest/bin/python -r .venv-oldest/requirements.txt && \
	.venv/bin/uv pip install --quiet --python .venv-oldest/bin/python --no-deps --no-build-isolation -e .
	@.venv-oldest/bin/python tests/trials/oldest_versions.py $(ARGS)

DOCS := .venv/.docs

docs: $(DOCS) ## Build the documentation site and check its links (build/docs/html/index.html)
	@$(PY) docs/site/build_site.py $(ARGS)

# Apart from the lock: who trains does not need it. Versions that the lock has stay as they are.
$(DOCS): $(STAMP)
	@echo "docs: installing Sphinx and its theme into .venv"
	@$(HAND_OVER); \
	.venv/bin/uv pip install --quiet --python $(PY) -c requirements.lock --no-build-isolation -e '.[docs]'
	@touch $(DOCS)

NOTEBOOKS := .venv/.notebooks

notebooks: $(NOTEBOOKS) ## Run the notebooks of docs/notebooks from top to bottom (minutes on a CPU)
	@$(PY) docs/notebooks/run_notebooks.py $(ARGS)

$(NOTEBOOKS): $(STAMP)
	@echo "notebooks: installing a kernel and what runs it into .venv"
	@$(HAND_OVER); \
	.venv/bin/uv pip install --quiet --python $(PY) -c requirements.lock --no-build-isolation -e '.[notebooks]'
	@touch $(NOTEBOOKS)

lint: $(STAMP) ## Check style, formatting, and what tests read of the house without importing torch
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/python -m pytest -q --noconftest $(READ)

types: $(STAMP) ## Check types
	@.venv/bin/mypy

house: $(STAMP) ## Count lines, circles, complexity and what else the house is measured by
	@$(PY) tests/house.py $(ARGS)

mutants: $(STAMP) ## Break the product in 100 places, one after another, and count what the tests see (an hour)
	@$(PY) tests/trials/mutants/mutants.py $(ARGS)

gpu: $(STAMP) ## Accept a machine with an NVIDIA card, ten minutes at most (docs/gpu.md); without one in a CPU form
	@PYTHONDONTWRITEBYTECODE= $(PY) tests/gpu/gpu_suite.py $(ARGS)

gpu-kit: $(STAMP) ## Pack repository and wheels for a card without network, below 64 MiB: build/gpu-kit.tar
	@$(PY) tests/gpu/gpu_suite.py --kit $(ARGS)

check: lint types test ## What every change has to pass; minutes

full: lint types ## What has to pass before others get it: make check and the slow tests
	@$(TESTS)

format: $(STAMP) ## Sort imports and format
	@.venv/bin/ruff check --fix --quiet .
	@.venv/bin/ruff format .

build: $(STAMP) ## Make the source archive, and from it the wheel, in dist/; print their sizes
	@rm -rf build dist
	@.venv/bin/uv build --quiet --no-build-isolation --python $(PY) --out-dir dist
	@rm -f dist/.gitignore
	@ls -l dist | awk 'NR > 1 {printf "dist/%s  %.1f MB\n", $$NF, $$5 / 1e6}'

RELEASE := .venv/.release

release-check: $(RELEASE) ## Do all that a release has to pass, and say what could not be done here (up to an hour)
	@$(HAND_OVER); \
	$(PY) tests/trials/release/release_check.py $(ARGS)

# Apart from the lock, as for the documentation: what looks at archives and licences.
$(RELEASE): $(STAMP)
	@echo "release-check: installing what checks archives and lists licences into .venv"
	@$(HAND_OVER); \
	.venv/bin/uv pip install --quiet --python $(PY) -c requirements.lock --no-build-isolation -e '.[release]'
	@touch $(RELEASE)

changelog: ## Make what CHANGELOG.md has under Unreleased the section of a version: make changelog VERSION=0.1.0
	@echo '$(VERSION)' | grep -qE '^[0-9]+\.[0-9]+\.[0-9]+[a-z0-9]*$$' || { echo "write make changelog VERSION=1.2.3" >&2; exit 1; }
	@! grep -qF '## [$(VERSION)]' CHANGELOG.md || { echo "CHANGELOG.md has a section '## [$(VERSION)]'" >&2; exit 1; }
	@awk -v head="## [$(VERSION)] - $$(date -u +%F)" '{print} $$0 == "## [Unreleased]" {print ""; print head}' CHANGELOG.md \
	  > CHANGELOG.new && mv CHANGELOG.new CHANGELOG.md

notes: ## Print what CHANGELOG.md says of a version: make notes VERSION=0.1.0
	@awk -v head='## [$(VERSION)]' 'index($$0, "## [") == 1 {on = index($$0, head) == 1} on {print; some = 1} END {exit !some}' \
	  CHANGELOG.md || { echo "CHANGELOG.md has no section '## [$(VERSION)]'" >&2; exit 1; }

clean: ## Remove caches and build leftovers; .venv and runs stay
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
	@find . -path './.venv*' -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
