#!/bin/sh
# Train everything under coppice/bundled/ from scratch. Run from the repository root; needs a GPU.
set -eu
data=${DATA_DIR:-training/data}
models=${MODELS_DIR:-coppice/bundled}
prompts=${PROMPTS:-benchmarks/prompts/heldout.jsonl}

python3 -m training.corpus --data-dir "$data"
python3 -m training.train_tokenizer --data-dir "$data"
python3 -m training.make_prompts --data-dir "$data" --output "$prompts"
python3 -m training.train_target --data-dir "$data" --output "$models/target"
python3 -m training.train_standalone --data-dir "$data" \
    --target "$models/target" --output "$models/standalone"
python3 -m training.train_eagle3 --data-dir "$data" \
    --target "$models/target" --output "$models/eagle3"
python3 -m training.evaluate --data-dir "$data" --models "$models" --prompts "$prompts"
