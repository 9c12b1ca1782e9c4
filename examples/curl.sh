#!/bin/sh
# Sends one question to a running `updraft serve`. The answer's headers say which tier answered.
set -eu
URL="${OPENAI_BASE_URL:-http://127.0.0.1:4114/v1}"
MODEL="${MODEL:-auto}"
curl --fail-with-body --silent --show-error --include "$URL/chat/completions" \
  -H 'content-type: application/json' \
  -d "{\"model\": \"$MODEL\", \"messages\": [{\"role\": \"user\", \"content\": \"What is 17 + 25?\"}]}"
