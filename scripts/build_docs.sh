#!/usr/bin/env bash
# build_docs.sh [--setup | --where] [SITE]: the documentation as a static site, without warnings, in SITE (build/site).
#
# The tools live in an environment of their own, $BELAYER_CACHE/venv-docs-<key>, made when it is missing (--setup: only
# that; --where: print its path). The reference of commands and settings is asked from this checkout's .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/cache.sh
read -r -a extra <<<"${BELAYER_PIP_ARGS:-}"
mkdir -p "$cache"
[ -x .venv/bin/python ] || { echo "docs: there is no .venv here; run \`make setup\` first" >&2; exit 1; }
key=$({ cat requirements/docs.txt; .venv/bin/python -V; } | sha256sum | cut -c1-12)
venv=$cache/venv-docs-$key
[ "${1:-}" != --where ] || { echo "$venv"; exit 0; }

exec 9>"$cache/docs.lock"
flock 9
if [ ! -f "$venv/.complete" ]; then
  echo "docs: installing MkDocs, once"
  log=$cache/setup-docs.log
  rm -rf "$venv"
  { .venv/bin/python -m venv --clear "$venv" &&
    "$venv/bin/python" -m pip --disable-pip-version-check install -q "${extra[@]}" -r requirements/docs.txt; } >"$log" 2>&1 ||
    { tail -n 15 "$log" >&2; echo "docs: MkDocs could not be installed; see $log" >&2; exit 1; }
  touch "$venv/.complete"
fi
exec 9>&-
[ "${1:-}" != --setup ] || exit 0

# NO_MKDOCS_2_WARNING: the theme's notice about its successor is for those who maintain this, not for each build
NO_MKDOCS_2_WARNING=1 "$venv/bin/python" -m mkdocs build --strict --site-dir "$(realpath -m "${1:-build/site}")"
