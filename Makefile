# make train   set up, then run the main job: a small Llama on this machine
# make test    set up, then lint and run all tests
# make quick   set up, then lint and run the tests nearest to what changed: two minutes, before a commit
# make prove-all   the long proofs: all layouts, all resumes, all killed sessions, faults of a cluster; writes docs/evidence/, goes on where it stopped
# make cluster-packages   Slurm, Open MPI and shellcheck, which some tests need; `make test` does it where it may
# make browser   a headless Chromium, which the tests of reports need; `make test` does it where it may
# make docs    build the documentation site, serve it and say where; PORT=8001 chooses another port
# make site    only build it, into build/site
# make times   all tests, and how long each of their files takes: tests/times.json
# make pictures   draws the pictures of README and docs/report.md again
# make setup   only the environment, in .venv; TORCH=cpu|cuda|rocm chooses the PyTorch build

SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH ?= $(shell if command -v nvidia-smi >/dev/null; then echo cuda; \
	elif [ -e /dev/kfd ] || command -v rocm-smi >/dev/null; then echo rocm; else echo cpu; fi)
ROCM ?= 7.2
BIN := .venv/bin
CLUSTER_PACKAGES := slurm-wlm munge openmpi-bin shellcheck

# The default build on the package index is CUDA's, gigabytes of it; the others have indices of their
# own. The CPU build's dependencies are all on the package index, so only torch itself is asked there.
WHEELS := https://download.pytorch.org/whl
TORCH_FROM_cpu := --no-deps --retries 1 --extra-index-url $(WHEELS)/cpu
TORCH_FROM_cuda :=
TORCH_FROM_rocm := --index-url $(WHEELS)/rocm$(ROCM)

.PHONY: setup train test quick times lint cluster-packages browser docs site prove-all pictures clean

setup: .venv/ready-$(TORCH)

.venv/ready-$(TORCH): Makefile pyproject.toml constraints.txt
	@[ -n "$(PYTHON)" ] || { echo "Overland needs Python 3.11 or newer, and none is on the PATH."; exit 2; }
	@case "$(TORCH)" in cpu|cuda|rocm) ;; *) echo "TORCH=$(TORCH): expected cpu, cuda or rocm."; exit 2;; esac
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt $(TORCH_FROM_$(TORCH)) torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[text,data,cluster,hub]'
	@rm -f .venv/ready-* && touch $@

.venv/ready-dev: .venv/ready-$(TORCH)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@[ $(TORCH) != cpu ] || $(BIN)/pip install --quiet --constraint constraints.txt triton || \
		echo "Triton, which runs the GPU's kernels in the tests, could not be installed: they are left out."
	@touch $@

train: setup
	$(BIN)/overland train quickstart

lint: .venv/ready-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Where they cannot be installed, the tests that need them say so and are left out; for root and in CI
# they fail instead (tests/cluster/packages.py).
cluster-packages: PATH := $(PATH):/usr/sbin
cluster-packages:
	@for name in slurmctld slurmd munged srun mpirun shellcheck; do \
		command -v $$name >/dev/null || missing=1; done; [ -n "$$missing" ] || exit 0; \
	if ! command -v apt-get >/dev/null; then echo "No apt-get here: install Slurm, munge, Open MPI and shellcheck to run the tests of clusters."; exit 0; fi; \
	if [ $$(id -u) = 0 ]; then as=; elif sudo -n true 2>/dev/null; then as="sudo -n"; \
	else echo "Not root: sudo apt-get install $(CLUSTER_PACKAGES), to run the tests of clusters."; exit 0; fi; \
	echo "Installing $(CLUSTER_PACKAGES)"; \
	$$as apt-get -qq update && $$as env DEBIAN_FRONTEND=noninteractive \
		apt-get -qq install --yes --no-install-recommends $(CLUSTER_PACKAGES) >/dev/null || \
		echo "The packages could not be installed; the tests of clusters will tell."

