#!/usr/bin/env bash
# COMMAND | heartbeat.sh [SECONDS]: passes on what comes, and after every SECONDS (15) of silence says how long it lasts.
set -u
every=${1:-15}
silent=0
at_start=1 # of a line
while true; do
  if IFS= read -r -N 1 -t "$every" piece; then
    printf '%s' "$piece"
    silent=0
    [ "$piece" = $'\n' ] && at_start=1 || at_start=
  elif [ $? -gt 128 ]; then # nothing came in time
    silent=$((silent + every))
    if [ -n "$at_start" ]; then printf '    … %s s\n' "$silent"; else printf '%s s … ' "$silent"; fi
  else
    exit 0
  fi
done
