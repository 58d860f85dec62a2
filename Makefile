# `make demo` and `make test` do everything on a fresh machine with Python 3.11 or later, git and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PREFIX ?= $(HOME)/.local
SHARE = $(DESTDIR)$(PREFIX)/share
READY := $(VENV)/.ready
# Processes that run tests; each loads models of its own, up to 3 GB. One thread in each: two cores have no room for more.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=20

.PHONY: setup demo test test-fast test-slow lint bench shell install-shell clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "amem needs Python 3.11 or later; say which one with: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cpu,demo,dev]'
	@touch $@

demo: $(READY)
	$(BIN)/amem demo

# the linters, and every test that does not take minutes
test: $(READY) lint
	$(PYTEST) -m 'not slow'

# while you work: the store, the engine on tiny models, the commands in this process
test-fast: $(READY)
	$(PYTEST) -m 'not slow and not long'

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks

# man pages and completions anew, from the commands and tools/pages
shell: $(READY)
	$(BIN)/python -m tools

# man pages and completions for bash, zsh and fish; zsh looks for _amem in the folders of its fpath
install-shell:
	install -d $(SHARE)/man/man1 $(SHARE)/bash-completion/completions $(SHARE)/zsh/site-functions
	install -d $(SHARE)/fish/vendor_completions.d
	install -m 644 man/*.1 $(SHARE)/man/man1
	install -m 644 completions/amem.bash $(SHARE)/bash-completion/completions/amem
	install -m 644 completions/_amem $(SHARE)/zsh/site-functions/_amem
	install -m 644 completions/amem.fish $(SHARE)/fish/vendor_completions.d/amem.fish

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
