"""Loads a model and answers one text and one image question: the shortest proof that it runs on a machine.

python bench/answer.py MODEL [--load-format dummy]
"""

import argparse
import time

from PIL import Image

from saccade.llm import LLM
from saccade.sampling_params import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer one text and one image question.")
    parser.add_argument("model")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    given = parser.parse_args()
    start = time.perf_counter()
    llm = LLM(given.model, load_format=given.load_format, progress=False)
    print(f"loaded in {time.perf_counter() - start:.1f} s: {llm.engine.info}", flush=True)
    image = Image.effect_mandelbrot((1024, 1024), (-2, -1.5, 1, 1.5), 100).convert("RGB")
    text = {"type": "text", "text": "What is this?"}
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    for parts in ([text], [{"type": "image", "image": image}, text]):
        start = time.perf_counter()
        output = llm.chat([{"role": "user", "content": parts}], params)[0]
        seconds = time.perf_counter() - start
        print(f"{seconds * 1e3:.0f} ms, {output.usage}: {list(output.outputs[0].token_ids)}", flush=True)
    llm.engine.check()
    print("every block is accounted for")
    llm.close()


if __name__ == "__main__":
    main()
