#!/usr/bin/env bash
# Provide a CRIU that works on current kernels, and print its path as the last line.
#
#   scripts/install_criu.sh            -> <cache>/criu-<version>-<patches>/sbin/criu, or the system's own criu
#   scripts/install_criu.sh --build    builds one even where the system's own works: it has our patches and is faster
#
# Debian 12's 3.17 and 13's 4.1 fail on kernels of 2025 (docs/decisions/0002): 4.2 or newer is needed. A system criu of
# that version is preferred when it can really dump and restore a process here. Otherwise the source of Debian sid is
# fetched through this machine's own apt source (its signed index gives the checksum) and built: about a minute.
# Needs root only to install missing build packages. Safe to call again: the second call only checks.
set -euo pipefail

PINNED_VERSION=4.2.1
PINNED_SHA256=29ec0ee09e296479fe7048c80980e8ef1d0684d0b0204c2b101dfea19f6725b9
source "$(dirname "$0")/cache.sh"
CACHE=$cache
PATCHES="$(cd "$(dirname "$0")" && pwd)/criu-patches" # docs/decisions/0024; any other CRIU works too, only slower
PATCHED="$(cat "$PATCHES"/*.patch | sha256sum | head -c 8)" # what was built with other patches is built anew
BUILD_PACKAGES=(build-essential pkg-config libprotobuf-dev libprotobuf-c-dev protobuf-c-compiler protobuf-compiler
  libnl-3-dev libcap-dev libnet1-dev libbsd-dev uuid-dev)

say() { echo "criu: $*" >&2; }
fail() { say "$*"; exit 1; }

version_ok() { # PATH: is it 4.2 or newer?
  local version
  version="$("$1" --version 2>/dev/null | sed -n 's/^Version: //p')" || return 1
  [ -n "$version" ] && [ "$(printf '%s\n4.2\n' "$version" | sort -V | head -n 1)" = 4.2 ]
}

