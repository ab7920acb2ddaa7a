"""MkDocs hooks: pages that live outside docs/, links that leave the site, the reference of all options.

The documents are also read in the repository, so their links are relative paths. A link to a page of the
site becomes a link inside it; a link to source code or another file becomes its path.
"""

import os
import re
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from saccade.cli.app import COMMANDS, load_command

ROOT = Path(__file__).parents[2]
# Pages of the site that are files of the repository outside docs/.
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "bench/RESULTS.md": "benchmarks.md",
    "deploy/README.md": "deploy.md",
    "training/README.md": "training.md",
    "src/saccade/embedded/README.md": "model_card.md",
}
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>[^()\s#:]+)(?P<anchor>#[^()\s]*)?\)")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`(?!\]))", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, "options.md", content=options_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files, **_: Any) -> str:
    """Rewrite the links outside code."""
    source = next((path for path, uri in OUTSIDE.items() if uri == page.file.src_uri), None)
    folder = (ROOT / source).parent if source else (ROOT / "docs" / page.file.src_uri).parent

    def rewrite(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / link["path"]))
        if not target.exists():
            return link[0]  # strict mode reports it
        within = target.relative_to(ROOT).as_posix()
        uri = OUTSIDE.get(within) or within.removeprefix("docs/")
        if files.get_file_from_path(uri) is None:
            return _plain(link["text"], within)
        relative = os.path.relpath(uri, Path(page.file.src_uri).parent)
        return f"{link['image']}[{link['text']}]({relative}{link['anchor'] or ''})"

    parts = _CODE.split(markdown)
    return "".join(part if index % 2 else _LINK.sub(rewrite, part) for index, part in enumerate(parts))


def _plain(text: str, path: str) -> str:
    """A link to a file that is not on the site."""
    return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"


def options_page() -> str:
    """Every command with its arguments, options and defaults, from the code."""
    lines = ["# Commands and options", "", "Made from the code: what `saccade COMMAND --help` says.", ""]
    for name, (_, summary) in COMMANDS.items():
        command = load_command(name)
        usage = command.make_context(name, [], resilient_parsing=True).get_usage().removeprefix("Usage: ")
        lines += [f"## saccade {name}", "", summary, "", "```", f"saccade {usage}", "```", ""]
        lines += ["| option | default | |", "|---|---|---|"]
        lines += [_row(one) for one in command.params if isinstance(one, click.Option)]
        lines.append("")
    return "\n".join(lines)


def _row(option: click.Option) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    context = click.Context(click.Command("saccade"))
    default = option.get_default(context)
    shown = "" if default is None or default is False or default == () else f"`{default}`"
    return f"| {names} | {shown} | {_cell(option.help or '')} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
