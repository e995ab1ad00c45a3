# make run    set up, then: data → a few minutes of training → perplexity, text, attention picture
# make test   set up, then: style, types, fast tests      make test-all   the slow tests too
# make docs   draw the diagrams again from the code, build the site in site/
# make fuzz   try anything at all on what reads input, for MINUTES=30
# make bench  measure a training step, and say what the recorded curves say; NANOGPT=DIR beside nanoGPT
# make lab    set up, then open the notebooks in Jupyter
# make clean  take .venv and every cache away
# Each sets up what it needs in .venv by itself and does so again when the requirements change.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Tests and runs take WikiText-2 from here where it is; otherwise from data/, the cache or the hub.
ifneq ($(wildcard ../shared/wikitext-2/wiki.train.tokens),)
export MINIGPT_DATA ?= $(abspath ../shared)
endif

.PHONY: run test test-all lint docs fuzz bench lab clean
.DELETE_ON_ERROR:

run: .venv/run.stamp
	$(BIN)/minigpt quickstart

test: lint
	$(BIN)/python -m pytest -m "not slow" --numprocesses auto --dist worksteal --durations=10

# One after the other: some of them measure time.
test-all: test
	$(BIN)/python -m pytest -m slow --durations=25

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/dev.stamp
	$(BIN)/python tools/diagrams.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir site

MINUTES ?= 30
fuzz: .venv/dev.stamp
	$(BIN)/python -W error tools/fuzz.py --minutes $(MINUTES)

# Minutes; the long ones (curves, pace, vocabularies) are named in CONTRIBUTING.md.
BENCH_PRESET ?= wikitext2-10min
bench: .venv/dev.stamp
	$(BIN)/python benchmarks/step.py $(BENCH_PRESET) $(if $(NANOGPT),--nanogpt $(NANOGPT))
	$(if $(PYTORCH_EXAMPLES),$(BIN)/python benchmarks/quality.py pace lstm --batches 100 --pytorch-examples $(PYTORCH_EXAMPLES) --out build/bench)
	$(if $(wildcard docs/results/quality/*.json),$(BIN)/python benchmarks/quality.py report)

lab: .venv/lab.stamp
	$(BIN)/jupyter lab notebooks

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'error: $(PYTHON) is too old: install Python 3.11 or newer, or name one: make PYTHON=python3.12 …' >&2; exit 2; }
	$(PYTHON) -m venv .venv

.venv/run.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

.venv/dev.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ .venv/run.stamp

.venv/lab.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[lab]'
	@touch $@ .venv/run.stamp

clean:
	rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
