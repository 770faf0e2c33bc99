#!/usr/bin/env bash
# Runs GPU tests and benchmarks on a host without a package registry. Only wheels from the folder .wheels are installed.
#
#   ci/gpu.sh [--attention] [--graph] [--models] [--integration] [--worker] [--bench-attention] [--bench-ops]
#             [--bench-layers] [--bench-sweep] [--bench-shapes] [--tp N] [--bench-collectives N] [--device cpu] [--out DIR]
#
# Without an option, all tests run, but no benchmark. --worker builds the C++ worker and the bridge's step benchmark with
# the host's cmake and compiler, then runs both; with --device cpu this works without a GPU. --tp N runs the tests and the
# sweep of N ranks on N GPUs. Results go to DIR as JSON. XLLM_COMMIT names the commit on a host without the git history.
#
# The host needs python3 with torch, triton, transformers, pytest and hypothesis; pytest-xdist and pytest-timeout are
# optional. --worker also needs cmake, ninja or make, a C++20 compiler, a shared libpython with its headers, and the wheel
# nlohmann-json. FlashInfer comes as wheels (flashinfer-python, apache-tvm-ffi). Kernels that it has compiled before are
# used from .wheels/flashinfer-aot/NAME/NAME.so.
set -euo pipefail
cd "$(dirname "$0")/.."

parts=() out=benchmarks/results tp=2 device=cuda name=h200
while [ $# -gt 0 ]; do
  case "$1" in
    --out) out="$2"; shift ;;
    --device) device="$2" name="$2"; shift ;;
    --tp | --bench-collectives) tp="$2"; parts+=("${1#--}"); shift ;;
    --attention | --graph | --models | --integration | --worker | --bench-attention | --bench-ops | --bench-layers | \
      --bench-sweep | --bench-shapes)
      parts+=("${1#--}")
      ;;
    *) echo "unknown argument: $1" >&2; exit 2 ;;
  esac
  shift
