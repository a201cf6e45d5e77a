# make demo, make test: the two commands. They use the active virtual or conda environment; with none they create
# .venv with --system-site-packages, so that a torch that is already installed is used and not downloaded again.

ifneq ($(and $(VIRTUAL_ENV),$(wildcard $(VIRTUAL_ENV)/bin/python)),)
ENV := $(VIRTUAL_ENV)
else ifneq ($(and $(CONDA_PREFIX),$(wildcard $(CONDA_PREFIX)/bin/python)),)
ENV := $(CONDA_PREFIX)
else
ENV := .venv
endif

PY := $(ENV)/bin/python
# One stamp per extra, inside the environment that it describes: another environment starts from its own.
STAMP := $(ENV)/.headrace-
PIP_INSTALL = $(PY) -m pip install --quiet --disable-pip-version-check -c $(STAMP)torch.txt
ARGS ?=

# The suites end with 3 when a measurement was not stable on this machine, which says nothing about the code.
# UNSTABLE_OK=1 (as in CI) reports that loudly and goes on; make itself would turn every failure into 2.
define MEASURED
@$(1); code=$$?; \
if [ $$code -eq 3 ]; then echo; echo "*** $@: NOT STABLE: the machine was too noisy to judge; this is not a pass ***"; echo; fi; \
if [ $$code -eq 3 ] && [ -n "$(UNSTABLE_OK)" ]; then exit 0; fi; exit $$code
endef

.PHONY: help demo test test-gpu test-loader check format faults faults-full advice cases test-programs bench-overhead clean

help:
	@echo "make demo             the main job on real photographs, before and after the advice (3 minutes at most)"
	@echo "make test             the tests (5 minutes at most on two cores)"
	@echo "make check            format, lint, layers, types, docs"
	@echo "make faults           scripts with one planted cause each, and the confusion matrix (faults-full: all start methods)"
	@echo "make advice           applies advised changes and compares the gain with the prediction"
	@echo "make cases            small programs with one expectation of a loader each, where a directory of them is there"
	@echo "make test-loader      headrace.Loader, which is not finished"
	@echo "make test-programs    other people's programs, unmodified"
	@echo "make test-gpu         the tests that need a GPU"
	@echo "make bench-overhead   what watching costs"

demo: $(STAMP)demo
	$(PY) -m headrace demo $(ARGS)

test: $(STAMP)test
	$(PY) -m pytest $(ARGS)

test-loader: $(STAMP)test
	$(PY) -m pytest -m loader tests/loader $(ARGS)

test-gpu: $(STAMP)test
	$(PY) -m pytest -m gpu $(ARGS)

check: $(STAMP)check $(STAMP)test
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

format: $(STAMP)check
	$(PY) -m ruff check --fix-only --quiet .
	$(PY) -m ruff format .

faults: $(STAMP)test
	$(call MEASURED,$(PY) tests/faults/run_faults.py $(ARGS))

faults-full: $(STAMP)test
	$(call MEASURED,$(PY) tests/faults/run_faults.py --start-method all $(ARGS))

advice: $(STAMP)test
	$(call MEASURED,$(PY) tests/faults/run_faults.py --advice $(ARGS))

# The directory is HEADRACE_CASES, or shared/cases beside the checkout; with neither, nothing is run.
cases: $(STAMP)test
	$(PY) tests/loader/run_cases.py $(ARGS)

test-programs: $(STAMP)test $(STAMP)programs
	$(PY) -m pytest -m programs -o faulthandler_timeout=300 tests/programs $(ARGS)

bench-overhead: $(STAMP)test
	$(call MEASURED,$(PY) benchmarks/overhead.py $(ARGS))

clean:
	rm -rf build dist site headrace-demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

# An extra is installed once per environment, and again when pyproject.toml has changed. Plain pip: what is satisfied
# already stays as it is. torch is held at the installed version, so that no extra can ever replace the user's.
$(STAMP)demo $(STAMP)test $(STAMP)check $(STAMP)programs: $(STAMP)%: pyproject.toml | $(STAMP)python
	@$(PY) -c "import importlib.metadata as m; print('torch==' + m.version('torch'))" > $(STAMP)torch.txt 2>/dev/null \
		|| : > $(STAMP)torch.txt
	@echo "installing headrace[$*] into $(ENV)"
	@$(PIP_INSTALL) -e '.[$*]'
	@touch $@

# Debian splits ensurepip from python3; a pip of the system serves the environment as well.
$(STAMP)python:
	@if [ ! -x $(PY) ]; then \
		echo "creating $(ENV)"; \
		python3 -m venv --system-site-packages $(ENV) >/dev/null 2>&1 \
			|| python3 -m venv --system-site-packages --without-pip --clear $(ENV) || exit 1; \
		$(PY) -m pip --version >/dev/null 2>&1 || { rm -rf $(ENV); \
			echo "python3 has no pip: install python3-pip or python3-venv (apt-get install python3-venv), then run make again"; \
			exit 1; }; \
	fi
	@$(PY) -m pip --version >/dev/null 2>&1 || { echo "no pip in $(ENV): add it (python -m ensurepip, or uv pip install pip)"; exit 1; }
	@touch $@
