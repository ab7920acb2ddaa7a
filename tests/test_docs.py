"""The documents: links and anchors resolve, commands have the options shown, every option is documented."""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import click
import pytest

from saccade.cli.app import COMMANDS, load_command
from saccade.cli.models import markdown

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part == "build" for part in page.relative_to(ROOT).parts)
)
SERVING = ROOT / "docs" / "serving.md"

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_COMMAND = re.compile(r"(?<!from )\bsaccade ([a-z][a-z-]*)")
_MODULE = re.compile(r"\bpython3? -m ((?:bench|training)[.\w]*)([^`#]*)")
_PATH = re.compile(r"`([\w-]+(?:/[\w.-]+)+\.(?:py|md|sh))`(?! \(new\))")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?)\s*$", _FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(
            next(
                f"{slug}{end}"
                for end in ("", *(f"-{i}" for i in range(1, 100)))
                if f"{slug}{end}" not in found
            )
        )
    return found


def commands(text: str) -> list[str]:
    """Code spans and lines of code blocks, continuation lines joined."""
    blocks = "\n".join(_FENCE.findall(text)).replace("\\\n", " ")
    return [*blocks.splitlines(), *(span.replace("\n", " ") for span in _CODE.findall(_FENCE.sub("", text)))]


def options(command: str) -> set[str]:
    """Every flag of a subcommand, both forms of switches."""
    found = load_command(command)
    named = [param for param in found.params if isinstance(param, click.Option)]
    return {flag for param in named for flag in (*param.opts, *param.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_and_anchors_resolve(page: Path) -> None:
    text = page.read_text()
    broken = []
    for link in _LINK.findall(_CODE.sub("", _FENCE.sub("", text))):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (page.parent / unquote(path)).resolve() if path else page
        is_page = target.suffix == ".md" and target.is_file()
        if not target.exists() or (anchor and (not is_page or anchor not in anchors(target.read_text()))):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist_and_have_the_options_they_are_shown_with(page: Path) -> None:
    if "history" in page.parts:
        pytest.skip("a log of commands as they were")
    unknown = []
    for line in commands(page.read_text()):
        called = _COMMAND.search(line)
        if not called or "python -m" in line[: called.start()]:
            continue
        if called[1] not in COMMANDS:
            unknown.append(called[0])
            continue
        given = line[called.end() :].split("#")[0]
        unknown += [f"{called[0]} {flag}" for flag in _FLAG.findall(given) if flag not in options(called[1])]
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_programs_exist_and_have_the_options_they_are_shown_with(page: Path) -> None:
    if "history" in page.parts:
        pytest.skip("a log of commands as they were")
    unknown = []
    for line in commands(page.read_text()):
        for module, given in _MODULE.findall(line):
            path = ROOT.joinpath(*module.split("."))
            files = path.glob("*.py") if path.is_dir() else [path.with_suffix(".py")]
            source = "".join(file.read_text() for file in files)
            known = {*_FLAG.findall(source), *options("bench")}  # programs take the engine's options too
            unknown += [f"{module} {flag}" for flag in _FLAG.findall(given) if flag not in known]
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_named_in_the_text_exist(page: Path) -> None:
    if "history" in page.parts:
        pytest.skip("a log of files as they were")
    folders = (ROOT, ROOT / "src" / "saccade", ROOT / "src", page.parent)
    paths = _PATH.findall(_FENCE.sub("", page.read_text()))
    assert not [path for path in paths if not any((folder / path).is_file() for folder in folders)]


def test_the_table_of_models_is_the_registry() -> None:
    assert markdown() in (ROOT / "README.md").read_text()


def test_every_option_named_in_the_serving_guide_exists() -> None:
    unknown = []
    for paragraph in re.split(r"\n(?=\n|- |\||#)", _FENCE.sub("", SERVING.read_text())):
        spans = _CODE.findall(paragraph)
        known = options("serve").union(*map(options, _COMMAND.findall(" ".join(spans))))
        flags = [flag for span in spans if not span.startswith("python") for flag in _FLAG.findall(span)]
        unknown += [flag for flag in flags if flag not in known]
    assert not unknown


def test_every_option_of_serve_is_in_the_serving_guide() -> None:
    documented = set(_FLAG.findall(SERVING.read_text()))
    named = [param for param in load_command("serve").params if isinstance(param, click.Option)]
    missing = [param.opts[0] for param in named if not documented & {*param.opts, *param.secondary_opts}]
    assert not missing


def test_site_builds_without_warnings_and_names_every_option(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "options.html").read_text()
    missing = [flag for name in COMMANDS for flag in options(name) if f"<code>{flag}</code>" not in reference]
    assert set(missing) <= {"--help"}
