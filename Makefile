# make demo | test | check | lint | clean        another interpreter: make PYTHON=python3.12 test
# Both set-ups are the plain commands below; a stamp in .venv saves repeating them.

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13; do \
	$$python -c '$(NEW_ENOUGH)' 2>/dev/null && echo $$python && break; done)
VENV := .venv
# pip shows its progress to people; a log gets what fails.
QUIET := $(shell test -t 2 || echo --quiet)
BIN := $(VENV)/bin
# A file in one process. Tests with ranks of their own wait most of their time, the others compute.
BESIDE := --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -n
RANKS := -m 'multirank and not alone' -o cache_dir=.pytest_cache/ranks tests/multirank \
	$(shell grep -rl --include='*.py' 'mark[.]multirank' tests | grep -v -e '^tests/clients' -e '^tests/multirank')
OTHERS := -m 'not multirank and not alone'
# A failure beside others may be theirs: what fails runs once more with nothing beside it, and the second
# answer counts. A crash (the status is not 1) gets none.
again = $(1) -n 0 --exitfirst --last-failed --last-failed-no-failures=none
twice = $(1) || { test $$? = 1 && $(call again,$(1)); }
once_more = case $$(cat $(VENV)/.$(1).status) in 0) ;; 1) $(call again,$(2));; *) false;; esac || \
	touch $(VENV)/.failed
# Two at a time, and nothing beside them: they, too, wait most of their time. The longest begin.
ALONE := $(patsubst %,tests/multirank/test_%.py,faults recorded_bring_up ends counts) \
	$(shell grep -rl --include='*.py' 'mark[.]alone' tests)
CORE := ppstream/native/core.abi3.so
# Tests of what the compiled core does, which run once more with its Python twins.
TWINS := tests/ingest tests/pipeline/test_decode.py tests/pipeline/test_stage_c.py
PAGES := $(wildcard *.md runbooks/*.* runbooks/pictures/*)
SOURCES := $(shell find ppstream kernels stages -name '*.py')

PYTEST := $(BIN)/python -m pytest
# Without bytecode each process of a test compiles its share of 800 files, those of tests twice.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-ranks test-others test-clients check check-docs check-gate check-native lint format docs mutants clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo    balance the embedded cart-pole through two ranks, then print the report'
	@echo 'make test    lint, types, floors, and the tests of the code'
	@echo 'make test-clients  the gateway with clients that others publish, and policies of LeRobot and ONNX'
	@echo 'make check-docs  the documentation site, run-books, pictures, dashboard, alerts and the rules of the source'
	@echo 'make check-gate  real runs that only seem to overlap: gate and report refuse them'
	@echo 'make check-native  the compiled core and its Python twins, with two sanitizers'
	@echo 'make check   everything that must hold: make test and the four above'
	@echo 'make lint    ruff, mypy and import floors alone'
	@echo 'make format  let ruff format the source'
	@echo 'make docs    the documentation as a site in build/docs, with the API reference; a warning is an error'
	@echo 'make mutants the share of a fixed sample of faults that the tests see; half an hour'
	@echo 'make clean   remove .venv, caches and builds; run logs stay'

demo: $(VENV)/.demo
	$(BIN)/ppstream run

test: $(CORE)
	@$(MAKE) --keep-going --jobs=2 --output-sync=target lint $(VENV)/.bytecode
	$(call twice,$(PYTEST) -m alone $(BESIDE) 2 $(ALONE)) || failed=1; \
	rm -f $(VENV)/.failed; test -z "$$failed" || touch $(VENV)/.failed
	@FORK_SERVER_OF=$$$$ $(MAKE) --jobs=2 test-ranks test-others
	@cat $(VENV)/.ranks.log
	@$(call once_more,ranks,$(PYTEST) $(RANKS)); $(call once_more,others,$(PYTEST) $(OTHERS)); \
	test ! -e $(VENV)/.failed

# Both at once: these wait while those compute. How each ended is for the rule above.
test-ranks:
	@$(PYTEST) $(RANKS) $(BESIDE) 3 >$(VENV)/.ranks.log 2>&1; echo $$? >$(VENV)/.ranks.status

test-others:
	@$(PYTEST) $(OTHERS) $(BESIDE) 4; echo $$? >$(VENV)/.others.status

test-clients: $(VENV)/.dev
	$(call twice,$(PYTEST) --dist loadfile tests/clients -n 2)

check-docs: $(VENV)/.dev
	$(PYTEST) --dist loadfile tests/docs -n 2

check-gate: $(VENV)/.dev
	$(PYTEST) -m 'not alone' tests/gate

check-native: $(VENV)/.dev
	$(BIN)/python tools/dev/check_core.py
	$(call twice,PPSTREAM_NATIVE=0 $(PYTEST) -m 'not alone' $(BESIDE) 2 $(TWINS))

# What keeps no time goes side by side, the longest first: it waits for much. The tests come last, also
# when something before them fails.
check: $(VENV)/.dev
	$(MAKE) --keep-going --jobs=2 --output-sync=target test-clients check-docs check-native || failed=1; \
	$(MAKE) --keep-going --jobs=1 check-gate test && test -z "$$failed"

# The installation made it already; again when the source is newer.
$(CORE): $(wildcard ppstream/native/*.[ch]) tools/dev/build_core.py | $(VENV)/.dev
	$(BIN)/python tools/dev/build_core.py

# The bytecode of tests, once: else every worker of the first run makes it anew.
$(VENV)/.bytecode: | $(VENV)/.dev
	@$(PYTEST) --collect-only -qq >/dev/null && touch $@

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: build/docs/index.html

build/docs/index.html: tools/dev/make_docs.py tools/dev/conf.py $(PAGES) $(SOURCES) | $(VENV)/.dev
	$(BIN)/python tools/dev/make_docs.py build/docs

mutants: $(VENV)/.dev
	$(BIN)/python tools/dev/mutants.py

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.%: pyproject.toml constraints.txt
	@$(or $(PYTHON),false) -c '$(NEW_ENOUGH)' || \
		{ echo 'ppstream needs Python 3.11 or newer here: make PYTHON=python3.12 ...' >&2; exit 1; }
	@echo 'installing into $(VENV): the first time downloads about 1 GB' >&2
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(QUIET) -c constraints.txt -e '.[$*]'
	@touch $@
