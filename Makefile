# make run     sets everything up and trains a small model in real sandboxes while faults are injected
# make test    sets everything up, also what only tests need, checks style and types, runs all tests
# make setup   only sets up: all that a program of your own needs
# make setup-podman   what the second sandbox runtime needs, for those who must use it
# make docs    the documentation as a site, in build/site
# make bench   the worker and the environment recovery benchmarks, quick form

SHELL := /bin/bash
BIN := .venv/bin
ROOT := $(if $(filter 0,$(shell id -u)),,sudo -E)

.PHONY: run test setup setup-podman lint docs bench doctor clean

run: setup
	$(ROOT) $(BIN)/belayer train examples/shell_grpo.toml --inject --reference

test: setup
	@scripts/setup_tests.sh
	$(ROOT) $(BIN)/python scripts/run_tests.py

setup:
	@scripts/setup.sh

setup-podman: setup
	@scripts/setup_podman.sh

lint: setup
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m pyright --pythonpath $(BIN)/python

docs: setup
	@scripts/build_docs.sh

bench: setup
	$(ROOT) $(BIN)/belayer bench worker --quick --json build/bench-worker.json
	$(ROOT) $(BIN)/belayer bench env --quick --json build/bench-env.json

doctor: setup
	$(ROOT) $(BIN)/belayer doctor

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist
