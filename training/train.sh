#!/bin/sh
# The whole training on one GPU, in runs of at most ten minutes each. Repeat a line that was interrupted: the second run
# resumes from training/.state/last.pt, the later ones begin from the folder that those before made. Weights, log and the quick
# evaluation land in $OUT (default training/.state/out).
set -e
cd "$(dirname "$0")/.."
export OUT="${OUT:-training/.state/out}"
mkdir -p "$OUT"
python3 -m training.run --fresh --seconds 505 --upto 0.8 --settings training/log/settings_run1.json
python3 -m training.run --seconds 112 --upto 1.0 --settings training/log/settings_run1.json
python3 -m training.join "$OUT"
python3 -m training.run --weights src/saccade/embedded --begin 0.62 --seconds 450 --upto 1.0 --settings training/log/settings_run3.json --no-state
python3 -m training.join "$OUT"
python3 -m training.run --weights src/saccade/embedded --begin 0.62 --seconds 500 --upto 1.0 --settings training/log/settings_run4.json --no-state
python3 -m training.join "$OUT"
python3 -m training.run --weights src/saccade/embedded --begin 0.62 --seconds 376 --upto 1.0 --settings training/log/settings_run5.json --no-state
python3 -m training.join "$OUT"
python3 -m training.quality training/.state/weights.pt --count 200
