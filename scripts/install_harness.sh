#!/usr/bin/env bash
# install_harness.sh [--path] NAME...: what the tests of a harness need, each in a virtual environment of its own.
#
#   agents      mini-swe-agent and SWE-ReX: some MB on top of the packages of set-up
#   verifiers   verifiers, on top of the packages of set-up too, with its own versions of some in front
#   verl        verl's rollout side with Ray, about 280 MB. Not part of set-up
#   harbor      Harbor with everything, about 600 MB; needs Python >= 3.12. Not part of set-up: minutes
#
# The versions that set-up has installed are never touched. --path prints the Python of an installed one, or fails with
# the reason. They lie in $BELAYER_CACHE beside the rest; where they are missing, their tests are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${BELAYER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/belayer}
log=$cache/setup.log
read -r -a extra <<<"${BELAYER_PIP_ARGS:-}"

only_path=
[ "${1:-}" = --path ] && { only_path=1; shift; }

base_site() { cat .venv/lib/python3*/site-packages/belayer-cache.pth 2>/dev/null; }
python_for() {
  if [ "$1" != harbor ]; then
    echo .venv/bin/python
    return
  fi
  for candidate in python3 python3.13 python3.12 "$HOME"/.pyenv/versions/3.1[2-9]*/bin/python; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  return 1
}
place_of() { # NAME PYTHON
  echo "$cache/harness-$1-$({ cat "requirements/harness/$1.txt" scripts/install_harness.sh; "$2" -V; base_site; } | sha256sum | cut -c1-12)"
}
install() { # NAME PYTHON PLACE
  local site
  rm -rf "$3" && "$2" -m venv --without-pip "$3"
  local pip=("$(base_site)/../../../bin/python" -m pip --disable-pip-version-check --python "$3/bin/python" install -q "${extra[@]}")
  if [ "$1" = harbor ]; then
    "${pip[@]}" -r requirements/harness/harbor.txt
  else
    site=$("$3/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    base_site >"$site/belayer-base.pth"
    "${pip[@]}" --no-deps -r "requirements/harness/$1.txt"
  fi
  touch "$3/.complete"
}

for name in "$@"; do
  [ -f "requirements/harness/$name.txt" ] || { echo "no harness is called $name" >&2; exit 2; }
  python=$(python_for "$name") || { echo "$name needs Python >= 3.12, and there is none" >&2; exit 1; }
  place=$(place_of "$name" "$python")
  if [ -n "$only_path" ]; then
    [ -f "$place/.complete" ] || { echo "run scripts/install_harness.sh $name" >&2; exit 1; }
    echo "$place/bin/python"
    continue
  fi
  printf '  %-58s' "harness: $name"
  begun=$SECONDS
  if [ -f "$place/.complete" ]; then
    echo ok
  elif install "$name" "$python" "$place" >>"$log" 2>&1; then
    echo "ok  (installed in $((SECONDS - begun)) s)"
  else
    echo "not installed; its tests will be skipped (see $log)"
  fi
done
