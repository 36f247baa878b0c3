# Everything a checkout needs: each target makes the environment it wants in .venv first.

PYTHON ?= python3
VENV ?= .venv

RUNTIME := $(VENV)/.runtime
DEVELOPMENT := $(VENV)/.development
BENCH := $(VENV)/.bench
FUZZ := $(VENV)/.fuzz
SDKS := .venv-sdks/.installed
PACK := .venv-pack/.installed
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
ARCHITECTURE = $(shell uname -m)
RELEASE = receiver-$(VERSION)-linux-$(ARCHITECTURE)

.DEFAULT_GOAL := help
.PHONY: help demo run test lint check sdk-test proof fuzz bench binary release deb systemd-test front-test lowest lock clean

help:  ## what can be made (this list)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(RUNTIME)  ## play the whole story against a real server on a temporary database
	$(VENV)/bin/receiver demo

run: $(RUNTIME)  ## serve the development folder dev/, written first if it is missing
	test -e dev/receiver.toml || $(VENV)/bin/receiver init dev
	$(VENV)/bin/receiver serve --config dev/receiver.toml

test: $(DEVELOPMENT)  ## run the tests, four at a time (PYTEST_FLAGS: which)
	$(VENV)/bin/python -m pytest --numprocesses 4 $(PYTEST_FLAGS)

lint: $(DEVELOPMENT)  ## check format, style and types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

check: lint test  ## the one gate: lint, then the tests

sdk-test: $(SDKS)  ## check signatures against the senders' own libraries; needs Node 20 or newer
	.venv-sdks/bin/python -m pytest -W default tests/sdks

proof: $(DEVELOPMENT)  ## try to break the promise, for an hour (PROOF_FLAGS="--every 20 --kills 20": minutes)
	$(VENV)/bin/python -m tests.proof $(PROOF_FLAGS)

fuzz: $(FUZZ)  ## feed ten million hostile inputs, for an hour (FUZZ_FLAGS="--executions 20000": minutes)
	$(VENV)/bin/python -m tests.proof --only fuzz $(FUZZ_FLAGS)

bench: $(BENCH)  ## measure speed beside what else one would pick (BENCH_FLAGS=--quick: a minute)
	$(VENV)/bin/python -m tests.bench --results tests/bench/RESULTS.md $(BENCH_FLAGS)

binary: $(PACK)  ## make dist/receiver, the program and its Python in one file, and try it
	rm -f dist/receiver dist/receiver.sha256
	FORM=file $(PYINSTALLER) --distpath dist --workpath build/file .ci/pack/receiver.spec
	.ci/pack/smoke dist/receiver
	cd dist && sha256sum receiver >receiver.sha256

release: binary  ## make dist/receiver-VERSION-linux-MACHINE.tar.gz: the one file, units, examples
	rm -rf build/$(RELEASE)
	mkdir -p build/$(RELEASE)
	cp -a dist/receiver dist/LICENSES README.md CHANGELOG.md systemd/install systemd build/$(RELEASE)/
	rm -r build/$(RELEASE)/systemd/install build/$(RELEASE)/systemd/package
	tar -C build --owner=0 --group=0 -czf dist/$(RELEASE).tar.gz $(RELEASE)
	cd dist && sha256sum $(RELEASE).tar.gz >$(RELEASE).tar.gz.sha256

deb: $(PACK)  ## make dist/receiver_VERSION_MACHINE.deb, for Debian 12 or newer
	FORM=folder $(PYINSTALLER) --distpath build --workpath build/work-folder .ci/pack/receiver.spec
	.ci/pack/deb build/folder build/LICENSES $(VERSION)

systemd-test:  ## as root: try units, one file and package in real systemd, Debian 12 and 13
	tests/systemd/next
	tests/systemd/run release
	tests/systemd/run package

front-test:  ## try the example configurations with the machine's caddy and nginx
	tests/systemd/front

lowest:  ## run the tests with the oldest versions that pyproject.toml allows
	$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear .venv-lowest
	.venv-lowest/bin/python -m pip install $(PIP_FLAGS) uv
	VIRTUAL_ENV=.venv-lowest .venv-lowest/bin/uv pip install --quiet --resolution lowest-direct \
		--editable '.[test]'
	.venv-lowest/bin/python -m pytest

