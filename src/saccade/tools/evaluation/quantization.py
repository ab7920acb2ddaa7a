"""`saccade eval-quant`: a model quantised by several schemes, each compared with the unquantised model.

The unquantised model (the base) answers every prompt greedily. Every scheme then computes the logits of the
same prompt and answer in one prefill (forced decoding), and answers by itself.
"""

import gc
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saccade.checkpoint import Checkpoint, open_checkpoint
from saccade.config import EngineConfig
from saccade.errors import ConfigError
from saccade.llm import LLM, RequestOutput
from saccade.models.interface import LanguageModel
from saccade.quantization.stages import STAGES, parse_quantization
from saccade.request import Pixels
from saccade.sampling_params import SamplingParams
from saccade.tools.environment import commit, fingerprint, run_info
from saccade.tools.evaluation.command import ask_all, check_model, greedy, running_engine, user_message
from saccade.tools.evaluation.quantization_report import (
    IMAGES,
    TEXT,
    Answer,
    PromptResult,
    QuantReport,
    SchemeResult,
    TokenStats,
    as_json,
    load_plotter,
    print_report,
)
from saccade.tools.evaluation.question_set import Example, correct
from saccade.tools.options import QuantEvalOptions
from saccade.tools.report import check_json_target, progress_bar, write_json

BASE = "base"
SPEED_PROMPT = "The quick brown fox jumps over the lazy dog."
# Of several kinds, as users send them: facts, instructions, lists, code, arithmetic, rewriting.
TEXT_PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "Name three uses of copper.",
    "Write a Python function that returns the largest of three numbers.",
    "What is 17 times 23?",
    "Translate 'good morning' into Spanish, French and German.",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet, and when?",
    "Summarise the water cycle for a child.",
    "List five animals that live in the desert.",
    "What is the difference between a virus and a bacterium?",
    "Rewrite this politely: Send me the report now.",
    "How does a bicycle stay upright?",
    "Continue the story: The door opened slowly, and",
    "Which weighs more, a kilogram of iron or a kilogram of feathers?",
    "Explain what a hash table is.",
    "Write a SQL query that counts the orders of each customer.",
    "What causes the seasons on Earth?",
    "Suggest a name for a small bakery and say why.",
    "Convert 100 degrees Fahrenheit to Celsius.",
    "What are the primary colours?",
    "Give an example of a sentence in the passive voice.",
    "How many days has February in a leap year?",
)


def run(engine: EngineConfig, options: QuantEvalOptions) -> int:
    """Returns the exit status."""
    report = evaluate(engine, options)
    print_report(report)
    write_json(options.json, as_json(report))
    if options.plot is not None:
        load_plotter().save(report, options.plot)
    return 0


def evaluate(engine: EngineConfig, options: QuantEvalOptions) -> QuantReport:
    checkpoint = open_checkpoint(engine.model)
    schemes = _check(engine, options, checkpoint)
    weights, source, start = fingerprint(checkpoint), commit(), time.perf_counter()
    results = []
    with tempfile.TemporaryDirectory(prefix="saccade-logits-") as folder:
        references = References(Path(folder))
        for name, config in {BASE: engine, **schemes}.items():
            results.append(_measure(name, config, options, references, checkpoint))
    return QuantReport(
        run=run_info(engine, checkpoint, source),
        weights=weights,
        options=options,
        seconds=time.perf_counter() - start,
        schemes=tuple(results),
    )


def _check(
    engine: EngineConfig, options: QuantEvalOptions, checkpoint: Checkpoint
) -> dict[str, EngineConfig]:
    """Refuses what cannot work before anything is loaded; gives the engine's config of each scheme."""
    if engine.quantization is not None:
        raise ConfigError("--quantization would quantise the base too; name the scheme in --schemes alone")
    if "quantization_config" in checkpoint.config:
        raise ConfigError(
            f"{checkpoint.name} is quantised already; give the unquantised checkpoint as MODEL, this one"
            " in --schemes"
        )
    if checkpoint.image is not None:
        check_model(engine, options, checkpoint)
    elif engine.load_format == "dummy":
        raise ConfigError("dummy weights have no meaning to lose; leave out --load-format dummy")
    check_json_target(options.json)
    if options.plot is not None:
        load_plotter()
    found: dict[str, EngineConfig] = {}
    for name in [name for text in options.schemes for name in split_schemes(text)]:
        if name in found:
            raise ConfigError(f"--schemes names {name} twice")
        found[name] = _scheme_config(name, engine, checkpoint)
    return found


