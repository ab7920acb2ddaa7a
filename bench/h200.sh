#!/bin/sh
# Measures Qwen3-VL-8B shapes with random weights on a GPU machine that has only a system Python.
#
#   sh bench/carry.sh                   first, where there is a network (see there)
#   sh bench/h200.sh MODE [FOLDER]      FOLDER (default: /tmp) receives JSON and traces; tables are printed last
#
# Every mode ends within 9 minutes: a part that takes longer than its share is cut off and named. Modes:
#
#   quick     it loads and answers; four rows at reduced scale                                         4 min
#   anchors   every row of `saccade bench` but mixed_load and start_to_ready, twice each              5 min
#   kernels   every kernel against its reference implementation, then their times                      5 min
#   sanitise  compute-sanitizer over the kernel checks                                                 8 min
#   agree     kernels against the reference, 300 mixed questions in bf16, embedded and random weights  8 min
#   profile   stages, kernels and gaps at batch 1, 32 and 256; traces for Perfetto                     6 min
#   rows      decode steps and TTFT                                                                    8 min
#   many      throughput of many requests at once                                                      8 min
#   load      mixed load over HTTP: phases of 20 s                                                     3 min
#   stages    a new image, the same again, the same after a restart, stage by stage                    4 min
#   start     start to ready: cold (no compiled artefacts), then warm, three times                     5 min
#   scaling   steps over batch and context, TTFT over image size, with plots                           9 min
#   growth    memory over 2,000 requests                                                               8 min
#   vision    from pixels to features by size                                                          5 min
#   lod       level of detail: requests/s and TTFT at 25% and 12%, stages, ten questions               8 min
#   all       every row in one run, without a time limit
#
# SHAPES=qwen3-vl-2b uses other shapes; MODEL=embedded and DEVICE=cpu try a mode without a GPU.
set -eu
cd "$(dirname "$0")/.."
MODE="${1:-quick}"
FOLDER="${2:-/tmp}"
SHAPES="${SHAPES:-qwen3-vl-8b}"
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="src:.carry/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$FOLDER"

if [ -z "${MODEL:-}" ]; then
    MODEL="/tmp/$SHAPES"
    "$PYTHON" bench/shapes.py "$SHAPES" "$MODEL"
    ENGINE="--load-format dummy --max-model-len 32768 ${ENGINE:-}"
fi
ENGINE="${ENGINE:-} --device ${DEVICE:-cuda}"
STATUS=0

# within SECONDS COMMAND...: cut off and named when it takes longer; the mode continues.
within() {
    limit=$1
    shift
    began=$(date +%s)
    code=0
    timeout --kill-after=10 "$limit" "$@" || code=$?
    echo "== $(($(date +%s) - began)) s, status $code: $*"
    [ "$code" -eq 0 ] || STATUS=1
    if [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then echo "== CUT OFF after $limit s"; fi
}
# bench SECONDS NAME WORKLOAD...: named workloads.
bench() {
    limit=$1 name=$2
    shift 2
    chosen=""
    for workload in "$@"; do chosen="$chosen --workload $workload"; done
    rm -f "$FOLDER/$name.json"
    # shellcheck disable=SC2086
    within "$limit" "$PYTHON" -m saccade bench "$MODEL" $ENGINE $chosen ${BENCH:-} --json "$FOLDER/$name.json"
    [ ! -f "$FOLDER/$name.json" ] || "$PYTHON" -m bench.anchors "$FOLDER/$name.json" || STATUS=1
}

case "$MODE" in
quick)
    # shellcheck disable=SC2086
    within 100 "$PYTHON" bench/answer.py "$MODEL" ${LOAD:---load-format dummy}
    BENCH="--output-tokens 64 --requests 32 --repeat 2"
    bench 130 quick text_bs1 text_bs32 ttft_unique_1024x1024 vlm_unique
    ;;
anchors)
    # One engine for all: its start takes as long as several rows. The last rows are cut off first.
    BENCH="--repeat 2"
    bench 290 anchors ttft_unique_448x448 ttft_unique_1024x1024 ttft_unique_1920x1080 ttft_repeat \
        text_bs1 text_bs8 text_bs32 vlm_repeat vlm_16img_x8q vlm_unique text_bs128 text_throughput text_bs256
    ;;
kernels)
    within 120 "$PYTHON" -m bench.kernels --check
    within 170 "$PYTHON" -m bench.kernels
    ;;