lock:  ## pin the newest versions of everything again, with their hashes
	$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear .venv-lock
	.venv-lock/bin/python -m pip install $(PIP_FLAGS) uv
	$(COMPILE) --extra dev --extra crypto --output-file .ci/development.lock
	$(COMPILE) --constraint .ci/development.lock --output-file .ci/runtime.lock
	$(COMPILE) --constraint .ci/development.lock --extra bench --output-file .ci/bench.lock
	$(COMPILE) --constraint .ci/development.lock --extra fuzz --output-file .ci/fuzz.lock
	$(COMPILE) --constraint .ci/development.lock --extra pack --output-file .ci/pack.lock
	$(COMPILE) --constraint .ci/development.lock --extra sdks --output-file .ci/sdks.lock
	npm update --prefix tests/sdks --package-lock-only --save

clean:  ## remove the environments and caches; dev/ stays
	rm -rf .venv .venv-* tests/sdks/node_modules build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find cli.py receiver store tests -name __pycache__ -prune -exec rm -rf {} +

# One lock holds for every Python and platform. Neither an index nor a note of where a pin came
# from is written into it.
COMPILE = .venv-lock/bin/uv pip compile pyproject.toml --group build --upgrade --universal \
	--python-version 3.11 --generate-hashes --no-annotate --no-emit-index-url --quiet \
	--custom-compile-command "make lock"

PIP_FLAGS := --quiet --disable-pip-version-check --no-input

# The lock names every package, setuptools too, so the project itself brings nothing in.
INSTALL_SELF = $(VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation --editable .

# Read by whatever Python is found, so written to run on a very old one as well.
define PYTHON_CHECK
import sys
version = "%d.%d" % sys.version_info[:2]
if sys.version_info < (3, 11):
    sys.exit("$(PYTHON) is Python " + version + "; Receiver needs 3.11 or newer: install one"
             " (Debian 12: apt-get install python3.11-venv) and run make with PYTHON=python3.11")
try:
    from ensurepip import bootstrap
    import venv
except ImportError:
    sys.exit("$(PYTHON) can't make an environment, its venv or ensurepip is missing: install it"
             " (Debian, Ubuntu: apt-get install python" + version + "-venv)")
endef
export PYTHON_CHECK

define CHECK_PYTHON
@$(PYTHON) -c '' 2>/dev/null || { echo "$(PYTHON) is missing or does not run: install Python 3.11" \
	"or newer (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
@$(PYTHON) -c "$$PYTHON_CHECK"
endef

# The environment is made afresh when the pins change, so that no package stays from earlier ones.
$(RUNTIME): pyproject.toml .ci/runtime.lock
	$(CHECK_PYTHON)
	@echo "setting up $(VENV), once: it takes a minute or more"
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --require-hashes --requirement .ci/runtime.lock
	$(INSTALL_SELF)
	@touch $@

$(BENCH): $(RUNTIME) .ci/bench.lock
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --require-hashes --requirement .ci/bench.lock
	@touch $@

$(FUZZ): $(DEVELOPMENT) .ci/fuzz.lock
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --require-hashes --requirement .ci/fuzz.lock
	@touch $@

$(DEVELOPMENT): $(RUNTIME) .ci/development.lock
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) --require-hashes --requirement .ci/development.lock
	@touch $@

PYINSTALLER = PYTHONPATH=. .venv-pack/bin/pyinstaller --noconfirm --log-level WARN

$(PACK): pyproject.toml .ci/pack.lock
	$(CHECK_PYTHON)
	$(PYTHON) -m venv --clear .venv-pack
	.venv-pack/bin/python -m pip install $(PIP_FLAGS) --require-hashes --requirement .ci/pack.lock
	@touch $@

# The libraries warn of their own affairs, so warnings are no errors there. A Node that is too old is
# refused by npm (engine-strict). Of the libraries' thousands of files few are imported, so they are not
# compiled beforehand.
$(SDKS): pyproject.toml .ci/sdks.lock tests/sdks/package-lock.json
	$(CHECK_PYTHON)
	@command -v npm >/dev/null || { echo "npm is missing: install Node 20 or newer" \
		"(Debian, Ubuntu: apt-get install nodejs npm)" >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv-sdks
	.venv-sdks/bin/python -m pip install $(PIP_FLAGS) --no-compile --require-hashes \
		--requirement .ci/sdks.lock
	.venv-sdks/bin/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation --editable .
	npm ci --prefix tests/sdks --loglevel=error
	@touch $@
