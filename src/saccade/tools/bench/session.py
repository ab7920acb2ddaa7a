"""One engine being measured in this process: asks it, times it, refuses what it cannot answer in full.

takes   questions as token ids and pictures
gives   seconds, and tokens where they are asked for
owns    the engine, the stream of inputs, the progress bar
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from PIL import Image
from rich.progress import Progress

from saccade.checkpoint import Checkpoint
from saccade.errors import ConfigError, SaccadeError
from saccade.llm import LLM
from saccade.sampling_params import SamplingParams
from saccade.tools.bench.anchors import Scale, chosen_scale
from saccade.tools.bench.inputs import Inputs
from saccade.tools.bench.options import BenchOptions, Workload

T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    tokens: list[int]  # one placeholder where the picture is
    picture: Image.Image | None = None


@dataclass(frozen=True)
class Asked:
    """How long a batch of questions took, and what came out."""

    seconds: float
    answers: list[list[int]]


def greedy(output_tokens: int) -> SamplingParams:
    """Exactly that many tokens, the likeliest each time, whatever the checkpoint's defaults are."""
    return SamplingParams(
        max_tokens=output_tokens,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        ignore_eos=True,
    )


class Session:
    def __init__(self, llm: LLM, checkpoint: Checkpoint, options: BenchOptions, bar: Progress) -> None:
        self.llm = llm
        self.checkpoint = checkpoint
        self.options = options
        self.inputs = Inputs(checkpoint, llm.front.tokenizer, options.seed)
        self._bar = bar

    @property
    def on_cuda(self) -> bool:
        return self.llm.engine.info.device.startswith("cuda")

    def scale(self, workload: Workload) -> Scale:
        return chosen_scale(workload, self.options)

    def ask(self, questions: Sequence[Question], output_tokens: int) -> Asked:
        """Everything from the call to the last token, decoding of the text included."""
        prompts: list[dict[str, Any]] = [
            {"prompt_token_ids": one.tokens} | ({} if one.picture is None else {"images": [one.picture]})
            for one in questions
        ]
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, greedy(output_tokens), progress=False)
        seconds = time.perf_counter() - start
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        short = [len(answer) for answer in answers if len(answer) != output_tokens]
        if short:
            raise SaccadeError(f"an answer has {short[0]} tokens where {output_tokens} were asked for")
        return Asked(seconds, answers)

    def repeat(self, workload: Workload, times: int, once: Callable[[], T]) -> list[T]:
        """`once` as often as wanted, after the warm-up; the warm-up's results are dropped."""
        warmup = self.options.warmup
        task = self._bar.add_task(workload.name, total=warmup + times)
        results = []
        for number in range(warmup + times):
            result = once()
            if number >= warmup:
                results.append(result)
            self._bar.advance(task)
        return results

    def require_context(self, workload: Workload, scale: Scale) -> int:
        """Tokens of one request at this scale; ConfigError when the engine cannot hold them."""
        visual = self._visual_tokens(scale.size) if workload.needs_vision else 0
        wanted = scale.input_tokens + scale.output_tokens + visual
        most = self.llm.engine.info.max_model_len
        if wanted > most:
            seen = f", {visual} of them for the picture" if visual else ""
            raise ConfigError(
                f"{workload.name} asks for {wanted} tokens a request{seen}; the engine holds {most}: lower"
                " --input-tokens, --output-tokens or --image-size, or raise --max-model-len"
            )
        return wanted

    def require_room(self, workload: Workload, scale: Scale) -> None:
        """A decode step at batch N is one only if all N fit together."""
        info = self.llm.engine.info
        if scale.requests > info.max_num_seqs:
            raise ConfigError(
                f"{workload.name} runs {scale.requests} sequences together; the engine takes"
                f" {info.max_num_seqs}: raise --max-num-seqs"
            )
        blocks = scale.requests * -(-self.require_context(workload, scale) // info.block_size)
        if blocks > info.num_blocks:
            raise ConfigError(
                f"{workload.name} needs {blocks} KV blocks at once; the pool has {info.num_blocks}: enlarge"
                " it (--kv-cache-bytes), or lower --input-tokens or --output-tokens"
            )

    def _visual_tokens(self, size: tuple[int, int]) -> int:
        """A picture's tokens and its frame's."""
        processing = self.checkpoint.image
        if processing is None:
            raise ConfigError(f"{self.checkpoint.name} takes no pictures")
        rows, columns = processing.grid(*size)
        return rows * columns // processing.merge_size**2 + 2