def split_schemes(text: str) -> list[str]:
    """At the commas, except between the stages of one scheme: "fp8,decoder=int8,head=int8" is two schemes."""
    schemes: list[str] = []
    stages: set[str] = set()  # of the last scheme
    for part in (part.strip() for part in text.split(",")):
        stage, given, _ = part.partition("=")
        if given and stage in STAGES and stages and stage not in stages:
            schemes[-1] += f",{part}"
        else:
            schemes.append(part)
            stages = set()
        if given and stage in STAGES:
            stages.add(stage)
    return schemes


def _scheme_config(name: str, engine: EngineConfig, checkpoint: Checkpoint) -> EngineConfig:
    try:
        parse_quantization(name)
        return replace(engine, quantization=name)
    except ConfigError as error:
        if not name or not Path(name).is_dir():
            raise ConfigError(f"--schemes: {error.message}, nor is it a folder") from None
    vocabulary = open_checkpoint(name).vocab_size
    if vocabulary != checkpoint.vocab_size:
        raise ConfigError(
            f"--schemes: {name} has {vocabulary} tokens, {checkpoint.name} {checkpoint.vocab_size};"
            " give a folder with the same model"
        )
    return replace(engine, model=name)


# -- prompts, and what the base says to them


@dataclass(frozen=True)
class QuantPrompt:
    kind: str  # TEXT or IMAGES
    key: tuple[str, int]  # task and index
    text: str
    image: Pixels | None = None
    example: Example | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        return (
            [{"role": "user", "content": self.text}]
            if self.image is None
            else user_message(self.image, self.text)
        )


@dataclass(frozen=True)
class Reference:
    """The base's answer."""

    prompt_ids: tuple[int, ...]  # one placeholder per image
    answer: Answer


