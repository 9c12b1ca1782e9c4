#!/bin/sh
# Calibrates a routing policy for your own pair of models from graded prompts, and starts a server that uses it.
#   CLOUD_KEY=sk-... sh examples/calibrate.sh graded.csv model.gguf https://host/v1 big
# graded.csv has the columns prompt, weak and strong (docs/guides/calibrate.md).
set -eu
DATA="$1" LOCAL="$2" CLOUD="$3" CLOUD_MODEL="$4"
updraft calibrate --data "$DATA" --local "$LOCAL" --cloud-model "$CLOUD_MODEL" --quality 0.97
updraft serve --local "$LOCAL" --cloud-url "$CLOUD" --cloud-model "$CLOUD_MODEL" --api-key-env CLOUD_KEY --quality 0.97
