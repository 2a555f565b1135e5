#!/usr/bin/env bash
# What `sandbox.runtime = "podman"` needs beyond `make setup`: podman, runc and conmon from Debian.
#
# Optional. Belayer's own runtime needs none of it and is several times faster. CRIU is the one that `make setup` chose:
# the distribution's may fail on a current kernel, and Belayer's podman calls find ours first. crun is not used: it
# refuses hosts that have cgroup v1 and v2 mounted side by side.
set -euo pipefail
cd "$(dirname "$0")/.."

source scripts/cache.sh
log=$cache/setup-podman.log
mkdir -p "$cache"
as_root=()
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || { echo "podman needs root: run as root, or install sudo" >&2; exit 1; }
  as_root=(sudo -E)
fi
missing=()
for package in podman runc conmon; do
  dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  { "${as_root[@]}" apt-get update -q && DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -q \
    --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 ||
    { tail -n 15 "$log" >&2; echo "apt-get could not install: ${missing[*]}" >&2; exit 1; }
  printf '%s\n' "${missing[@]}" >>"$cache/debian-packages" || true
fi
.venv/bin/python - <<'PYTHON'
import sys

from belayer.sandbox.podman import missing

reason = missing()
print(f"podman as a sandbox runtime: {reason or 'ready'}")
sys.exit(1 if reason else 0)
PYTHON
