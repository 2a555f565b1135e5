#!/usr/bin/env bash
# What only `make test` needs beyond `make setup`: packages of harnesses, and a browser. Without them their tests are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/cache.sh
exec 9>"$cache/setup.lock"
flock 9

scripts/install_harness.sh agents verifiers | scripts/heartbeat.sh ||
  echo "  Harnesses are not installed; their tests will be skipped."
scripts/install_browser.sh 9>&- | scripts/heartbeat.sh
