#!/bin/sh
# Two nodes and a gateway on one machine, with the packaged pocket models; stops all of them on Ctrl-C.
#   sh examples/gateway_and_nodes.sh [FOLDER FOR KEYS AND USAGE]
set -eu
STATE="${1:-$(mktemp -d)}"
WEIGHTS="$(python -c 'import updraft, pathlib; print(pathlib.Path(updraft.__file__).parent / "embedded" / "weights")')"
PIDS=""
trap 'kill $PIDS 2>/dev/null || true' EXIT
trap 'exit 130' INT TERM
for PORT in 8001 8002; do
  updraft node --model "$WEIGHTS/pocket-large" --draft "$WEIGHTS/pocket-small.gguf" --port "$PORT" &
  PIDS="$PIDS $!"
done
KEY="$(updraft keys create my-app --keys "$STATE/keys.sqlite3")"
echo "key for apps: $KEY"
updraft gateway --node http://127.0.0.1:8001 --node http://127.0.0.1:8002 \
  --keys "$STATE/keys.sqlite3" --ledger "$STATE/usage.sqlite" --port 8000 &
PIDS="$PIDS $!"
wait
