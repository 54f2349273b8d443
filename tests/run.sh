#!/usr/bin/env bash
# Installs what the tests need into an environment of their own, builds the wheel, and runs every
# check: lint, static analysis, types, pytest, ctest, the C and C++ consumers, the command line, the
# examples.
# Stops at the first failure.
#
#   tests/run.sh
#
# Needs python3 >= 3.10 with venv and headers and a C++20 compiler; takes nvcc if it is there.
#   GDN_PAGED_NO_CUDA=1        build without CUDA
#   GDN_PAGED_CUDA_ARCHS=...   build for these architectures only
#   GDN_PAGED_TEST_DIR=DIR     build in DIR and keep it, so that the next run is quick
#   PYTHON=...                 the interpreter, default python3
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
if [[ -n ${GDN_PAGED_TEST_DIR:-} ]]; then
  mkdir -p "$GDN_PAGED_TEST_DIR"
  work=$(cd "$GDN_PAGED_TEST_DIR" && pwd)
else
  work=$(mktemp -d)
fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 CTEST_OUTPUT_ON_FAILURE=1

xla_include=""
current=""
summary=()
complete=""
finish() {
  local code=$?
  if [[ -z $complete ]] && ((code == 0)); then  # ended by a signal
    code=1
  fi
  echo
  echo "== summary"
  printf '%s\n' "${summary[@]}"
  if ((code != 0)); then
    echo "FAILED  $current"
    [[ -n ${GDN_PAGED_TEST_DIR:-} ]] || echo "build files are kept in $work"
  else
    echo "all steps passed in $SECONDS s"
    [[ -n ${GDN_PAGED_TEST_DIR:-} ]] || rm -rf "$work"
  fi
  exit "$code"
}
trap finish EXIT

step() {  # step NAME COMMAND...
  current=$1
  shift
  echo
  echo "== $current"
  local start=$SECONDS
  "$@"
  summary+=("ok      $current ($((SECONDS - start)) s)")
}

environment() {
  "${PYTHON:-python3}" -m venv "$work/venv" || {
    echo "no usable python3 venv; on Debian: apt-get install python3-venv" >&2
    return 1
  }
  PATH=$work/venv/bin:$PATH
  hash -r
  python -c 'import os, sysconfig as s; assert os.path.exists(s.get_path("include") + "/Python.h")' || {
    echo "no headers of python3; on Debian: apt-get install python3-dev" >&2
    return 1
  }
  python -m pip install --quiet -r tests/requirements.txt
}

old_jax() {  # the oldest JAX that is served: its headers build the handlers, its runtime tests them
  if python -c 'import sys; raise SystemExit(sys.version_info >= (3, 14))'; then
    [[ -e $work/old-jax/jax ]] ||
      python -m pip install --quiet --no-deps --target "$work/old-jax" jax==0.6.0 jaxlib==0.6.0
    xla_include=$work/old-jax/jaxlib/include
  fi
}

old_cmake() {  # the oldest CMake that is served, which a build takes if the system has it
  [[ -e $work/old-cmake/bin/cmake ]] ||
    python -m pip install --quiet --no-deps --target "$work/old-cmake" cmake==3.25.2
  local cuda=AUTO
  [[ -z ${GDN_PAGED_NO_CUDA:-} ]] || cuda=OFF
  PYTHONPATH=$work/old-cmake "$work/old-cmake/bin/cmake" -S . -B "$work/build-old-cmake" \
    -DGDN_PAGED_CUDA=$cuda
}

lint() {
  ruff check .
  ruff format --check .
  git ls-files '*.h' '*.hpp' '*.c' '*.cpp' '*.cu' '*.cuh' | xargs clang-format --dry-run -Werror
}

