"""`saccade tune`: searches the launch parameters of a model's products, keeps them on disk and reports."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from saccade.checkpoint import open_checkpoint
from saccade.config import EngineConfig
from saccade.engine.memory import resolve_device, resolve_dtype
from saccade.errors import ConfigError
from saccade.kernels.gemm.tuning_search import Choice, Found
from saccade.models.loader import load_model
from saccade.quantization.online import online_scheme
from saccade.quantization.stages import parse_quantization
from saccade.tools.options import TuneOptions
from saccade.tools.report import figure, output_console, progress_bar, table
from saccade.worker.execution_mode import resolve_execution_mode
from saccade.worker.product_tuning import can_tune, load_tunings, model_tasks, tune, untuned
from saccade.worker.warmup import compilers

HEADS = ("product", "format", "rows", "model, us", "best, us", "won", "launch parameters")


def run(engine: EngineConfig, options: TuneOptions) -> int:
    device = resolve_device(engine)
    checkpoint = open_checkpoint(engine.model)
    dtype = resolve_dtype(engine, checkpoint, device)
    tunings = load_tunings(device, cached=engine.tuning == "auto")
    execution = resolve_execution_mode(engine, device, dtype).with_tunings(tunings)
    mode = execution.mode
    if not can_tune(device, mode):
        raise ConfigError(
            f"there is nothing to tune on {device.type} with --kernels {mode.kernels}"
            f"{' --deterministic' if mode.deterministic else ''}: only Triton kernels on a GPU have tunings"
        )
    with compilers(wanted=True), progress_bar(options.progress, remaining=True) as bar:
        online = engine.quantization and online_scheme(parse_quantization(engine.quantization))
        model = load_model(
            checkpoint, device, dtype, engine.load_format, options.progress, mode, online or None
        )
        every = model_tasks(model, engine.max_num_seqs)
        del model
        tasks = every if options.again else untuned(every, mode.tunings)
        job = bar.add_task("tuning", total=len(tasks))
        found: list[Found] = []
        for one in tune(tasks, mode.tunings, device, options.budget, pdl=execution.pdl):
            found.append(one)
            bar.advance(job)
    output_console().print(report(found), summary(found, len(tasks), len(every)))
    return 0


def report(found: Iterable[Found]) -> Table:
    rows = []
    for one in found:
        form, count, columns, depth, gated = one.task.product
        won = 1 - one.seconds / one.first_seconds
        shape = f"{columns} x {depth}{' gated' if gated else ''}"
        times = figure(one.first_seconds * 1e6), figure(one.seconds * 1e6)
        rows.append((shape, form, str(count), *times, f"{won:.1%}", describe(one.choice)))
    return table("Products, one after the other", HEADS, rows, left=(HEADS[0], HEADS[1], HEADS[-1]))


def describe(choice: Choice) -> str:
    if choice is None:
        return "the library's"
    return (
        f"{choice.piece} x {choice.lines}, depth {choice.depth}, splits {choice.splits}, "
        f"stages {choice.stages}, warps {choice.warps}"
    )


def summary(found: Sequence[Found], tasks: int, every: int) -> str:
    before, after = (sum(getattr(f, key) for f in found) for key in ("first_seconds", "seconds"))
    won = f"; {1 - after / before:.1%} faster than the model's choices" if before else ""
    named = f", {every - tasks} named by tables" if every > tasks else ""
    return f"{len(found)} of {tasks} products searched{named}{won}"
