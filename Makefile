# Mirach. `make run` is the whole loop; it ends with the commands that open each screen.
#
#   DATA      simulator | kuairand | amazon_beauty | amazon_sports | generic   source of the log
#   DATA_DIR  folder of the raw files    (sources that are read from disk)
#   PRESET    tiny | laptop              size of the world and of the models
#   SEED      any integer                seeds the world and the training

DATA ?= simulator
DATA_DIR ?=
PRESET ?= laptop
SEED ?= 0
MIRACH_HOME ?= data/$(DATA)
PYTHON ?= python3
PORT ?= 3000

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
ENVIRONMENT = DAGSTER_DISABLE_TELEMETRY=1 DO_NOT_TRACK=1 BENTOML_DO_NOT_TRACK=True RAY_USAGE_STATS_ENABLED=0 \
	MIRACH_HOME="$(abspath $(MIRACH_HOME))" DAGSTER_HOME="$(abspath $(MIRACH_HOME))/dagster" \
	BENTOML_HOME="$(abspath $(MIRACH_HOME))/bentoml"
SETTINGS = DATA="$(DATA)" DATA_DIR="$(DATA_DIR)" PRESET="$(PRESET)" SEED="$(SEED)"

.PHONY: setup run erase retain screens test slow lint format type ui serve monitor bench clean

setup: $(STAMP)

# torch comes first and with its dependencies: its wheel differs by platform, so it is not in the lock.
$(STAMP): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $(STAMP)

run: $(STAMP)
	@$(ENVIRONMENT) $(SETTINGS) $(BIN)/python -m dagster_project.run

# USER counts only when it is given on the command line: every shell has one, the login name.
# The user leaves lake, online store, logs and artefacts; the next run makes again what depended on the rows.
erase: $(STAMP)
	@$(ENVIRONMENT) $(BIN)/python -m dagster_project.erase --user "$(if $(filter command,$(origin USER)),$(USER))"

# Lists what would go; APPLY=1 removes it.
retain: $(STAMP)
	@$(ENVIRONMENT) $(BIN)/python -m dagster_project.retain --days "$(DAYS)" $(if $(APPLY),--apply)

ui: $(STAMP)
	@$(ENVIRONMENT) $(BIN)/python -m dagster_project.ui --port $(PORT)

serve: $(STAMP)
	@$(ENVIRONMENT) $(BIN)/python -m bentos.serve --home "$(abspath $(MIRACH_HOME))"

monitor: $(STAMP)
	@$(ENVIRONMENT) $(BIN)/evidently ui --workspace "$(abspath $(MIRACH_HOME))/reports/workspace" --host 127.0.0.1 --port 8001

screens: $(STAMP)
	@$(ENVIRONMENT) $(BIN)/python -m tests.screens --home "$(abspath $(MIRACH_HOME))" --to docs/images

test: $(STAMP)
	$(ENVIRONMENT) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2

slow: $(STAMP)
	$(ENVIRONMENT) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	$(ENVIRONMENT) $(BIN)/python -m benchmarks.loop
	$(ENVIRONMENT) $(BIN)/python -m benchmarks.report

clean:
	rm -rf build .mypy_cache .ruff_cache .coverage
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
