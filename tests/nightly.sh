#!/usr/bin/env bash
# The long tests, one seed of tests/seeds.txt after the other: the fuzz target of the C API under
# AddressSanitizer and UndefinedBehaviorSanitizer, the property tests, and the long run.
#
#   tests/nightly.sh OUT_DIR [SECONDS]
#
# Needs clang++ with libFuzzer (CXX names another one), the installed package and the requirements
# of the tests. SECONDS is what fuzzing takes per seed, default 600. Inputs that reach new code are
# kept in OUT_DIR/corpus for the next night, failures in OUT_DIR. Stops at the first failure.
set -euo pipefail

if (($# < 1)); then
  sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
mkdir -p "$1/corpus"
out=$(realpath "$1")
seconds=${2:-600}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Comparisons are not traced: they are three quarters of the time and find no more code here.
cmake -S . -B "$out/build" -DCMAKE_CXX_COMPILER="${CXX:-clang++}" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
  -DGDN_PAGED_CUDA=OFF -DGDN_PAGED_TESTS=ON -DGDN_PAGED_FUZZ=ON -DCMAKE_CXX_FLAGS="-fsanitize=address,undefined,fuzzer-no-link -fno-sanitize-coverage=trace-cmp \
-fno-sanitize-recover=all" >"$out/build.log"
cmake --build "$out/build" --target fuzz_api -j 2 >>"$out/build.log"

while read -r seed; do
  echo "== seed $seed: fuzz"
  "$out/build/tests/fuzz/fuzz_api" -seed="$seed" -max_total_time="$seconds" -max_len=512 \
    -len_control=0 -print_final_stats=1 -artifact_prefix="$out/" "$out/corpus" \
    >"$out/fuzz-$seed.log" 2>&1
  grep number_of_executed_units "$out/fuzz-$seed.log"
  echo "== seed $seed: properties"
  python -m pytest -q -p no:cacheprovider tests/test_properties.py tests/test_slot_form.py \
    tests/test_hostile_random.py tests/test_verify.py --examples 1000 --hypothesis-seed="$seed" \
    -n 2 | tail -n 3
  echo "== seed $seed: long run"
  python tests/long_run.py --seed "$seed" | tail -n 2
done < <(grep -v '^#' tests/seeds.txt)
