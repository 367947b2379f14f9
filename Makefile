# make setup   an environment in .venv with the CPU engine, our packages and the test tools (two to six minutes, once)
# make demo    setup, then the comparison of the README (10 minutes); figures in $(JSON), picture in $(PLOT)
#              ARGS=--quick is a smoke run of two minutes
# make test    setup, then every test: those that start an engine too, and the agent frameworks'
# make frameworks  setup, then the tests of the agent frameworks, with the newest and oldest releases we support
# make fast    setup, then the tests that start no engine and are not slow (3 minutes)
# make nightly  setup, then what make test leaves out: tests marked nightly (those of coding agents need npm), the oldest
#              releases, packages, the site
# make packages  setup, then the wheel in a clean environment of each Python of this machine
# make site    setup, then the documents as a site in out/site
# make check   setup, then ruff, mypy and the checks of imports, file sizes and names (scripts/house.py)
#
# PYTHON=python3.12           another interpreter (3.11 or newer: the CPU engine needs it)
# EXTRAS=vllm,demo,dev        the CUDA engine in place of the CPU build
# PIP_EXTRA_INDEX_URL=URL     an index with CPU builds of PyTorch (default on Linux, if pip has no index set: PyTorch's own)
# INSTALLER=pip               without uv, which installs the same packages in less time; pip does too where uv fails
# TESTS="tests/launch -k x"   what test, fast and frameworks run
# WORKERS=4                   processes of make test and nightly (default: 4, and one for tox); a test file runs in one process
# JSON=f PLOT=f ARGS="..."    where the demo writes, and further options of sojourn demo

PYTHON ?= python3
EXTRAS ?= cpu,demo,dev,gateway,ray
TESTS ?=
WORKERS ?= 4
JSON ?= demo-out/demo.json
PLOT ?= demo-out/demo.png
ARGS ?=

BIN := .venv/bin

comma := ,
STAMP := .venv/.sojourn-$(subst $(comma),-,$(EXTRAS))

# Some machines set this variable; without byte code every engine process compiles its imports again.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.PHONY: setup demo test fast nightly frameworks packages site check clean
.DEFAULT_GOAL := setup

setup: $(STAMP)

$(STAMP): pyproject.toml scripts/setup.sh
	PYTHON="$(PYTHON)" EXTRAS="$(EXTRAS)" bash scripts/setup.sh
	@touch $@

demo: setup
	$(BIN)/sojourn demo --json "$(JSON)" --plot "$(PLOT)" $(ARGS)

# A process that dies ends the run, which then names its test: with a new process in its place, xdist may wait for ever.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0

# tox runs beside the tests, in one process: it takes the time in which they wait for engines and for each other.
# --notest comes first: what the network did to it, the run tries again and says why. Its output is shown at the
# end. The shell would have it ignore Ctrl-C.
TOX := $(BIN)/python -c "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from tox.run import run; run()"
TOX_LOG := .tox/make-test.log

# Tests import half of what is installed: Python compiles that when it is imported, and pip nothing.
test: export PIP_COMPILE := 0
test: setup
ifeq ($(TESTS),)
	@mkdir -p .tox
	@{ $(TOX) run --notest >/dev/null 2>&1; [ $$? -ge 128 ] || TOX_WORKERS=1 $(TOX) run >$(TOX_LOG) 2>&1; } & tox=$$!; \
	$(PYTEST); tests=$$?; wait $$tox; versions=$$?; cat $(TOX_LOG); exit $$((tests || versions))
else
	$(PYTEST) $(TESTS)
endif

frameworks: setup
	$(BIN)/tox run -e frameworks,frameworks-oldest -- $(or $(TESTS),tests/frameworks)

fast: setup
	$(PYTEST) -n 3 -m "not engine and not slow" $(TESTS)

nightly: setup
	$(PYTEST) -m nightly $(TESTS)
	$(TOX) run -e frameworks-oldest,crewai,crewai-oldest,vllm-0.31
	bash scripts/check_packages.sh
	$(BIN)/python scripts/site.py

packages: setup
	bash scripts/check_packages.sh

site: setup
	$(BIN)/python scripts/site.py

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python scripts/house.py

clean:
	rm -rf .venv .tox .mypy_cache .ruff_cache .pytest_cache