wheel() {
  rm -rf "$work/wheel"
  python -m pip wheel . --no-deps --no-build-isolation --quiet -w "$work/wheel" \
    --config-settings build-dir="$work/build-wheel${GDN_PAGED_NO_CUDA:+-cpu}" \
    --config-settings cmake.define.GDN_PAGED_JAX=ON \
    --config-settings cmake.define.GDN_PAGED_XLA_INCLUDE="${xla_include:-}"
  python -m pip install --quiet --no-deps --force-reinstall "$work"/wheel/*.whl
  (cd "$work" && python -m gdn_paged info)
  if [[ -z ${GDN_PAGED_NO_CUDA:-} ]] && command -v nvcc >/dev/null; then
    python -c 'import gdn_paged; assert gdn_paged.has_cuda(), "nvcc is there, CUDA was not built"'
  fi
}

library() {  # the C++ side alone, as a packager builds it
  cmake -S . -B "$work/build" -G Ninja -DCMAKE_INSTALL_PREFIX="$work/prefix" \
    -DGDN_PAGED_TESTS=ON -DGDN_PAGED_CUDA=OFF -DGDN_PAGED_WERROR=ON
  cmake --build "$work/build"
  ctest --test-dir "$work/build" --no-tests=error
}

analysis() {  # the host code as it was just built; kernels once, for the instruction set of all
  git ls-files 'cpp/core/*.cpp' 'cpp/cpu/*.cpp' | grep -v kernels_avx |
    xargs -P 2 -n 5 clang-tidy -p "$work/build" --quiet --extra-arg=-fno-openmp
  cppcheck --quiet --std=c++20 --language=c++ --enable=warning,performance --error-exitcode=1 \
    --suppress=missingIncludeSystem --suppress=uninitMemberVarNoCtor \
    -DGDN_PAGED_BUILD -I cpp -I cpp/include -j 2 cpp/core cpp/cpu
}

consumers() {  # projects that find the library in the installed wheel
  local cmake_dir project name
  cmake_dir=$(cd "$work" && python -m gdn_paged --cmake-dir)
  for project in tests/cpp/*/CMakeLists.txt examples/*/CMakeLists.txt; do
    name=$(basename "$(dirname "$project")")
    cmake -S "$(dirname "$project")" -B "$work/$name" -G Ninja -Dgdn_paged_DIR="$cmake_dir"
    cmake --build "$work/$name"
    if [[ -e $work/$name/CTestTestfile.cmake ]]; then
      ctest --test-dir "$work/$name" --no-tests=error
    fi
  done
  "$work/cpp_engine/cpp_engine"
  "$work/cpp_engine/cpp_engine" --text python/gdn_paged/_demo/requests.txt
  if command -v nvcc >/dev/null; then  # its CUDA half compiles and links; a GPU is not needed
    cmake -S examples/cpp_engine -B "$work/cpp_engine_cuda" -G Ninja -DENGINE_CUDA=ON \
      -Dgdn_paged_DIR="$cmake_dir"
    cmake --build "$work/cpp_engine_cuda"
  fi
}

repaired_wheel() {  # the extension modules again, over the library of the wheel, and auditwheel
  GDN_PAGED_WHEEL=$(echo "$work"/wheel/*.whl) GDN_PAGED_XLA_INCLUDE=$xla_include \
    tests/wheels.sh "$work/wheels" python
}

command_line() {
  (
    cd "$work"  # not the source tree: the installed package is meant
    python -m gdn_paged check
    python -m gdn_paged demo
  )
}

examples() {
  local example
  for example in examples/*.py; do
    echo "-- $example"
    python "$example"
  done
}

step "environment" environment
step "oldest jax" old_jax
step "lint and format" lint
step "wheel" wheel
step "configured by the oldest CMake" old_cmake
step "types" mypy
step "library and ctest" library
step "static analysis" analysis
step "consumers of the wheel" consumers
step "repaired wheel" repaired_wheel
step "check and demo" command_line
step "examples" examples
# Two workers share the cores: NumPy's products in the reference need no threads of their own.
step "pytest" env OPENBLAS_NUM_THREADS=1 python -m pytest -q -n 2 tests
if [[ -n ${xla_include:-} ]]; then
  step "pytest, oldest jax" env PYTHONPATH="$work/old-jax" \
    python -m pytest -q -n 2 tests/test_jax.py tests/test_jax_errors.py
fi
complete=yes