really_works() ( # PATH: dump and restore a process of our own; says on standard error why not
  exec 3>&2 2>/dev/null # the shell would report the death of the process
  ok=1
  dir="$(mktemp -d "${TMPDIR:-/tmp}/belayer-criu.XXXXXX")"
  setsid sleep 600 </dev/null >/dev/null 2>&1 3>&- 9>&- &
  pid=$!
  # not before it is what it shall be: a shell that is about to become `sleep` still has our session and descriptors
  for _ in $(seq 100); do
    [ "$(cat "/proc/$pid/comm")" = sleep ] && break
    sleep 0.02
  done
  if "$1" dump -t "$pid" -D "$dir" -o dump.log --manage-cgroups=ignore >/dev/null 2>&1; then
    wait "$pid" 2>/dev/null || true
    if "$1" restore -d -D "$dir" -o restore.log --manage-cgroups=ignore >/dev/null 2>&1; then
      kill -0 "$pid" 2>/dev/null && ok=0
    fi
  fi
  [ "$ok" = 0 ] || { grep -h 'Error' "$dir"/*.log | tail -n 4 | sed 's/^/criu: /' >&3; }
  kill -9 "$pid" 2>/dev/null || true
  rm -rf "$dir"
  exit "$ok"
)

finish() { # PATH
  mkdir -p "$CACHE"
  printf '%s\n' "$1" >"$CACHE/criu.path.tmp" && mv "$CACHE/criu.path.tmp" "$CACHE/criu.path"
  echo "$1"
  exit 0
}

chosen="$(cat "$CACHE/criu.path" 2>/dev/null || true)"
case "$chosen" in
"$CACHE"/criu-*-"$PATCHED"/*) ;;
"$CACHE"/*) chosen='' ;;
*) [ "${1:-}" != --build ] || chosen='' ;;
esac
if [ -n "$chosen" ] && [ -x "$chosen" ] && version_ok "$chosen"; then
  finish "$chosen"
fi
[ "$(id -u)" = 0 ] || fail "must run as root (checkpointing needs it)"

system="$(command -v criu || true)"
if [ -n "$system" ] && [ "${1:-}" != --build ]; then
  if version_ok "$system" && really_works "$system"; then
    say "using the system's $system"
    finish "$system"
  fi
  say "the system's $system is older than 4.2 or cannot dump and restore here: building one"
fi

command -v apt-get >/dev/null || fail "no apt-get here: install criu 4.2 or newer and put it in PATH"
missing=()
for package in "${BUILD_PACKAGES[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ "${#missing[@]}" -gt 0 ]; then
  say "installing build packages: ${missing[*]}"
  { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } \
    >/dev/null || fail "the build packages cannot be installed; install them by hand: ${missing[*]}"
  mkdir -p "$CACHE" && printf '%s\n' "${missing[@]}" >>"$CACHE/debian-packages" || true
fi

work="$(mktemp -d "${TMPDIR:-/tmp}/belayer-criu.XXXXXX")"
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/source"

# the archive that this machine already trusts, asked for the source packages of sid
codename="$(. /etc/os-release && echo "${VERSION_CODENAME:-}")"
uri="$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' 'Created-By: Packages' |
  awk -v release="$codename" '$1 == release && $2 ~ /debian\/?$/ { print $2; exit }')"
[ -n "$uri" ] || fail "no Debian archive is configured in apt: install criu 4.2 or newer and put it in PATH"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -f "$keyring" ] || fail "$keyring is missing: install the package debian-archive-keyring"
echo "deb-src [signed-by=$keyring] $uri sid main" >"$work/sources.list"
apt_options=(-o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null
  -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root -o Acquire::Languages=none)
say "reading the index of sid's source packages"
apt-get "${apt_options[@]}" update -qq >/dev/null || fail "the source index of sid cannot be read"
listing="$(apt-get "${apt_options[@]}" source --print-uris --only-source criu 2>/dev/null | grep 'orig\.tar\.[a-z0-9]* ')" ||
  fail "the archive has no source package of criu"
read -r quoted file _size checksum <<<"$listing"
url="${quoted//\'/}"
version="${file#criu_}"
version="${version%.orig.tar.*}"
target="$CACHE/criu-$version-$PATCHED"

say "fetching criu $version"
/usr/lib/apt/apt-helper "${apt_options[@]}" download-file "$url" "$work/source/$file" "$checksum" >/dev/null ||
  fail "the source of criu $version cannot be fetched, or its checksum is wrong"
if [ "$version" = "$PINNED_VERSION" ]; then
  echo "$PINNED_SHA256  $work/source/$file" | sha256sum --check --quiet >&2 || fail "criu $version has another checksum than expected"
fi
tar -C "$work/source" -xf "$work/source/$file"
tree="$(find "$work/source" -mindepth 1 -maxdepth 1 -type d | head -n 1)"

command -v patch >/dev/null || fail "the program patch is missing: install the package patch"
for change in "$PATCHES"/*.patch; do
  if patch -d "$tree" -p1 --dry-run --force --fuzz=0 <"$change" >/dev/null; then
    patch -d "$tree" -p1 --force --fuzz=0 <"$change" >/dev/null
  else # a newer version than the pinned one: it works without, only slower
    say "criu $version goes without ${change##*/}"
  fi
done

say "building criu $version (one to two minutes)"
# RUNDIR on tmpfs: the kernel's features are probed once per boot, not on every call (-26 ms each).
# Static, and without the optional libraries: a call starts in 1 ms instead of 3.
mkdir -p "$work/bin"
cat >"$work/bin/pkg-config" <<'WRAPPER'
#!/bin/sh
case "$*" in *nftables* | *gnutls* | *selinux*) exit 1 ;; esac
PATH=${PATH#*:} exec pkg-config --static "$@"
WRAPPER
chmod 755 "$work/bin/pkg-config"
build() { # LINK_OPTION...: the variable is the only one that reaches the last link and no other
  PATH="$work/bin:$PATH" make -C "$tree" -j"$(nproc)" criu RUNDIR=/dev/shm CONFIG_AMDGPU=n NO_GNUTLS=1 "$@" \
    >>"$work/build.log" 2>&1
}
binary="$tree/criu/criu"
if ! build GMONLDOPT=-static || ! really_works "$binary"; then
  say "no static build here, trying a dynamic one"
  rm -f "$binary"
  if ! build; then
    tail -n 30 "$work/build.log" >&2
    fail "the build failed"
  fi
fi
[ -x "$binary" ] || fail "the build made no program"
really_works "$binary" || fail "criu $version was built, but cannot dump and restore a process on this kernel ($(uname -r))"
mkdir -p "$target/sbin"
install -m 755 "$binary" "$target/sbin/criu.tmp" && mv "$target/sbin/criu.tmp" "$target/sbin/criu"
say "ready: $target/sbin/criu"
finish "$target/sbin/criu"
