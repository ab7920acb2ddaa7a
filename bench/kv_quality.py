"""What 8-bit keys and values cost in quality and save in bytes, on the embedded model's fixed set.

    python -m bench.kv_quality [--limit 10] [--folder DIR] [--lod SHARE] [--only NAME ...]

Asks the questions once for each way of keeping the KV cache and prints a table: accuracy, how many answers
are word for word those of the exact run, and the bytes of the KV blocks that a question filled, with values
of 32 and of 16 bits where they are not in 8. With --lod every question is asked at level of detail with that
share of full detail's tokens; then an image's global view can be in 8 bits while zoomed views and text are
not. Answers are kept in the folder; what is there already is not asked again.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from saccade import LLM
from saccade.checkpoint import Checkpoint, open_checkpoint
from saccade.engine.cost_prior import read_model_size
from saccade.lod.checkpoint_views import read_views
from saccade.tools.environment import fingerprint
from saccade.tools.evaluation.command import greedy
from saccade.tools.evaluation.lod_methods import BALANCED, FULL, TrialFactory
from saccade.tools.evaluation.question_set import SEED, chosen_tasks, chunks, correct, sample_keys
from saccade.tools.evaluation.report import wilson

WAYS: dict[str, dict[str, Any]] = {
    "model's dtype": {},
    "all fp8": {"kv_cache_dtype": "fp8"},
    "all int8": {"kv_cache_dtype": "int8"},
    "images fp8": {"kv_vision_dtype": "fp8"},
    "images int8": {"kv_vision_dtype": "int8"},
    "global views fp8": {"kv_vision_dtype": "fp8", "kv_vision_views": "global"},
    "global views int8": {"kv_vision_dtype": "int8", "kv_vision_views": "global"},
}
BATCH = 16


def ask(name: str, limit: int, share: float | None) -> dict[str, Any]:
    llm = LLM("embedded", progress=False, **WAYS[name])
    processing = llm.processor.checkpoint.image
    if processing is None:
        raise RuntimeError("the embedded model takes no images")
    bench = TrialFactory(processing, read_views(llm.processor.checkpoint.config, processing.factor).rule)
    wanted = [(task, index, SEED) for task, index in sample_keys(chosen_tasks(()), 200, limit)]
    found = []
    for examples in chunks(wanted, BATCH, 0):
        method = FULL if share is None else BALANCED
        trials = [bench.trial(example, method, share) for example in examples]
        outputs = llm.chat([_messages(one.image, one.example.question) for one in trials], greedy(64),
                           lod=[trial.lod for trial in trials], progress=False)  # fmt: skip
        for example, output in zip(examples, outputs, strict=True):
            text = output.outputs[0].text
            right = correct(example, text)
            found.append({"text": text, "right": right, "visual": output.usage.visual_tokens})
    stats = llm.engine.stats()
    # Nothing was given up: the blocks kept are those the questions filled, each once.
    if not stats.blocks_free:
        raise RuntimeError("the KV cache was too small to keep every block; ask fewer questions")
    blocks = {"text": stats.blocks_cached - stats.vision_blocks_cached, "vision": stats.vision_blocks_cached}
    return {"way": name, "share": share, "answers": found, "blocks": blocks}


def _messages(image: Any, question: str) -> list[dict[str, Any]]:
    content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
    return [{"role": "user", "content": content}]


def report(name: str, limit: int, share: float | None, folder: Path, weights: str) -> dict[str, Any]:
    """Asked, or found in the folder: of the same weights, named by their fingerprint."""
    path = folder / f"{name.replace(' ', '_')}.{limit}.{share}.{weights}.json"
    if not path.exists():
        path.write_text(json.dumps(ask(name, limit, share)), encoding="utf-8")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def kilobytes(report: dict[str, Any], checkpoint: Checkpoint, value_bytes: int) -> float:
    """Of the KV blocks a question filled on average."""
    network, way = read_model_size(checkpoint.config, value_bytes), WAYS[report["way"]]
    text = network.quantized_kv_bytes if "kv_cache_dtype" in way else network.kv_bytes
    vision = network.quantized_kv_bytes if "kv_vision_dtype" in way else text
    blocks = report["blocks"]
    total = int(blocks["text"]) * text + int(blocks["vision"]) * vision
    return 16 * total / len(report["answers"]) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=10, help="questions of each of the 20 tasks")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/kv_quality"))
    parser.add_argument("--lod", type=float, help="share of full detail's visual tokens")
    parser.add_argument("--only", nargs="*", help=f"of {', '.join(WAYS)}")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    names = options.only or [name for name in WAYS if options.lod or "global" not in name]
    checkpoint = open_checkpoint("embedded")
    exact: list[str] | None = None
    print("| KV cache | questions | right | 95% interval | same answer | visual tokens | kB | in 16 bits |")
    print("|:--|--:|--:|--:|--:|--:|--:|--:|")
    for name in names:
        found = report(name, options.limit, options.lod, options.folder, fingerprint(checkpoint))
        answers = found["answers"]
        texts = [one["text"] for one in answers]
        exact = texts if name == "model's dtype" else exact
        right, count = sum(one["right"] for one in answers), len(answers)
        low, high = wilson(right, count)
        same = "-" if exact is None else str(sum(map(str.__eq__, texts, exact)))
        wide, narrow = (kilobytes(found, checkpoint, size) for size in (4, 2))
        visual = sum(one["visual"] for one in answers) / count
        print(
            f"| {name} | {count} | {right / count:.1%} | {100 * low:.1f} - {100 * high:.1f} | {same} | "
            f"{visual:.0f} | {wide:,.0f} | {narrow:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
