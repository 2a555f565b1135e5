#!/usr/bin/env bash
# install_browser.sh: Debian's Chromium, for the tests that look at Belayer's pages. About 200 MB, once.
#
# Never fails: without a browser these tests are skipped, and nothing else needs one. What could not be installed is
# tried again a day later, so that a machine without a package server does not wait in every set-up.
set -u
source "$(dirname "$0")/cache.sh"
log=$cache/setup.log
refused=$cache/browser-not-installed
mkdir -p "$cache"

without() {
  printf 'not installed: %s; the browser tests will be skipped\n' "$1"
  exit 0
}

printf '  %-58s' "Chromium, for the browser tests"
for name in chromium chromium-browser google-chrome; do # those that tests/browser_kit.py looks for
  if command -v "$name" >/dev/null; then
    echo ok
    exit 0
  fi
done
as_root=()
if [ "$(id -u)" != 0 ]; then
  sudo -n true 2>/dev/null || without "needs root or sudo without a password"
  as_root=(sudo -n)
fi
command -v apt-get >/dev/null || without "no apt-get here"
[ -z "$(find "$refused" -mtime -1 2>/dev/null)" ] || without "$(cat "$refused")"

begun=$SECONDS
install() {
  # at most five minutes each, and no question
  timeout 300 "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
    -o DPkg::Lock::Timeout=60 chromium >>"$log" 2>&1 </dev/null
}
if ! install; then # perhaps only the lists are old
  timeout 120 "${as_root[@]}" apt-get update -q >>"$log" 2>&1 </dev/null
  if ! install; then
    echo "apt-get could not, see $log" >"$refused"
    without "$(cat "$refused")"
  fi
fi
rm -f "$refused"
echo chromium >>"$cache/debian-packages"
echo "ok  (installed in $((SECONDS - begun)) s)"
