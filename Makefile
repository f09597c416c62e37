# make run      train the default model here (first: a virtual environment with what eke itself needs)
# make setup    the rest: every optional library, what tests and checks need, and editors' JSON schemas
# make demo     a sweep of 24 small runs here, some minutes on two cores, and its report
# make test     what changed code must pass: all but the slow ones, two processes, no GPU
# make test-all all of it but what needs a GPU      make test-gpu   only that
#                                  (EKE_GPU_TESTS_ON=cpu make test-gpu: what of it a CPU can, small)
# make test-random  random configurations, and what refuses them    make test-pairs  every pair of options
# make test-fuzz  damaged files, commands and records of runs, hundreds of each
# make test-hydra   the composition tests with the newest release or candidate of Hydra 1.4
# make test-faults  plants wrong expressions in a copy of the source, and expects tests to see each
# make bench    what a GPU is to measure, at small size: some minutes on two cores
# make check    style, types, layers, spelling, docs    make format   fix the style
# make docs     the documentation as a site, in site/
# make dist     wheel and source distribution, in dist/
# make pages    rewrite the generated pages of docs/ and notes/; some minutes
# make clean    remove the environment and caches; runs/ is kept
#
# PYTHON=python3.12 make run       another interpreter
# ARGS="optimizer=adafactor" make run
# TORCH_INDEX=https://download.pytorch.org/whl/cpu make run
#                                  PyTorch's CPU build: a tenth of the download, no GPU. It counts at
#                                  the first installation; run `make clean` before changing it.

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
TEST_PROCESSES ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CORE := $(VENV)/.core-installed
STAMP := $(VENV)/.installed
SHELL := /bin/bash

.DEFAULT_GOAL := help
.PHONY: help run demo setup operators test test-all test-again test-random test-fuzz test-pairs test-hydra test-faults test-gpu bench check docs dist pages format clean
.PHONY: check-style check-format check-types check-layers check-spelling check-yaml check-words

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

run: $(CORE)
	$(BIN)/python train.py $(ARGS)

# One row diverges on purpose, so that the sweep ends with 1: a run failed. Anything else is an error.
# The newest sweep of that name is this one, whichever folder its identity has given it.
demo: $(CORE)
	@code=0; $(BIN)/python train.py -m sweep=demo $(ARGS) || code=$$?; [ $$code -le 1 ] || exit $$code; \
	  file=$$(ls -t runs/sweep-*/sweep.json | xargs grep -ls '"name": "demo"' | head -n 1); \
	  echo; $(BIN)/eke report "$$(dirname "$$file")"

setup: $(STAMP)
	$(BIN)/eke schema .schemas > /dev/null

# A stamp is written last: what was interrupted is done again. Only torch comes from TORCH_INDEX,
# and without its dependencies: such an index holds few versions of them, not the ones pinned here.
$(CORE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "eke needs Python 3.11 or newer and '$(PYTHON)' is not: PYTHON=python3.12 make $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments: sudo apt install python3-venv (or name another: PYTHON=python3.12 make $(MAKECMDGOALS))" >&2; exit 1; }
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(if $(TORCH_INDEX),$(PIP) install --no-deps --index-url $(TORCH_INDEX) -c constraints.txt torch)
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(STAMP): $(CORE)
	$(PIP) install -c constraints.txt -e ".[test,check]"
	@hooks=$$(git rev-parse --git-path hooks 2>/dev/null) && mkdir -p "$$hooks" && \
	  { [ -e "$$hooks/commit-msg" ] || cp tools/commit-msg "$$hooks/"; } || true
	@touch $@

test: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -m "not slow and not gpu"

# DeepSpeed compiles C++ for minutes at its first use: before the tests, and not inside one of them.
# tests/one_unit has a compiler that takes a third of the time.
operators: $(STAMP)
	PATH="$(CURDIR)/tests/one_unit:$$PATH" $(BIN)/python -m eke.training.distributed.build_operators

test-all: operators
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist worksteal -m "not gpu"

# What failed in the last run, one after the other.
test-again: $(STAMP)
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none -m "not gpu"

# Random configurations, with the share that each rule refuses: RANDOM_COUNT=2000 make test-random
RANDOM_COUNT ?= 200
RANDOM_SEED ?= 4
test-random: $(STAMP)
	EKE_RANDOM=$(RANDOM_COUNT) EKE_RANDOM_SEED=$(RANDOM_SEED) $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) -m "" tests/e2e/test_random_configurations.py -k every_configuration