class References:
    """The base's answers, and its logits in files: of a large vocabulary they outgrow the memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[tuple[str, int], Reference] = {}

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._found

    def __getitem__(self, key: tuple[str, int]) -> Reference:
        return self._found[key]

    def add(self, key: tuple[str, int], reference: Reference, logits: Tensor) -> None:
        self._found[key] = reference
        np.save(self._file(key), logits.numpy(), allow_pickle=False)

    def logits(self, key: tuple[str, int]) -> Tensor:
        """[answer's tokens, vocabulary] float32."""
        return torch.from_numpy(np.load(self._file(key), allow_pickle=False))

    def _file(self, key: tuple[str, int]) -> Path:
        return self._folder / f"{key[0]}-{key[1]}.npy"


# -- one scheme


def _measure(
    name: str, config: EngineConfig, options: QuantEvalOptions, references: References, checkpoint: Checkpoint
) -> SchemeResult:
    # Every position is computed in a prefill that Python sees: no prefix cache, no CUDA graphs.
    exposed = replace(config, prefix_caching=False, pin_prefix=(), graphs="off", early_launch="auto")
    with progress_bar(options.progress, remaining=True) as bar:
        with running_engine(exposed) as llm:
            scheme = SchemePass(llm, references, options.max_tokens)
            prompts = [QuantPrompt(TEXT, (TEXT, i), text) for i, text in enumerate(TEXT_PROMPTS)]
            prompts = prompts[: options.prompts]
            task = bar.add_task(f"{name}: text", total=len(prompts))
            for start in range(0, len(prompts), options.batch):
                some = prompts[start : start + options.batch]
                scheme.ask(some)
                bar.advance(task, len(some))
            if checkpoint.image is not None:
                ask_all(options, scheme.answer, bar)
        _release()
        with running_engine(config) as llm:
            info, rate = llm.engine.info, decode_rate(llm, options.decode_tokens, options.repeat)
    _release()
    return SchemeResult(name, info.quantization, info.weight_bytes, rate, tuple(scheme.results))


def _release() -> None:
    """Frees an engine's memory before the next is built."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class HiddenStates:
    """The last hidden states of the steps that ran, and the model that computed them."""

    def __init__(self) -> None:
        self._model: LanguageModel | None = None
        self._steps: list[Tensor] = []

    def record(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        """A forward hook of all modules."""
        if isinstance(module, LanguageModel):
            self._model = module
            self._steps.append(output)

    def last_logits(self, count: int) -> Tensor:
        """[count, vocabulary] float32 on the host, of the last tokens."""
        if self._model is None:
            raise RuntimeError("no step has run eagerly")
        with torch.inference_mode():
            return self._model.logits(torch.cat(self._steps)[-count:]).cpu()


@contextmanager
def recorded_hidden_states() -> Iterator[HiddenStates]:
    states = HiddenStates()
    hook = nn.modules.module.register_module_forward_hook(states.record)
    try:
        yield states
    finally:
        hook.remove()


class SchemePass:
    """One pass of an engine over the prompts. The first one, of the base, fills the references."""

    def __init__(self, llm: LLM, references: References, max_tokens: int) -> None:
        self._llm, self._references = llm, references
        self._params = greedy(max_tokens)
        self.results: list[PromptResult] = []

    def answer(self, examples: Sequence[Example]) -> float:
        """Questions about images; the share of right answers so far."""
        self.ask(
            [QuantPrompt(IMAGES, (one.task, one.index), one.question, one.image, one) for one in examples]
        )
        scored = [one.answer.right for one in self.results if one.answer.right is not None]
        return sum(scored) / len(scored)

    def ask(self, prompts: Sequence[QuantPrompt]) -> None:
        outputs = self._generate(prompts)
        for prompt, output in zip(prompts, outputs, strict=True):
            choice = output.outputs[0]
            right = None if prompt.example is None else correct(prompt.example, choice.text)
            answer = Answer(choice.text, tuple(choice.token_ids), right)
            if prompt.key not in self._references:
                reference = Reference(output.prompt_token_ids, answer)
                self._references.add(prompt.key, reference, self._forced_logits(prompt, reference))
            reference = self._references[prompt.key]
            base = self._references.logits(prompt.key)
            stats = compare(base, self._forced_logits(prompt, reference), reference.answer.token_ids)
            self.results.append(PromptResult(prompt.kind, prompt.key, answer, reference.answer, stats))

    def _generate(self, prompts: Sequence[QuantPrompt]) -> list[RequestOutput]:
        if self._llm.processor.checkpoint.chat_template is None:
            return self._llm.generate([prompt.text for prompt in prompts], self._params, progress=False)
        return self._llm.chat([prompt.messages for prompt in prompts], self._params, progress=False)

    def _forced_logits(self, prompt: QuantPrompt, reference: Reference) -> Tensor:
        """At each position of the base's answer, [tokens, vocabulary], with the answer so far as context."""
        tokens = reference.answer.token_ids
        given: Mapping[str, Any] = {"prompt_token_ids": [*reference.prompt_ids, *tokens[:-1]]}
        if prompt.image is not None:
            given = {**given, "images": [prompt.image]}
        with recorded_hidden_states() as states:
            self._llm.generate([given], greedy(1), progress=False)
        return states.last_logits(len(tokens))


def compare(base: Tensor, logits: Tensor, tokens: Sequence[int]) -> TokenStats:
    """Logits [tokens, vocabulary] of the base and of a scheme, at the positions that predict `tokens`."""
    p, q = base.double().log_softmax(-1), logits.double().log_softmax(-1)
    chosen = torch.tensor(tokens).unsqueeze(1)
    return TokenStats(
        kld=tuple((p.exp() * (p - q)).sum(-1).clamp_min(0).tolist()),
        same_top=tuple((base.argmax(-1) == logits.argmax(-1)).tolist()),
        base_logprob=tuple(p.gather(1, chosen).squeeze(1).tolist()),
        logprob=tuple(q.gather(1, chosen).squeeze(1).tolist()),
    )


def decode_rate(llm: LLM, tokens: int, repeat: int) -> float:
    """Tokens a second of one sequence alone after its first, the best of `repeat` runs."""
    engine, params = llm.engine, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)

    def rate(name: str) -> float:
        engine.submit(llm.processor.prepare_prompt(SPEED_PROMPT, params, name, trusted=True))
        while not any(delta.tokens for delta in engine.step()):
            pass
        start = time.perf_counter()
        while not engine.idle:
            engine.step()
        return (tokens - 1) / (time.perf_counter() - start)

    rate("speed-warmup")
    return max(rate(f"speed-{number}") for number in range(repeat))
