# `make demo` and `make test` need Python 3.11 or newer, a C++ compiler and, the first time, the network.
.POSIX:
.SUFFIXES:
.PHONY: help venv demo test lint bench clean

BIN = .venv/bin
export PYTHON

help:
	@echo 'make demo    install, start the daemon, ask the model a question over its Unix socket'
	@echo 'make test    install, check style and types, run all tests'
	@echo 'make lint    style, types and import order only'
	@echo 'make bench   measure the default model on this machine'
	@echo 'make venv    install into .venv only (compiles llama.cpp once, some minutes)'
	@echo 'make clean   remove .venv and caches; models and the compiled wheel stay'

venv:
	@sh tools/python.sh -m tools.install

demo: venv
	@$(BIN)/python -m tools.demo

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/edge_rt models pull
	$(BIN)/python -m pytest

bench: venv
	$(BIN)/edge_rt bench

clean:
	rm -rf .venv build dist edge_rt.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
