# Each command does its own set-up in .venv; a second run installs nothing.
#   make demo                      train a small model with covgrpo on the CPU
#   make demo ARGS="--compare"     the options of `verl-covgrpo demo`
#   make test                      linter, type checker and all tests
#   make test ARGS="-k covgrpo"    the options of pytest
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test setup

setup:
	@$(PYTHON) bootstrap.py

demo: setup
	@$(BIN)/verl-covgrpo demo $(ARGS)

test: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest $(ARGS)
