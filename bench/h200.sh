#!/bin/sh
# Measures Qwen3-VL-8B shapes with random weights on a GPU machine that has only a system Python.
#
#   sh bench/carry.sh                       first, where there is a network (see there)
#   sh bench/h200.sh quick [FOLDER]         does it load and answer, and four rows at reduced scale; < 4 minutes
#   sh bench/h200.sh all [FOLDER]           every row of the anchors
#
# FOLDER (default: /tmp) receives the JSON; the table is printed.
set -eu
cd "$(dirname "$0")/.."
KIND="${1:-quick}"
FOLDER="${2:-/tmp}"
MODEL=/tmp/qwen3-vl-8b
export PYTHONPATH="src:.carry/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

python3 bench/shapes.py qwen3-vl-8b "$MODEL"
case "$KIND" in
quick)
    timeout 100 python3 bench/answer.py "$MODEL" --load-format dummy
    timeout 130 python3 -m saccade.cli bench "$MODEL" --load-format dummy --max-model-len 32768 \
        --workload text_bs1 --workload text_bs32 --workload ttft_unique_1024x1024 --workload vlm_unique \
        --output-tokens 64 --requests 32 --repeat 2 --json "$FOLDER/quick.json"
    ;;
all)
    python3 -m saccade.cli bench "$MODEL" --load-format dummy --max-model-len 32768 --json "$FOLDER/all.json"
    ;;
*)
    echo "usage: sh bench/h200.sh quick|all [FOLDER]" >&2
    exit 2
    ;;
esac
