"""The `saccade` command: a group that imports a command's module only when that command runs."""

from collections.abc import Sequence
from importlib import import_module

import click

from saccade import __version__
from saccade.errors import SaccadeError

# name -> (module:attribute, summary). Loading one command does not load the libraries of the others.
COMMANDS = {
    "serve": ("saccade.cli.serve:command", "Serve MODEL over the OpenAI API."),
    "chat": ("saccade.cli.chat:command", "Ask about images in the terminal."),
    "look": ("saccade.cli.look:command", "Draw where QUESTION looks in IMAGE, and what would be zoomed."),
    "bench": ("saccade.cli.bench:command", "Measure MODEL on this machine, by named workloads."),
    "profile": ("saccade.cli.profile:command", "Measure where the time goes, by stage and by kernel."),
    "eval": ("saccade.cli.eval:command", "Accuracy of MODEL, task by task, on the fixed question set."),
    "eval-lod": ("saccade.cli.eval:lod_command", "Accuracy against visual tokens, by method."),
    "eval-quant": (
        "saccade.cli.eval:quant_command",
        "What quantisation costs in quality and gains in speed.",
    ),
    "tune": ("saccade.cli.tune:command", "Search kernel launch parameters for MODEL on this GPU."),
    "quantize": ("saccade.cli.quantize:command", "Write MODEL as a quantised checkpoint."),
    "models": ("saccade.cli.models:command", "List the model families, and what works in each."),
    "plan": ("saccade.cli.plan:command", "Predict how much traffic a machine serves, without running it."),
}


def load_command(name: str) -> click.Command:
    module, _, attribute = COMMANDS[name][0].partition(":")
    command: click.Command = getattr(import_module(module), attribute)
    return command


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(
    cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="saccade")
def app() -> None:
    """Saccade serves vision-language models."""


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        app(arguments)
    except SaccadeError as error:
        click.secho(f"saccade: {error.message}", fg="red", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
