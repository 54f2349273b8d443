#!/usr/bin/env bash
# Correctness, compute-sanitizer and benchmarks of a built wheel on a machine with a GPU. Builds
# nothing there: python3 needs torch, pytest, pytest-xdist, hypothesis and ml_dtypes; cupy and jax
# are taken if present.
#
#   tests/gpu.sh WHEEL OUT_DIR [STEP...]
#
# Steps: tests random memcheck racecheck initcheck synccheck decode prefill jax; none given: all.
# Every step writes OUT_DIR/STEP.log; the exit status is the number of failed steps.
#   GDN_PAGED_GPU_TIMEOUT=N    seconds per step, default 300
#   GDN_PAGED_GPU_TESTS=...    what pytest gets in the step `tests`, default "tests -n 4"
#   GDN_PAGED_GPU_EXAMPLES=N   calls per random test and target in the step `random`, default 100
set -uo pipefail

if (($# < 2)); then
  sed -n '2,13s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
wheel=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
steps=("${@:3}")
((${#steps[@]})) || steps=(tests random memcheck racecheck initcheck synccheck decode prefill jax)

cd "$(dirname "${BASH_SOURCE[0]}")/.."
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install -q --no-index --no-deps --target "$site" "$wheel" || exit 99
export PYTHONPATH=$site PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
limit=${GDN_PAGED_GPU_TIMEOUT:-300}
read -ra selection <<<"${GDN_PAGED_GPU_TESTS:-tests -n 4}"
pytest=(python3 -m pytest -q -p no:cacheprovider --targets cuda)

# Few cases: the tools make every launch 10 to 100 times slower. Head size 64 and 128, GVA and GQA,
# padding, tails, pages of all kinds.
small=(tests/test_cases.py tests/test_decode_cuts.py -k "torch and bf16 and (D01 or D09 or D10 or
  D11 or D15 or B46-65 or B75-8-2 or decode-padded or skipped-stores or cuts-64)")

failed=0
for step in "${steps[@]}"; do
  case $step in
    tests) command=("${pytest[@]}" "${selection[@]}") ;;
    random)
      command=("${pytest[@]}" tests/test_properties.py tests/test_slot_form.py
        tests/test_hostile_random.py --examples "${GDN_PAGED_GPU_EXAMPLES:-100}" -n 8)
      ;;
    memcheck | racecheck | initcheck | synccheck)
      command=(compute-sanitizer --tool "$step" --error-exitcode 9)
      # The other kernels are not watched, so that their copies and memory look uninitialised.
      [[ $step != initcheck ]] || command+=(--check-api-memory-access no)
      command+=(--kernel-name kernel_substring=gdn "${pytest[@]}" "${small[@]}")
      ;;
    decode | prefill) command=(python3 "tests/bench/${step}_gpu.py" --out "$out/$step.json") ;;
    jax) command=(python3 tests/bench/jax_dispatch.py --platform cuda --out "$out/jax.json") ;;
    *)
      echo "unknown step: $step" >&2
      exit 2
      ;;
  esac
  start=$SECONDS
  timeout -k 5 "$limit" "${command[@]}" >"$out/$step.log" 2>&1
  code=$?
  ((code == 0)) || failed=$((failed + 1))
  echo "== $step: exit $code, $((SECONDS - start)) s"
  tail -n 3 "$out/$step.log"
done
exit "$failed"
