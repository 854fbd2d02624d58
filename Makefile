# Everything a developer needs; each target does its own set-up (see scripts/setup.sh).
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH):/usr/sbin:/sbin

# Tests run in so many processes: those with packets and programs wait two thirds of their time.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 4 ? cores * 3 : cores < 12 ? 12 : cores)))
# The tests of a module in one process and in our order, the longest modules first.
TOGETHER := --dist loadscope --no-loadscope-reorder

SOURCES_IN_C := src/steersman/modes/ebpf/c/*.[ch] src/steersman/host/*.[ch] src/steersman/source/*.c

.DEFAULT_GOAL := help
.PHONY: help setup check format test test-windows properties sim docs reference demo demo-ui screenshots bench image deb notice release krew lock clean

help: ## Say what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## Packages, virtual environment, locked dependencies
	@scripts/setup.sh

check: setup ## Format, lint, types and the tests that need no root
	ruff format --check
	ruff check
	mypy
	@if command -v clang-format >/dev/null; then clang-format --dry-run --Werror $(SOURCES_IN_C); \
		else echo "clang-format is not installed: the programs in C are not looked at"; fi
	pytest -q -m "not kernel"

format: setup ## Put the code in shape
	ruff format
	ruff check --fix
	@! command -v clang-format >/dev/null || clang-format -i $(SOURCES_IN_C)

# Else each process of pytest compiles all tests anew: most of a minute for four of them.
test: export PYTHONDONTWRITEBYTECODE =
test: ## Tests, as root with packets, and coverage; FULL=1 all of them, WORKERS=n processes, STRICT=1 none twice
	@scripts/setup.sh $(if $(FULL),all-tests,tests)
	@python -m compileall -q -j 0 src tests # for the many programs that tests start, also in the machine
	@pytest -q --collect-only >/dev/null || true # compiled once; what is wrong is said below
	@rm -f .pytest_cache/v/cache/lastfailed
	pytest -q --part=$(if $(FULL),full,quick) -n $(WORKERS) $(TOGETHER) --cov --cov-report= --durations=10 \
		--junitxml=build/tests.xml; python scripts/rerun.py $$?
	coverage report --include="$$(python scripts/pure.py)" --fail-under=100 --skip-covered

test-windows: setup ## The winuserspace mode on Windows' Python, which Wine runs (root; amd64)
	@scripts/setup.sh windows
	@python scripts/windows.py
	pytest -q tests/windows

properties: export EXAMPLES := $(or $(EXAMPLES),1000)
properties: setup ## The property tests with new examples, which `make test` has not: EXAMPLES=n
	@scripts/setup.sh tests
	pytest -q -n $(WORKERS) -m "hypothesis and not kernel"

sim: setup ## Simulated lives of nodes on all cores: SEEDS=n HOURS=h, see tests/sim
	@python -m tests.sim --seeds $(or $(SEEDS),1000) --hours $(or $(HOURS),4) --first $(or $(FIRST),0)

docs: setup ## The documentation site, in build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 mkdocs build

soak: setup ## Churn, faults and traffic in every mode, side by side: HOURS=h, see tests/soak (root)
	@python -m tests.soak --hours $(or $(HOURS),3)

reference: setup ## Draw the pictures of the docs that are made of the code and of docs/figures.json
	@python scripts/ways.py
	@python -m benchmarks.draw

demo: setup ## A small cluster in network namespaces, explained as it runs (root)
	@python scripts/demo.py

demo-ui: setup ## The same cluster with traffic, on pages in a browser, until Ctrl-C (root)
	@python scripts/demo_ui.py

screenshots: setup ## Pictures of the pages of demo-ui, for docs/images (root)
	@scripts/setup.sh all-tests
	@python scripts/screenshots.py

bench: setup ## Figures beside iptables-restore of upstream-shaped rules (root); ONLY=name QUICK=1
	@python -m benchmarks

image: setup ## The container image in build/image; ARCHS="amd64 arm64" BUILDER=docker (root is best)
	@scripts/image.sh

deb: setup ## The Debian package in build/deb; ARCH=arm64
	@scripts/deb.sh

notice: setup ## Collect the licences of what is shipped into NOTICE
	@python scripts/notice.py

release: setup ## Every artefact with checksums, in build/release: VERSION=n URL=where they will be
	@scripts/setup.sh all-tests
	@python scripts/release.py $(VERSION) --url "$(URL)"

krew: setup ## The kubectl plugin's archive and manifest for krew; URL= of the archive
	@python scripts/krew.py $(URL)

lock: setup ## Resolve the dependencies again
	python -m pip install --quiet pip-tools
	pip-compile --quiet --upgrade --generate-hashes --extra dev --extra docs --extra otel --strip-extras --allow-unsafe \
		--no-build-isolation --no-header --no-emit-index-url --no-emit-find-links \
		--no-emit-trusted-host --no-emit-options --output-file requirements.lock pyproject.toml

clean: ## Remove what was made here
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -prune -exec rm -rf {} +
