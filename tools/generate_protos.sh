#!/usr/bin/env bash
# Regenerates common/baru from protos/. The generators are the lowest supported versions, because
# generated code refuses to load under a runtime older than its generator.
# Usage: tools/generate_protos.sh [OUTPUT_DIR]   (default: common)
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-common}
venv=.venv-protos
if [ ! -e "$venv/.installed" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/pip" install -q -c constraints-protos.txt grpcio-tools mypy-protobuf
  touch "$venv/.installed"
fi
mkdir -p "$out"
PATH="$PWD/$venv/bin:$PATH" python -m grpc_tools.protoc -I protos \
  --python_out="$out" --mypy_out=quiet:"$out" --grpc_python_out="$out" --mypy_grpc_out=quiet:"$out" \
  protos/baru/drafting/v1/drafting.proto
