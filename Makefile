# `make help` lists the tasks. Needs Python >= 3.11 (with venv and pip), make and git; nothing else.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
FUZZER := $(VENV)/.fuzzer
MUTATOR := .cache/cosmic-ray
CLASSES := .cache/spark-classes.jsa
BYTECODE := .cache/bytecode
NATIVE := $(VENV)/.native
JVM    := packages/rmqkit-spark/jvm
JAR    := packages/rmqkit-spark/src/rmqkit/spark/rmqkit-spark.jar
CRATE := packages/rmqkit-native
CARGO_PATH := $(PATH):$(HOME)/.cargo/bin
UV     := requirements/uv.sh $(VENV)
PACKAGES := rmqkit rmqkit-store rmqkit-server rmqkit-tools rmqkit-spark rmqkit-contrib
LOCKS  := requirements/run.txt requirements/spark.txt requirements/otel.txt requirements/grpc.txt requirements/connect.txt requirements/console.txt requirements/lake.txt requirements/report.txt requirements/query.txt requirements/examples.txt requirements/dev.txt requirements/docs.txt requirements/frameworks.txt
ARGS   ?=
JOBS   ?= $(shell [ "$$(getconf _NPROCESSORS_ONLN)" -gt 1 ] && echo 3 || echo 1)
SECONDS ?= 600

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help env check test interop ci test-unit demo docs fuzz lock clean

TASKS = env fast check test interop docs demo dist
LIST = awk -F':.*\#\# ' '/^[a-z-]+:.*\#\# / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

help: ## list the tasks of everyday
	@$(LIST) | grep -E "^  make ($$(echo $(TASKS) | tr ' ' '|')) "
	@echo '  make help-all     all tasks: measurements, kills, soaks, fuzzing, mutations'

.PHONY: help-all
help-all: ## list all tasks
	@$(LIST)
	@echo '  PYTHON=python3.12 chooses the interpreter of a new environment; ARGS="-k name" goes to pytest and the demo; tests run in three processes where there are two cores (one often waits), JOBS=1 runs them in one.'

env: $(STAMP) $(NATIVE) $(JAR) ## make .venv with everything that the tasks below need
	@echo "env: $(VENV) is up to date ($$($(BIN)/python --version))"

