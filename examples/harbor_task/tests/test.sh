#!/bin/bash
# right, and every command has happened exactly once, whatever was killed meanwhile
if [ "$(cat /app/sum.txt)" = 42 ] && [ "$(cat /app/attempts-harbor)" = begun ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