# Damaged files, commands and records, as many of each kind: FUZZ_COUNT=2000 FUZZ_SEED=5 make test-fuzz
FUZZ_COUNT ?= 500
FUZZ_SEED ?= 1
test-fuzz: $(STAMP)
	EKE_FUZZ=$(FUZZ_COUNT) EKE_FUZZ_SEED=$(FUZZ_SEED) $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) -m "" tests/fuzz

# Every pair of options of two groups, in as few configurations as a greedy choice finds; up to two hours.
test-pairs: $(STAMP)
	EKE_PAIRS=10000 EKE_RANDOM_SEED=$(RANDOM_SEED) $(BIN)/python -m pytest -q -s -m "" tests/e2e/test_option_pairs.py -k every_pair

# Hydra 1.4 and its omegaconf in a folder of their own, before the pinned ones on the path.
HYDRA := $(CURDIR)/$(VENV)/.hydra-1.4
test-hydra: $(STAMP)
	@rm -rf $(HYDRA); if $(PIP) install --quiet --pre --target $(HYDRA) 'hydra-core>=1.4.0.dev0,<1.5'; then \
	  ls -d $(HYDRA)/*.dist-info; \
	  PYTHONPATH=$(HYDRA):$(CURDIR)/src $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) -m "not slow" \
	    tests/unit/config tests/conf/test_conf_errors.py tests/e2e/test_hydra_questions.py; \
	else echo "NOT TESTED: no release or candidate of Hydra 1.4 could be installed"; fi

# Of some: FAULTS="file_not_synced lock_is_shared" make test-faults
FAULTS ?=
test-faults: $(STAMP)
	$(BIN)/python tests/mutants.py check $(FAULTS)

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu tests/gpu

# What a GPU is to measure, rehearsed at small size; on a GPU: BENCH_SIZE=full make bench
BENCH_SIZE ?= small
BENCH_OUT ?= $(or $(TMPDIR),/tmp)/eke-bench
bench: $(STAMP)
	$(BIN)/python benchmarks/on_gpu.py --size $(BENCH_SIZE) --out $(BENCH_OUT)

# All of them, also after one has failed: one look shows everything.
check: $(STAMP)
	@$(MAKE) --no-print-directory --keep-going \
	  check-style check-format check-types check-layers check-spelling check-yaml check-words docs

check-style: $(STAMP)
	$(BIN)/ruff check

check-format: $(STAMP)
	$(BIN)/ruff format --check

check-types: $(STAMP)
	$(BIN)/mypy

check-layers: $(STAMP)
	$(BIN)/lint-imports

check-spelling: $(STAMP)
	$(BIN)/codespell

check-yaml: $(STAMP)
	$(BIN)/yamllint --strict .

# Plain English, few public names: limits per 1,000 words and per 1,000 lines, in percent for docstrings
# and commits. `tools/words.py --hits KIND` and `--list MEASURE` show the places.
SINCE := b636b273
WORDS := docs=8 docs.phrases=4 help=8 help.phrases=4 docstrings=10 docstrings.phrases=5 messages=10 \
  messages.phrases=4 strings=10 strings.phrases=5 tests=20 public_per_1000=40 shared=25 \
  verb_docstrings=65 clause_docstrings=2
COMMITS := commits=3 commits.phrases=2 commit_long=5 commit_two_things=2
check-words: $(STAMP)
	@if git cat-file -e $(SINCE) 2>/dev/null; then \
	  $(BIN)/python tools/words.py --since $(SINCE) --fail-over $(WORDS) $(COMMITS); \
	else echo "commits: not checked, $(SINCE) is not in this clone"; \
	  $(BIN)/python tools/words.py --fail-over $(WORDS); fi
	$(BIN)/python tools/wording.py --fail-over 12
	tools/commit-msg --since $(SINCE)

# Warnings are errors: a page without a place in the navigation, a link or an anchor that leads nowhere.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# In an environment for itself: needs neither torch nor the other packages of eke.
DIST := $(VENV)/.dist
dist:
	@[ -x $(DIST)/bin/twine ] || { $(PYTHON) -m venv --clear $(DIST) && \
	  $(DIST)/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt build twine hatchling; }
	rm -rf dist
	$(DIST)/bin/python -m build --no-isolation --outdir dist .
	$(DIST)/bin/twine check --strict dist/*

# The pages that tests compare with schema, conf/, plans, rules and the records in results/.
pages: $(STAMP)
	EKE_UPDATE=1 $(BIN)/python -m pytest -q -m "" tests/conf/test_reference.py tests/conf/test_readme.py \
	  tests/conf/test_benchmarks_page.py tests/conf/test_accuracy.py tests/conf/test_claims.py \
	  -k "up_to_date or rewritten or match_records"

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage*
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