done
[ ${#parts[@]} -gt 0 ] || parts=(attention graph models integration worker)
if [ "$device" != cuda ] && [ "${parts[*]}" != worker ]; then
  echo "--device $device: only --worker runs on this device" >&2
  exit 2
fi

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if compgen -G ".wheels/*.whl" >/dev/null; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .wheels/*.whl
  if [ -d .wheels/flashinfer-aot ] && [ -d "$site/flashinfer" ]; then
    mkdir -p "$site/flashinfer/data/aot"
    cp -r .wheels/flashinfer-aot/. "$site/flashinfer/data/aot/"
  fi
fi
sources=$(printf '%s:' "$PWD"/packages/*/src)
export PYTHONPATH="$site:$sources$PWD/integration/python" PYTHONUNBUFFERED=1
# NVLink multicast is off: nothing here needs it, and a crashed program can leave it unusable for others.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
if [ "$device" = cuda ]; then
  export XLLM_GPU_TESTS=1
  python3 -c 'import torch; assert torch.cuda.is_available(), "torch finds no CUDA device"; print(torch.cuda.get_device_name())'
fi

gpu_tests() { # PART FOLDER WORKERS [MARKER]
  local options=(-q -m "${4:-gpu}" -p no:cacheprovider --junit-xml "$site/$1.xml" -o junit_family=xunit1) code=0
  if python3 -c 'import pytest_benchmark' 2>/dev/null; then options+=(-p no:benchmark); fi
  if python3 -c 'import pytest_timeout' 2>/dev/null; then options+=(--timeout 200 --timeout-method thread); fi
  if [ "$3" -gt 1 ] && python3 -c 'import xdist' 2>/dev/null; then options+=(-n "$3"); fi
  timeout --foreground 900 python3 -m pytest "${options[@]}" "$2" || code=$?
  # A run that hit the time limit writes no report.
  if [ -f "$site/$1.xml" ]; then
    python3 benchmarks/tested.py "$site/$1.xml" --device "$device" --out "$out/tests-$1-$name.json" || code=$?
  fi
  return "$code"
}

build() { # SOURCE TARGET: with the host's cmake and torch
  local folder="build/${device}-${1##*/}" options
  mapfile -t options < <(python3 ci/embedding.py)
  [ ${#options[@]} -gt 0 ] || return 1
  if command -v ninja >/dev/null; then options+=(-G Ninja); fi
  options+=(-DCMAKE_BUILD_TYPE=Release "-Dxllm_executor_DIR=$(python3 -m xllm_executor --cmakedir)")
  options+=("-DXLLM_JSON_INCLUDE_DIR=$PWD/build/json")
  cmake -S "$1" -B "$folder" "${options[@]}" >"$site/$2.log" 2>&1 \
    && cmake --build "$folder" --target "$2" --parallel "$(nproc)" >>"$site/$2.log" 2>&1 \
    || { tail -40 "$site/$2.log"; return 1; }
  echo "$2 is built after $SECONDS s"
}

worker() {
  local code=0 bridge workers=$(($(nproc) < 8 ? $(nproc) : 8)) markers="gpu or multi_gpu"
  if [ "$device" != cuda ]; then markers="not gpu and not multi_gpu"; fi
  if [ ! -d build/json ]; then # a fixed folder: cmake caches the path, and $site changes per run
    mkdir -p build
    cp -r "$(python3 -c 'import importlib.util as u; print(u.find_spec("nlohmann_json").submodule_search_locations[0])')/include" \
      build/json || return 1
  fi
  build integration/bridge step_benchmark &
  bridge=$!
  build integration/worker xllm_worker || code=$?
  wait "$bridge" || code=$?
  [ "$code" -eq 0 ] || return "$code"
  export XLLM_WORKER="$PWD/build/${device}-worker/xllm_worker"
  XLLM_NUM_GPUS=$(python3 -c 'import torch; print(torch.cuda.device_count())') \
    gpu_tests worker integration/tests/test_devices.py "$workers" "$markers" || code=$?
  python3 benchmarks/step.py "build/${device}-bridge/step_benchmark" --device "$device" --out "$out/step-$name.json" \
    || code=$?
  return "$code"
}

sweep() { # NAME OPTION...
  timeout --foreground 400 python3 benchmarks/sweep.py --out "$out/$1-h200.json" "${@:2}" \
    && python3 benchmarks/table.py "$out/$1-h200.json"
}

run_part() {
  local code=0
  case "$1" in
    attention) gpu_tests attention packages/xllm-attention/tests 12 ;;
    graph) gpu_tests graph packages/xllm-graph/tests 3 ;;
    models) gpu_tests models packages/xllm-models/tests 1 ;;
    integration) gpu_tests integration integration/graph 8 ;;
    worker) worker ;;
    bench-attention) python3 benchmarks/attention.py --out "$out/attention-h200.json" ;;
    bench-ops) python3 benchmarks/ops.py --device cuda --out "$out/ops-h200.json" ;;
    bench-layers) python3 benchmarks/layers.py --out "$out/layers-h200.json" ;;
    bench-sweep) sweep sweep ;;
    bench-shapes)
      for shape in deepseek-v3 qwen3-next; do
        sweep "sweep-$shape" --shape "$shape" --modes eager,graph --batches 1,8,32,100 --eager-repeats 1 || code=$?
      done
      return "$code"
      ;;
    bench-collectives)
      timeout --foreground 120 python3 benchmarks/collectives.py --tp "$tp" --out "$out/collectives-tp$tp-h200.json"
      ;;
    tp)
      XLLM_NUM_GPUS="$tp" gpu_tests "tp$tp" integration/graph 3 multi_gpu || code=$?
      sweep "sweep-tp$tp" --tp "1,$tp" --modes eager,graph --eager-repeats 1 || code=$?
      return "$code"
      ;;
  esac
}

failed=()
for part in "${parts[@]}"; do
  echo "== $part"
  run_part "$part" || failed+=("$part") # the other parts still run
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}" >&2
  exit 1
fi
