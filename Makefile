# Everything a developer needs; each target does its own set-up (see scripts/setup.sh).
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH):/usr/sbin:/sbin

# Modules that are pure: every branch of them is tested (comma-separated for coverage).
PURE := */model/*,*/run/ledger.py,*/run/owed.py,*/compile/*,*/modes/*/render*.py
PURE := $(PURE),*/proxy/budget.py
PURE := $(PURE),*/run/service_metrics.py
NFT := */modes/nftables
PURE := $(PURE),$(NFT)/derived.py,$(NFT)/layout.py,$(NFT)/rules.py,$(NFT)/skeleton.py,$(NFT)/text.py
PURE := $(PURE),$(NFT)/totals.py,$(NFT)/transaction.py,$(NFT)/wire.py
BPF := src/steersman/modes/ebpf/c/*.[ch]
IPVS := */modes/ipvs
PURE := $(PURE),*/netfilter/names.py,*/netfilter/rule_text.py,*/modes/iptables/names.py
PURE := $(PURE),*/modes/iptables/parse.py,*/modes/iptables/script.py
PURE := $(PURE),$(IPVS)/changes.py,$(IPVS)/names.py,$(IPVS)/parse.py,$(IPVS)/counters.py

.DEFAULT_GOAL := help
.PHONY: help setup check format test sim demo bench image lock clean

help: ## Say what there is
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: ## Packages, virtual environment, locked dependencies
	@scripts/setup.sh

check: setup ## Format, lint, types, shape and the tests that need no root
	ruff format --check
	ruff check
	mypy
	python scripts/shape.py
	@if command -v clang-format >/dev/null; then clang-format --dry-run --Werror $(BPF); \
		else echo "clang-format is not installed: the programs in C are not looked at"; fi
	pytest -q -m "not kernel"

format: setup ## Put the code in shape
	ruff format
	ruff check --fix
	@! command -v clang-format >/dev/null || clang-format -i $(BPF)

test: setup ## Every test, kernel tests as root, and full coverage of the pure modules
	pytest -q --cov --cov-report= --durations=10
	coverage report --include='$(PURE)' --fail-under=100 --skip-covered

sim: setup ## Simulated lives of nodes on all cores: SEEDS=n HOURS=h, see tests/sim
	@python -m tests.sim --seeds $(or $(SEEDS),1000) --hours $(or $(HOURS),4) --first $(or $(FIRST),0)

demo: setup ## A small cluster in network namespaces, explained as it runs (root)
	@python scripts/demo.py

bench: setup ## Figures beside iptables-restore of upstream-shaped rules (root); ONLY=name QUICK=1
	@python -m benchmarks

image: setup ## The container image, in the builder's storage and in build/image (root is best)
	@scripts/image.sh

lock: setup ## Resolve the dependencies anew
	python -m pip install --quiet pip-tools
	pip-compile --quiet --upgrade --generate-hashes --extra dev --strip-extras --allow-unsafe \
		--no-build-isolation --no-header --no-emit-index-url --no-emit-find-links \
		--no-emit-trusted-host --no-emit-options --output-file requirements.lock pyproject.toml

clean: ## Remove what was made here
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -prune -exec rm -rf {} +
