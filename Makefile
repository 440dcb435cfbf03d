# Every target sets up what it needs: a virtual environment in .venv, torch, this package with its extras.
#
#   make quickstart                       train a model with memory and one without, and write runs/quickstart/report.html
#   make test                             ruff, mypy and the fast tests
#   make test-all                         the same with the slow tests
#   make gpu                              everything that needs a GPU, in under four minutes; ARGS=--rehearsal without one
#   make lint | setup | clean
#
#   TORCH=torch==2.13.0     any pip requirement; remembered in .venv, so later calls need not repeat it
#   PYTHON=python3.12       the interpreter that makes .venv (3.10 to 3.13)
#   ARGS="-k hashing"       more arguments for pytest, or for `engram quickstart`

PYTHON ?= python3
BIN := .venv/bin
WANTED := $(if $(TORCH),$(TORCH),$(shell cat .venv/torch-choice 2>/dev/null || echo torch))
# One stamp per content of pyproject.toml, torch choice and place (scripts in .venv hold absolute paths).
STAMP := .venv/ready-$(shell { cat pyproject.toml; echo "$(WANTED)"; pwd -P; } | cksum | tr -d ' ')
ifneq ($(origin PYTHON),file)
CHOSEN := $(PYTHON)
endif

# Kernels in Triton's interpreter: a process of its own, because the interpreter is chosen when kernels are imported.
# Status 5 is pytest's "nothing was selected", which ARGS="-k ..." for the other tests brings about here.
KERNEL_TESTS = echo "== pytest, kernels in the interpreter"; kernels() { TRITON_INTERPRET=1 $(BIN)/pytest tests/triton "$$@" || [ $$? -eq 5 ]; }; kernels

.PHONY: quickstart test test-all gpu lint setup clean

quickstart: $(STAMP)
	@echo "== engram quickstart"
	@$(BIN)/engram quickstart $(ARGS)

test: lint
	@echo "== pytest, without the slow tests"
	@$(BIN)/pytest -m "not slow" --ignore=tests/triton $(ARGS)
	@$(KERNEL_TESTS) -m "not slow" $(ARGS)

test-all: lint
	@echo "== pytest, all tests"
	@$(BIN)/pytest --ignore=tests/triton $(ARGS)
	@$(KERNEL_TESTS) $(ARGS)

# No set-up: on a machine with a GPU the packages that are there are used.
gpu:
	@tests/gpu/run.sh $(ARGS)

lint: $(STAMP)
	@echo "== ruff"
	@$(BIN)/ruff check .
	@echo "== mypy"
	@$(BIN)/mypy engram

setup: $(STAMP)

# Runs under a lock on this Makefile (released when the shell ends, however it ends), so two calls at once set up once.
# The stamp is written last: an interrupted set-up is taken up again by the next call.
$(STAMP):
	@set -eu; \
	command -v "$(PYTHON)" >/dev/null || { echo "no interpreter '$(PYTHON)': choose one with PYTHON=..." >&2; exit 1; }; \
	exec 9>>Makefile; "$(PYTHON)" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'; \
	if [ -e "$@" ]; then exit 0; fi; \
	wanted_python=; if [ -n "$(CHOSEN)" ]; then wanted_python=`"$(CHOSEN)" -c 'import sys; print("%d.%d" % sys.version_info[:2])'`; fi; \
	found_python=`$(BIN)/python -c 'import sys, pip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null` || found_python=; \
	if [ -z "$$found_python" ] || ! grep -qsF "`pwd -P`/.venv/" $(BIN)/pip \
	   || [ "$${wanted_python:-$$found_python}" != "$$found_python" ]; then \
	  echo "== set-up 1/3: .venv with `"$(PYTHON)" --version`"; \
	  "$(PYTHON)" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
	    || { echo "Python 3.10 to 3.13 is needed: choose one with PYTHON=..." >&2; exit 1; }; \
	  "$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null \
	    || { echo "$(PYTHON) cannot make virtual environments (no venv or ensurepip). On Debian and Ubuntu:" \
	      "sudo apt install python3-venv. Or choose another interpreter with PYTHON=..." >&2; exit 1; }; \
	  "$(PYTHON)" -m venv --clear .venv; \
	else \
	  echo "== set-up 1/3: .venv is there (Python $$found_python)"; \
	fi; \
	rm -f .venv/ready-*; \
	pip="$(BIN)/python -m pip install --disable-pip-version-check"; \
	echo "== set-up 2/3: $(WANTED)"; \
	$$pip "setuptools>=77.0.3" wheel "$(WANTED)"; \
	$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > .venv/torch-installed; \
	echo "== set-up 3/3: engram-lab and its dependencies (`cat .venv/torch-installed` stays)"; \
	$$pip --no-build-isolation --constraint .venv/torch-installed --editable ".[dev]"; \
	printf '%s\n' "$(WANTED)" > .venv/torch-choice; \
	touch "$@"; \
	echo "== set-up done"

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "runs/ is left as it is: it holds results"
