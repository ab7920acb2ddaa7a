#!/bin/sh
# Collects the small run-time dependencies for a GPU machine on which nothing can be installed.
#
# The machine is expected to have Python 3.12 with torch, transformers, numpy, Pillow, safetensors, tokenizers
# and huggingface_hub. Everything else goes into .carry/site (which git ignores):
#
#   sh bench/carry.sh
#   PYTHONPATH=src:.carry/site python3 -m saccade bench ...        on that machine
#
# Versions are those of constraints.txt. PIP names the pip to use.
set -eu
cd "$(dirname "$0")/.."
PIP="${PIP:-.venv/bin/python -m pip}"
WHEELS=.carry/wheels
SITE=.carry/site
# Without PyAV: it is large and only videos need it.
PACKAGES="msgspec blake3 fastapi uvicorn httptools uvloop prometheus_client click rich jinja2 pydantic"
PACKAGES="$PACKAGES httpx"

rm -rf "$WHEELS" "$SITE"
mkdir -p "$WHEELS" "$SITE"
# shellcheck disable=SC2086
$PIP download --quiet --quiet --disable-pip-version-check --only-binary=:all: \
    --implementation cp --python-version 3.12 --abi cp312 --abi abi3 --abi none \
    --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
    --constraint constraints.txt --dest "$WHEELS" $PACKAGES
for wheel in "$WHEELS"/*.whl; do
    python3 -m zipfile -e "$wheel" "$SITE"
done
rm -rf "$WHEELS"
# Rich needs these only for source code and Markdown.
rm -rf "$SITE"/pygments* "$SITE"/markdown_it* "$SITE"/mdurl*
# Some extensions consist mostly of debug symbols.
if command -v strip >/dev/null; then
    find "$SITE" -name '*.so' -exec strip --strip-debug {} +
fi
du -sh "$SITE"