check: $(STAMP) ## format, lint, types, import contracts
	@echo "check: format"
	@$(BIN)/ruff format --check --quiet . || { echo "check: run '$(BIN)/ruff format .'"; exit 1; }
	@echo "check: lint"
	@$(BIN)/ruff check --quiet .
	@echo "check: types"
	@$(BIN)/mypy --no-error-summary
	@echo "check: import contracts"
	@rm -rf .cache/joined && mkdir -p .cache/joined && cp -r packages/*/src/rmqkit .cache/joined && rm .cache/joined/rmqkit/__init__.pyi
	@PYTHONPATH=.cache/joined $(BIN)/lint-imports --no-cache > $(VENV)/lint-imports.log 2>&1 || { cat $(VENV)/lint-imports.log; exit 1; }

.PHONY: ready measure-history
ready: $(STAMP)
	@$(MAKE) -j2 check $(FUZZER) $(CLASSES) $(NATIVE) $(JAR) $(BYTECODE)

PROCESSES = $(if $(filter-out 1,$(JOBS)),-n $(JOBS))
MORE_PROCESSES = $(if $(filter-out 1,$(JOBS)),-n $$(($(JOBS) + 1)))
SHORT = --ignore=tests/interop --hypothesis-profile=short -m
PYTEST = PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX=$(CURDIR)/$(BYTECODE) $(BIN)/python -m pytest

test: ready ## check, then the tests that need Python alone, and Java for Spark: 6 minutes on two cores
	@echo "test: pytest"
	@$(PYTEST) $(PROCESSES) $(SHORT) "not slow" $(ARGS)

.PHONY: fast coverage mutants
fast: $(STAMP) ## for the edit loop: tests of the client, the protocol and the store, without servers and Spark; a minute
	@$(PYTEST) -q $(PROCESSES) --hypothesis-profile=short -m "not slow and not faults and not integration and not spark" packages/rmqkit packages/rmqkit-store $(ARGS)

coverage: ready ## the tests of `make test` with the lines and branches that they run, for each package; 15 minutes
	@$(PYTEST) -q $(PROCESSES) $(SHORT) "not slow" --cov --cov-report=json:.cache/coverage/report.json --cov-report= $(ARGS)
	@$(BIN)/python -m tests.coverage_table .cache/coverage/report.json

mutants: $(MUTATOR) ## change the code of ten rooms, one place at a time, and count what their tests notice: a night; ARGS="--rooms pop,delay --most 50 --seed 7"
	@$(BIN)/python -m tests.mutants --bin $(MUTATOR)/bin $(ARGS)

.PHONY: slow
slow: $(STAMP) ## the tests that `make test` leaves out: programs of ours under load and kills, clusters of Spark and its commands, pages of the documents, the examples, the built site, the benches
	@$(PYTEST) $(PROCESSES) --ignore=tests/interop -m slow $(ARGS)

interop: $(STAMP) ## the tests beside Apache's brokers and clients, Go, Node and C++; skipped, with the reason, where these are missing; APACHE=5.4.0 takes another version
	@$(if $(APACHE),RMQKIT_APACHE=$(APACHE)) $(PYTEST) tests/interop $(ARGS)

PLAIN = $(addprefix packages/rmqkit-server/tests/broker/,send transaction) $(addprefix packages/rmqkit/tests/,protocol remoting)

# What the compiled core does is tested without it, too: all of it by `make test-plain`, here where most of it is used.
# Then one run for both, with a process more: while the tests of other programs wait, the others compute.
ci: ready
	@echo "ci: on plain Python"
	@RMQKIT_NATIVE=0 $(PYTEST) -q $(PROCESSES) -m "not slow" $(PLAIN)
	@$(PYTEST) $(MORE_PROCESSES) --second-try $(ARGS)

.PHONY: test-plain
test-plain: ready ## the tests of `make test`, but those of Spark, on plain Python in place of the compiled core
	@RMQKIT_NATIVE=0 $(PYTEST) $(PROCESSES) $(SHORT) "not slow and not spark" $(ARGS)

test-unit: $(STAMP) ## those of the tests of `make test` that need only Python
	@$(PYTEST) $(SHORT) "not slow and not spark" $(ARGS)

.PHONY: texts
texts: $(STAMP) ## update the catalogues of the web console (rmqkit/console/html/locale) from the marked texts
	@$(BIN)/python -m tests.console.catalogues

.PHONY: screenshots
measure-history: $(STAMP) ## 90 simulated days of the web console's history at full size (ARGS="DAYS SERIES CHANGING"): bytes, memory, times
	@$(BIN)/python -m tests.console.measure_history $(ARGS)

screenshots: $(STAMP) ## pictures of every page of the web console, light and dark, wide and narrow, in .cache/screenshots (needs chromium-headless-shell)
	@$(BIN)/python -m tests.console.screenshots .cache/screenshots $(ARGS)

.PHONY: examples
examples: $(STAMP) ## twenty times the examples of each property, new ones in each run, and faults by new seeds: an hour; ARGS="packages/rmqkit-store" for a package
	@$(PYTEST) --hypothesis-profile=long -m "(hypothesis or faults) and not spark" --ignore=tests/interop --timeout=3600 $(ARGS)

.PHONY: planted
planted: $(STAMP) ## plant faults one by one, and search for each with simulated clusters: at most two minutes of CPU for each; ARGS="timer POP" for some
	@$(BIN)/python -W ignore -m tests.simulation.planted $(ARGS)

.PHONY: loop-held
loop-held: $(STAMP) ## every request and every periodic round at its bounds: how long each holds a server's event loop; ARGS="--codes 34,41"
	@$(BIN)/python -m tests.rounds_held
	@$(BIN)/python -m tests.loop_held $(ARGS)
	@GRPC_VERBOSITY=ERROR $(BIN)/python -m tests.grpc_loop_held

.PHONY: house
house: $(STAMP) ## files, lines, comments, asserts and import circles of every room in src
	@$(BIN)/python -m tests.tree.house $(ARGS)

.PHONY: again
again: ready ## `make test` ten times beside two processes that only compute, 2 hours; ARGS="--runs 3"
	@$(BIN)/python -m tests.tree.again $(ARGS)

.PHONY: kill soak bench
kill soak bench: $(STAMP)
	@$(BIN)/python -m tests.long $@ $(T) $(ARGS)

kill: ## programs under kills, faults and damage; T=ha runs one, and without T this lists them; ARGS="--seed 7" repeats
soak: ## clients under load for long: nothing lost, nothing grows; T=grpc runs one
bench: ## measurements, many beside Apache's programs; T=pop runs one

.PHONY: simulate
simulate: $(STAMP) $(NATIVE) ## clusters in one process each, one for a seed, under random faults, SECONDS=600 long; a seed that fails is shrunk and printed; ARGS="--seed 17 --story" repeats one
	@$(BIN)/python -m tests.simulation --seconds $(SECONDS) $(ARGS)

.PHONY: traces
traces: $(STAMP) ## the same simulated seeds on every CPython here; ARGS="--count 100 --busy 4"
	@$(BIN)/python -m tests.simulation.interpreters $(ARGS)

demo: $(STAMP) ## servers up, messages through, Spark jobs over the store
	@$(BIN)/python examples/demo.py $(ARGS)

.PHONY: dist
dist: $(STAMP) $(NATIVE) $(JAR) ## sdist and wheels in dist/, used in empty environments of every CPython here; ARGS="--only 3.12"
	@$(BIN)/python -m tests.release.dist $(ARGS)

docs: $(STAMP) ## write the pages that come out of the code, and build the site: site/index.html
	@$(BIN)/python docs/generate.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "docs: site/index.html"

fuzz: $(FUZZER) ## look for bytes that break a decoder, SECONDS=600 long
	@$(BIN)/python -m tests.fuzz.fuzz_decoders --seconds $(SECONDS)

lock: $(STAMP) ## compile requirements/*.in to exact versions with hashes
	@for name in uv run client spark otel grpc connect console lake report query dev docs examples frameworks fuzz peers choosers sdk native release mutants; do \
	  echo "lock: requirements/$$name.txt"; \
	  (cd requirements && ./uv.sh ../$(VENV) pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-header --no-emit-index-url --no-emit-find-links $(if $(UPGRADE),--upgrade) $$name.in -o $$name.txt) || exit 1; \
	done

clean: ## remove the environment and every cache
	@echo "clean: removing $(VENV) and caches"
	@rm -rf $(VENV) .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	@find packages tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): $(PACKAGES:%=packages/%/pyproject.toml) requirements/uv.txt $(LOCKS)
	@command -v $(PYTHON) >/dev/null || { echo "env: $(PYTHON) not found; rmqkit needs Python >= 3.11: make env PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "env: $(PYTHON) is Python %d.%d; rmqkit needs >= 3.11: make env PYTHON=python3.11" % v[:2])'
	@[ -x $(BIN)/python ] || { echo "env: creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@[ -x $(BIN)/uv ] || { echo "env: installing uv"; $(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt; }
	@echo "env: installing packages (1.6 GB with Spark, the first time takes a minute)"
	@$(UV) pip sync --quiet --python $(BIN)/python --require-hashes $(LOCKS)
	@echo "env: installing rmqkit itself, editable"
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation $(addprefix --editable packages/,$(PACKAGES))
	@touch $@

# Without a compiler, or its packages, everything is computed in Python; a core that does not compile is a fault.
$(NATIVE): $(STAMP) requirements/native.txt $(wildcard $(CRATE)/src/*.rs) $(CRATE)/Cargo.toml $(CRATE)/Cargo.lock $(CRATE)/pyproject.toml
	@if ! PATH="$(CARGO_PATH)" command -v cargo >/dev/null; then \
	  echo "env: no cargo, so there is no native core: rmqkit computes everything in Python"; \
	elif ! PATH="$(CARGO_PATH)" cargo fetch --quiet --locked --manifest-path $(CRATE)/Cargo.toml 2> $(VENV)/cargo.log; then \
	  echo "env: cargo finds no packages ($(VENV)/cargo.log), so there is no native core: rmqkit computes everything in Python"; \
	else echo "env: compiling the native core"; rm -rf .cache/native && \
	  $(UV) pip install --quiet --python $(BIN)/python --only-binary :all: --require-hashes -r requirements/native.txt && \
	  { PATH="$(CARGO_PATH)" $(BIN)/maturin build --release --locked -m $(CRATE)/Cargo.toml -i $(BIN)/python -o .cache/native \
    > $(VENV)/cargo.log 2>&1 || { cat $(VENV)/cargo.log; exit 1; }; } && \
	  $(UV) pip install --quiet --python $(BIN)/python --no-deps --force-reinstall .cache/native/*.whl && touch $@; fi

$(JAR): $(STAMP) $(JVM)/build.py $(wildcard $(JVM)/rmqkit/*/*.java)
	@$(BIN)/python $(JVM)/build.py

$(CLASSES): $(STAMP) $(JAR) packages/rmqkit-spark/tests/spark/classes.py
	@rm -f $@
	@$(BIN)/python -m tests.spark.classes
	@test ! -e $@ || touch -c $@

# Without this each process of the first run compiles all tests: 20 s of CPU. A test that is broken fails in the run.
$(BYTECODE): | $(STAMP)
	@$(PYTEST) --collect-only -qq > /dev/null 2>&1 || true

# Not every machine has a wheel of the fuzzer: its tests are skipped there, with the reason.
$(FUZZER): $(STAMP) requirements/fuzz.txt
	@echo "env: installing the fuzzer"
	@$(UV) pip install --quiet --python $(BIN)/python --only-binary :all: --require-hashes -r requirements/fuzz.txt \
	  && touch $@ || echo "env: there is no fuzzer for this Python"

$(MUTATOR): $(STAMP) requirements/mutants.txt
	@echo "env: installing cosmic-ray"
	@rm -rf $@ && $(BIN)/python -m venv $@ && $(UV) pip install --quiet --python $@/bin/python --require-hashes -r requirements/mutants.txt
