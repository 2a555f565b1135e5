# To be sourced: sets and exports the cache folder of this checkout, as `cache` and BELAYER_CACHE.
#
# An exported BELAYER_CACHE wins, then what set-up wrote down in .venv (belayer.ownership reads it too), then the default.
_record=$(dirname "${BASH_SOURCE[0]}")/../.venv/belayer-cache
cache=${BELAYER_CACHE:-$(cat "$_record" 2>/dev/null || true)}
cache=$(realpath -ms -- "${cache:-${XDG_CACHE_HOME:-$HOME/.cache}/belayer}")
export BELAYER_CACHE=$cache
