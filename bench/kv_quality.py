"""What 8-bit keys and values cost in quality and save in bytes, on the embedded model's fixed set.

    python -m bench.kv_quality [--limit 10] [--folder DIR] [--only NAME ...]

Runs `saccade eval` once for each way of keeping the KV cache and prints a table: accuracy, how many answers
are word for word those of the exact run, and bytes per token of each kind of block. Runs whose JSON is in
the folder already are not repeated.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from saccade.schedule.prior import Network
from saccade.simulate.command import EMBEDDED

WAYS: dict[str, list[str]] = {
    "model's dtype": [],
    "all fp8": ["--kv-cache-dtype", "fp8"],
    "all int8": ["--kv-cache-dtype", "int8"],
    "pictures fp8": ["--kv-vision-dtype", "fp8"],
    "pictures int8": ["--kv-vision-dtype", "int8"],
}


def run(name: str, limit: int, folder: Path) -> dict[str, Any]:
    path = folder / f"{name.replace(' ', '_')}.{limit}.json"
    if not path.exists():
        options = ["--limit", str(limit), "--workers", "0", "--no-progress", "--json", str(path)]
        command = [sys.executable, "-m", "saccade.cli", "eval", *options, *WAYS[name]]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def answers(report: dict[str, Any]) -> list[str]:
    return [question["answers"]["full"]["text"] for question in report["questions"]]


def bytes_of(name: str, value_bytes: int) -> tuple[int, int]:
    """Of a token in text's blocks and in pictures' blocks, with values of so many bytes."""
    text = json.loads((EMBEDDED / "config.json").read_text(encoding="utf-8"))["text_config"]
    sizes = (text["num_hidden_layers"], text["num_attention_heads"], text["num_key_value_heads"])
    network = Network(*sizes, text["head_dim"], text["hidden_size"], text["vocab_size"], 1, value_bytes)
    plain, small = network.kv_bytes, network.small_kv_bytes
    return (small if name.startswith("all") else plain), (plain if name == "model's dtype" else small)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=10, help="questions of each of the 20 tasks")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/kv_quality"))
    parser.add_argument("--only", nargs="*", default=list(WAYS))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    reports = {name: run(name, options.limit, options.folder) for name in options.only}
    exact = answers(reports["model's dtype"]) if "model's dtype" in reports else None
    print("| KV cache | questions | right | 95% interval | same answer | float32: text, pictures | 16 bits |")
    print("|:--|--:|--:|--:|--:|--:|--:|")
    for name, report in reports.items():
        overall = report["levels"][0]["overall"]
        count = overall["questions"]
        same = "-" if exact is None else sum(map(str.__eq__, answers(report), exact))
        wide, narrow = (", ".join(f"{each:,}" for each in bytes_of(name, size)) for size in (4, 2))
        print(
            f"| {name} | {count} | {100 * overall['accuracy']:.1f}% | {100 * overall['low']:.1f} - "
            f"{100 * overall['high']:.1f} | {same} | {wide} | {narrow} |"
        )


if __name__ == "__main__":
    main()
