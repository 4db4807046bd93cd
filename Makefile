PYTHON ?= python3
VENV := .venv
JOBS ?= 2
STAMP := $(VENV)/.installed

.PHONY: setup quickstart test clean

setup: $(STAMP)

$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make setup: needs Python 3.11 or 3.12; write: make setup PYTHON=python3.12" >&2; exit 1; }
	@command -v cc >/dev/null || { \
	  echo "make setup: no C compiler (cc) found; reasoning-gym builds pycosat from source:" \
	  "install gcc or clang first (Debian, Ubuntu: apt-get install build-essential)" >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -e .
	@touch $@

quickstart: setup
	@$(VENV)/bin/python -m experiments.quickstart

test: setup
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
