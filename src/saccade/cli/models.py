"""`saccade models`"""

import json
import sys

import click
from rich.console import Console
from rich.table import Table

from saccade.models.families import FAMILIES, FamilyEntry

WIDTH = 140  # where the output is no terminal
HEADINGS = ("family", "architecture in `config.json`", "input", "level of detail", "quantised checkpoints")


def cells(architecture: str, entry: FamilyEntry) -> tuple[str, ...]:
    """One row, in the order of `HEADINGS`."""
    shown = {True: "yes", False: "no"}
    return entry.name, architecture, ", ".join(entry.inputs), shown[entry.lod], shown[entry.quantized]


def markdown() -> str:
    """The table as the README has it."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---" * len(HEADINGS) + "|"]
    for architecture, entry in FAMILIES.items():
        name, _, *others = cells(architecture, entry)
        lines.append("| " + " | ".join((name, f"`{architecture}`", *others)) + " |")
    return "\n".join(lines) + "\n"


@click.command("models")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the table as the README has it.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def command(as_markdown: bool, as_json: bool) -> None:
    """List the model families: architecture, input, level of detail, quantised checkpoints.

    The architecture is the first of `architectures` in a checkpoint's config.json.

    \b
    Examples:
      saccade models
      saccade models --json
    """
    if as_markdown:
        click.echo(markdown(), nl=False)
    elif as_json:
        rows = [
            {
                "architecture": architecture,
                "family": entry.name,
                "inputs": list(entry.inputs),
                "lod": entry.lod,
                "quantized": entry.quantized,
            }
            for architecture, entry in FAMILIES.items()
        ]
        click.echo(json.dumps(rows, indent=2))
    else:
        table = Table(*(heading.replace("`", "") for heading in HEADINGS), box=None)
        for architecture, entry in FAMILIES.items():
            table.add_row(*cells(architecture, entry))
        Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
