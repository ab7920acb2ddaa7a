"""Asks an engine in this process about new images, at full detail or less, and times the answers."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import click
import numpy as np
import torch

from saccade.engine.cost_prior import read_model_size
from saccade.engine.memory import DTYPES
from saccade.host.garbage_collection import existing_objects_frozen
from saccade.inputs.media.loader import SharedImage
from saccade.llm import LLM, RequestOutput
from saccade.lod.detail import DetailRequest
from saccade.lod.types import LodParams
from saccade.request import Delta, Pixels, RequestTiming
from saccade.sampling_params import SamplingParams
from saccade.tools.bench.inputs import RandomInputs
from saccade.tools.profiler.floors import floors

QUESTION_TOKENS = 32
PATCHES_OF_NOISE = 6  # in an image
WARM_ROUNDS, WARM_SINGLES = 8, 6  # most of them before a row of `serve`, and lone requests in each
FASTER = 1.03  # times the rate before: still getting faster


@dataclass(frozen=True)
class Level:
    """Full detail, or a share of its tokens."""

    share: float | None

    @property
    def name(self) -> str:
        return "full" if self.share is None else f"{self.share:.0%}"

    def params(self, full: int) -> LodParams | None:
        return None if self.share is None else LodParams(budget=max(1, int(full * self.share)), gate=False)


class LodBench:
    def __init__(self, llm: LLM, answer_tokens: int, seed: int) -> None:
        self.llm = llm
        self.front = llm.processor
        self._seed = seed
        self.answer_tokens = answer_tokens
        self.begin(0)

    def begin(self, *chapter: int) -> None:
        """From here on images and questions are those of a chapter, however many were asked before: warming
        takes as long as it takes."""
        self._inputs = RandomInputs(self.front.checkpoint, self.front.tokenizer, (self._seed, *chapter))
        self._rng = np.random.default_rng((self._seed, *chapter))

    def image(self, size: tuple[int, int]) -> Pixels:
        width, height = size
        drawn = np.full((height, width, 3), self._rng.integers(120, 240, 3), dtype=np.uint8)
        for _ in range(PATCHES_OF_NOISE):
            high, wide = max(height // 8, 1), max(width // 8, 1)
            y, x = int(self._rng.integers(height - high + 1)), int(self._rng.integers(width - wide + 1))
            drawn[y : y + high, x : x + wide] = self._rng.integers(0, 256, (high, wide, 1), dtype=np.uint8)
        return drawn

    @property
    def on_cuda(self) -> bool:
        return torch.device(self.llm.engine.info.device).type == "cuda"

    @property
    def steps(self) -> tuple[int, int]:
        """So far, and those of them that ran captured."""
        return self.llm.engine.stats().steps, self.llm.engine.graph_replays

    def ceiling(self, visual: int, requests: int) -> tuple[float, float]:
        """Requests a second and milliseconds to a first token at the chip's ceilings, where a question about
        so many visual tokens passes tower and model once."""
        info = self.llm.engine.info
        dtype = DTYPES[info.dtype]
        network = read_model_size(self.front.checkpoint.config, dtype.itemsize)
        least = floors(network, torch.device(info.device), dtype)
        prompt = visual + QUESTION_TOKENS
        merge = self.front.checkpoint.image.merge_size if self.front.checkpoint.image else 1
        first = least.encode(visual * merge**2) + least.prefill(prompt)
        answer = (self.answer_tokens - 1) * least.decode(requests, prompt) / requests
        return 1e3 / (first + answer), first

    def full_tokens(self, size: tuple[int, int]) -> int:
        image = self.front.checkpoint.image
        if image is None:
            raise click.ClickException("the model takes no images")
        rows, columns = image.token_grid(*size)
        return rows * columns

    def ask(
        self, images: Sequence[Pixels], level: Level, full: int, *, tokens: int | None = None
    ) -> tuple[float, list[RequestOutput]]:
        """One question about each; seconds for all of them."""
        prompts = [
            {
                "prompt_token_ids": self._inputs.about_image(QUESTION_TOKENS),
                "images": [one],
                "lod": level.params(full),
            }
            for one in images
        ]
        count = tokens or self.answer_tokens
        params = SamplingParams(max_tokens=count, min_tokens=count, temperature=0, ignore_eos=True)
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params, progress=False)
        return time.perf_counter() - began, outputs

    def questions(self, count: int, image: Pixels, level: Level, full: int) -> list["TimedQuestion"]:
        """So many about one image, all at once, each timed from before it is prepared; of several the
        image is read once, as the library does it."""
        params = SamplingParams(max_tokens=self.answer_tokens, temperature=0, ignore_eos=True)
        shown = SharedImage(image) if count > 1 else image
        engine, asked = self.llm.engine, {}
        with existing_objects_frozen():
            began = time.monotonic()
            for number in range(count):
                stages = RequestTiming(began, began)
                request = self.front.prepare_prompt(
                    self._inputs.about_image(QUESTION_TOKENS),
                    params,
                    f"question-{number}",
                    images=[shown],
                    trusted=True,
                    timing=stages,
                    detail_req=DetailRequest(params=level.params(full)),
                )
                looked = sum(one.view.tokens for one in request.media)
                asked[request.id] = TimedQuestion(stages, looked)
                stages.sent = time.monotonic()
                engine.submit(request)
            while not engine.idle:
                for delta in engine.step():
                    asked[delta.request_id].take(delta)
        return list(asked.values())


@dataclass
class TimedQuestion:
    """A question and what became of it."""

    stages: RequestTiming
    visual_tokens: int

    def take(self, delta: Delta) -> None:
        if delta.error:
            raise click.ClickException(delta.error)
        now, stages = time.monotonic(), self.stages
        stages.engine = delta.times or stages.engine
        stages.first, stages.last = stages.first or now, now
        self.visual_tokens += delta.zoomed.visual_tokens if delta.zoomed else 0

    @property
    def first(self) -> float:
        """Milliseconds to the first token."""
        return 1e3 * ((self.stages.first or 0.0) - self.stages.arrived)

    @property
    def whole(self) -> float:
        """Milliseconds to the last one."""
        return 1e3 * ((self.stages.last or 0.0) - self.stages.arrived)


def prepare(llm: LLM) -> None:
    """What an idle engine would do by and by: capture the steps and the views that may come."""
    began, done = time.perf_counter(), 0
    while llm.engine.warm_up():
        done += 1
    print(f"{done} shapes captured ahead in {time.perf_counter() - began:.1f} s", flush=True)


def warm(bench: LodBench, size: tuple[int, int], level: Level, full: int, requests: int) -> None:
    """One request at a time, then all at once, until that gets no faster: shapes met a few times over are
    captured, a piece per call. On a CPU, where nothing is, two requests do."""
    if not bench.on_cuda:
        bench.ask([bench.image(size)] * 2, level, full)
        return
    best, no_faster = 0.0, 0
    for _ in range(WARM_ROUNDS):
        for _ in range(WARM_SINGLES):
            bench.ask([bench.image(size)], level, full, tokens=1)
        seconds, _ = bench.ask([bench.image(size) for _ in range(requests)], level, full)
        no_faster = 0 if requests / seconds > FASTER * best else no_faster + 1
        best = max(best, requests / seconds)
        if no_faster == 2:
            return
