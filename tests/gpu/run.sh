#!/usr/bin/env bash
# Everything that needs a GPU, in one run of under four minutes; at most eight result files in the folder OUT.
#
#     make gpu                               # OUT=runs/gpu
#     OUT=/some/folder PYTHON=python3 tests/gpu/run.sh
#     tests/gpu/run.sh --rehearsal           # on a CPU, in Triton's interpreter, as far as that goes
#
# Nothing is installed: the packages of the machine are used (torch 2.11, Triton 3.6 and transformers 5.17 are enough).
# A part that fails or runs out of time is named at the end, and the parts after it still run. The exit status says how
# many failed; no speed is measured after a red test of the kernels.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=$(mkdir -p "${OUT:-runs/gpu}" && cd "${OUT:-runs/gpu}" && pwd)
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false MPLBACKEND=Agg
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
export OUT TRITON_CACHE_DIR="$WORK/triton"
LOG="$OUT/tests.txt"
: > "$LOG"
failed=()
rehearsal=false
[ "${1:-}" = "--rehearsal" ] && rehearsal=true

engram() { "$PYTHON" -c 'import sys; from engram.cli import main; sys.exit(main())' "$@"; }

# part NAME SECONDS COMMAND...: its output goes to the log, and its last line to the terminal. No part gets more than what
# is left of TOTAL.
part() {
  local name=$1 limit=$2 began=$SECONDS status
  shift 2
  [ $((TOTAL - SECONDS)) -lt "$limit" ] && limit=$((TOTAL - SECONDS))
  if [ "$limit" -le 0 ]; then
    failed+=("$name (no time left)")
    return 1
  fi
  echo "== $name" | tee -a "$LOG"
  export -f engram
  export PYTHON
  timeout --kill-after=10 "$limit" bash -c '"$@"' part "$@" >> "$LOG" 2>&1
  status=$?
  echo "   $((SECONDS - began)) s, status $status: $(tail -n 1 "$LOG" | cut -c1-150)"
  [ $status -eq 0 ] || failed+=("$name (status $status)")
  return $status
}

workers=()
"$PYTHON" -c 'import xdist' 2>/dev/null && ! $rehearsal && workers=(-n 8)
pytest=("$PYTHON" -m pytest -q -p no:cacheprovider -o addopts=--import-mode=importlib)
TOTAL=235 limit=60 sizes=() claims='kernel-*' rounds=30 overlap=configs/overlap/gpu.yaml kernels=(tests/triton) steps=150
if $rehearsal; then
  export TRITON_INTERPRET=1 ENGRAM_GPU_REHEARSAL=1
  claims='kernel-cpu-*' rounds=3 kernels=(tests/triton/test_rows.py tests/triton/test_kernel_claims.py) steps=10
  overlap=configs/overlap/cpu.yaml limit=300 TOTAL=900
  sizes=(--set 'placements=[[0], [1]]' --set 'stores=[host, pinned]' --set 'phases=[prefill, train]' --set seq_len=32 --set rounds=3)
fi

part "versions" 60 bash -c 'engram info --json > "$1"' info "$OUT/info.json"
part "kernels against plain torch" 100 "${pytest[@]}" "${workers[@]}" "${kernels[@]}"
green=$?
part "places, streams, graphs" "$limit" "${pytest[@]}" tests/gpu
if [ $green -eq 0 ]; then
  $rehearsal && unset TRITON_INTERPRET
  part "kernel claims" 60 bash -c 'engram bench --only "$1" --rounds "$2" --out "$3" && mv "$3/bench.json" "$4"' \
    bench "$claims" "$rounds" "$WORK/bench" "$OUT/bench.json"
  part "overlap" 120 bash -c 'engram overlap "$@"; status=$?; cp "$0"/overlap* "$OUT"; exit $status' \
    "$WORK/overlap" "$overlap" "${sizes[@]}" --out "$WORK/overlap"
  part "training comparison" 60 bash -c 'engram quickstart --out "$1" --set "run.steps=$2" && cp "$1/summary.json" "$3"' \
    quickstart "$WORK/quickstart" "$steps" "$OUT/train.json"
else
  echo "no speed is measured on red tests" | tee -a "$LOG"
fi

echo "== $SECONDS s in all; results in $OUT:"
ls "$OUT"
if [ ${#failed[@]} -gt 0 ]; then
  printf 'failed: %s\n' "${failed[@]}" | tee -a "$LOG"
fi
exit ${#failed[@]}