# Debian has a small one without a window; elsewhere the whole browser does.
browser:
	@for name in chromium-headless-shell chromium chromium-browser google-chrome; do \
		command -v $$name >/dev/null && exit 0; done; \
	if ! command -v apt-get >/dev/null; then echo "No apt-get here: install Chromium to run the tests of reports."; exit 0; fi; \
	if [ $$(id -u) = 0 ]; then as=; elif sudo -n true 2>/dev/null; then as="sudo -n"; \
	else echo "Not root: sudo apt-get install chromium-headless-shell, to run the tests of reports."; exit 0; fi; \
	echo "Installing chromium-headless-shell"; \
	install="$$as env DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends"; \
	$$as apt-get -qq update; $$install chromium-headless-shell fonts-dejavu-core >/dev/null || \
		$$install chromium >/dev/null || echo "No Chromium could be installed; the tests of reports will tell."

# Many tests wait for clusters and processes, so three workers keep two cores busy where there is
# memory for them: up to 4 GiB each. A file is run by one worker, in the order of tests/conftest.py.
WORKERS ?= $(shell awk '/^MemTotal/ {print ($$2 > 12e6) ? 3 : 2}' /proc/meminfo 2>/dev/null || echo 2)
test quick times: export PYTHONDONTWRITEBYTECODE := # each process that they start would compile anew
PYTEST := $(BIN)/pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
test: lint cluster-packages browser
	$(PYTEST)

quick: lint
	$(BIN)/python -m tests.quick

times: .venv/ready-dev cluster-packages browser
	$(PYTEST) -p tests.times

prove-all: .venv/ready-dev cluster-packages
	$(BIN)/overland prove layout --layouts all --table docs/evidence/layouts.md
	$(BIN)/overland prove layout --layouts short --dtype float32 --table docs/evidence/layouts.md
	$(BIN)/overland prove layout --layouts short --dtype bfloat16 --table docs/evidence/layouts.md
	$(BIN)/overland prove layout --layouts five --table docs/evidence/layouts.md
	$(BIN)/overland prove resume --layouts dozen --table docs/evidence/resume.md
	$(BIN)/python -m tests.prove_sessions docs/evidence/sessions.md
	$(BIN)/python -m tests.prove_long docs/evidence/long.md
	$(BIN)/python -m tests.prove_peft docs/evidence/peft.md
	$(BIN)/python -m tests.cluster.walkthrough docs/evidence/walkthrough.md
	$(BIN)/python -m tests.prove_trl docs/evidence/trl.md
	$(BIN)/python -m tests.prove_peers docs/evidence/peers.md $(NANOCHAT)
	$(BIN)/python -m tests.prove_masks docs/evidence/masks.md
	$(BIN)/python -m tests.prove_tasks docs/evidence/tasks.md
	$(BIN)/python -m tests.prove_generation docs/evidence/generation.md
	$(BIN)/python -m tests.prove_notebook docs/evidence/notebook.md
	$(BIN)/python -m tests.prove_wheel docs/evidence/wheel.md
	$(BIN)/python -m tests.prove_docs docs/evidence/docs.md
	$(BIN)/python -m tests.prove_perplexity docs/evidence/perplexity.md
	$(BIN)/python -m tests.prove_amd docs/evidence/amd_kernels.md
	$(BIN)/python -m tests.cluster.supervise.prove_faults --into docs/evidence
	$(BIN)/python -m tests.cluster.supervise.prove_restarts --into docs/evidence

# The theme advertises its successor at each start.
docs site: export NO_MKDOCS_2_WARNING := 1
PORT ?= 8000
docs: .venv/ready-dev
	@$(BIN)/python -c 'import socket; socket.create_server(("127.0.0.1", $(PORT)))' 2>/dev/null || \
		{ echo "Port $(PORT) is taken: choose another one, such as make docs PORT=8001."; exit 2; }
	$(BIN)/python -m mkdocs serve --dev-addr 127.0.0.1:$(PORT)

site: .venv/ready-dev
	$(BIN)/python -m mkdocs build --strict
	@echo "Open build/site/index.html."

pictures: .venv/ready-dev browser
	$(BIN)/python -m tests.reporting.screenshots

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