sanitise)
    # The kernels are compiled first, without the sanitizer; then it runs one part at a time.
    SANITIZER=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
    within 90 "$PYTHON" -m bench.kernels --check
    for part in decode compact finish points products qkv chosen sample pixels; do
        within 60 "$SANITIZER" --tool memcheck --error-exitcode 3 --log-file "$FOLDER/memcheck-$part.log" \
            "$PYTHON" -m bench.kernels --check --parts "$part"
        tail -n 2 "$FOLDER/memcheck-$part.log" || true
    done
    ;;
agree)
    # Answers of trained weights do not depend on rounding; random weights meet a tie every few tokens.
    within 60 "$PYTHON" -m bench.agree embedded --device "${DEVICE:-cuda}" --dtype bfloat16 \
        --questions "${QUESTIONS:-300}" --answer-tokens 32 --reference-batch 50
    # shellcheck disable=SC2086
    within 260 "$PYTHON" -m bench.agree "$MODEL" $ENGINE --questions "${QUESTIONS:-300}" --answer-tokens 32 --reference-batch 50
    # shellcheck disable=SC2086
    within 200 "$PYTHON" -m bench.agree "$MODEL" $ENGINE --questions "${FEWER:-100}" --answer-tokens 32 --deterministic
    ;;
profile)
    for batch in ${BATCHES:-1 32 256}; do
        # shellcheck disable=SC2086
        within 120 "$PYTHON" -m saccade profile "$MODEL" $ENGINE --batch "$batch" ${PROFILE:-} \
            --trace "$FOLDER/trace-$batch.json.gz" --json "$FOLDER/profile-$batch.json"
    done
    ;;
rows)
    bench 270 steps text_bs1 text_bs8 text_bs32 text_bs128 text_bs256
    bench 240 first ttft_unique_448x448 ttft_unique_1024x1024 ttft_unique_1920x1080 ttft_repeat
    ;;
many)
    bench 140 throughput text_throughput
    bench 360 images vlm_unique vlm_repeat vlm_16img_x8q
    ;;
load)
    # `mixed_load` waits until the idle engine has captured its CUDA graphs. Each phase prints its rows.
    BENCH="--phase-seconds 20 --image-rate 6 --image-rate 15"
    bench 240 load mixed_load
    ;;
stages)
    # shellcheck disable=SC2086
    within 240 "$PYTHON" -m bench.stages "$MODEL" $ENGINE ${STAGES:-}
    ;;
start)
    # Compiled kernels go to a folder of this run: empty at the first start, full at the second.
    FRESH=$(mktemp -d)
    export TRITON_CACHE_DIR="$FRESH/triton" TORCHINDUCTOR_CACHE_DIR="$FRESH/inductor"
    export XDG_CACHE_HOME="$FRESH/cache" CUDA_CACHE_PATH="$FRESH/cuda"
    BENCH="--repeat 1"
    bench 150 start-cold start_to_ready
    BENCH="--repeat 3"
    bench 150 start-warm start_to_ready
    rm -rf "$FRESH"
    ;;
scaling)
    # shellcheck disable=SC2086
    within 200 "$PYTHON" -m bench.scaling "$MODEL" $ENGINE --parts batch --max-num-seqs 512 ${SCALING:-} \
        --plots "$FOLDER"
    # shellcheck disable=SC2086
    within 170 "$PYTHON" -m bench.scaling "$MODEL" $ENGINE --parts context --max-model-len "${LONGEST:-66560}" ${SCALING:-} \
        --plots "$FOLDER"
    # shellcheck disable=SC2086
    within 150 "$PYTHON" -m bench.scaling "$MODEL" $ENGINE --parts images ${SCALING:-} --plots "$FOLDER"
    ;;
growth)
    # shellcheck disable=SC2086
    within 520 "$PYTHON" -m bench.growth "$MODEL" $ENGINE --requests "${REQUESTS:-2000}"
    ;;
vision)
    within 300 "$PYTHON" -m bench.vision
    ;;
lod)
    # shellcheck disable=SC2086
    within 240 "$PYTHON" -m bench.lod "$MODEL" $ENGINE --part stages --part questions ${SIZES:---image-size 1024x1024 --image-size 2048x2048}
    # shellcheck disable=SC2086
    within 240 "$PYTHON" -m bench.lod "$MODEL" $ENGINE --part serve ${SIZES:---image-size 1024x1024 --image-size 2048x2048} ${LOD:-}
    ;;
all)
    # shellcheck disable=SC2086
    "$PYTHON" -m saccade bench "$MODEL" $ENGINE --json "$FOLDER/all.json"
    "$PYTHON" -m bench.anchors "$FOLDER/all.json"
    ;;
*)
    sed -n '3,27p' "$0" >&2
    exit 2
    ;;
esac
exit $STATUS
