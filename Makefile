# Every target does all that it needs on a fresh machine: environment, install, work.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# torch_xla goes with one version of PyTorch, older than the one above
VENV_XLA ?= .venv-xla
STAMP_XLA := $(VENV_XLA)/.installed
# torch-tpu loads itself with PyTorch, so nothing else may share its environment; Python 3.11 or newer
VENV_TPU ?= .venv-tpu
STAMP_TPU := $(VENV_TPU)/.installed

.PHONY: demo test test-xla test-tpu lint clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[cpu,dev]"
	touch $@

demo: $(STAMP)  ## a real photo through PyTorch and ONNX Runtime; FULL=1 for the real size
	$(BIN)/python scripts/demo.py $(if $(FULL),--full)

test: $(STAMP)  ## everything that needs no GPU
	$(BIN)/python -m pytest -n 2 --dist worksteal -ra
	$(MAKE) lint

$(STAMP_XLA): constraints-xla.txt
	$(PYTHON) -m venv $(VENV_XLA)
	$(VENV_XLA)/bin/python -m pip install --quiet --no-compile -r constraints-xla.txt
	touch $@

test-xla: $(STAMP_XLA)  ## the tower on a real XLA device, the CPU by default; needs 7 GB and, the first time, minutes
	PJRT_DEVICE=$${PJRT_DEVICE:-CPU} $(VENV_XLA)/bin/python -m pytest tests/xla -ra

$(STAMP_TPU): constraints-tpu.txt
	$(PYTHON) -m venv $(VENV_TPU)
	$(VENV_TPU)/bin/python -m pip install --quiet --no-compile -r constraints-tpu.txt
	touch $@

test-tpu: $(STAMP_TPU)  ## the tower beside torch-tpu's compiler, which refuses dynamic shapes; needs no TPU
	$(VENV_TPU)/bin/python -m pytest tests/tpu -ra

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(VENV_XLA) $(VENV_TPU) build out *.egg-info .mypy_cache .ruff_cache
