"""The field's vocabulary: one word per concept, and no word of a private dialect.

Identifiers are read from the syntax tree, prose from comments and strings. The tables hold what a program can
find without misreading ordinary English."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "saccade"
FILES = sorted(PACKAGE.rglob("*.py"))

# Words that no identifier or file name contains, with the word to use.
IDENTIFIER_WORDS = {
    "picture": "image",
    "pictures": "images",
    "twin": "reference",
    "twins": "reference",
    "told": "a noun or a verb of the field",
    "gone": "a noun or a verb of the field",
    "felt": "a noun or a verb of the field",
    "news": "delta or output",
    "rehearse": "warm up",
    "rehearsal": "warm-up",
    "rehearsals": "warm-up",
    "stopwatch": "step timer",
    "apologise": "fail",
    "excuse": "fail",
    "lookout": "relevance pass",
    "hearing": "relevance results",
    "lengthening": "extend",
    "redeem": "swap in",
    "doomed": "evicted",
    "luck": "hit rate",
    "lateness": "lag",
    "breathe": "pacing",
    "whoever": "the request",
}
# Whole names of classes, functions, variables and files.
NAMES = {
    "Turn": "Step",
    "Turns": "Step",
    "Place": "Slot",
    "Places": "Queues",
    "Way": "ExecutionMode",
    "Front": "InputProcessor",
    "Holdings": "KVManager",
    "Making": "EncoderScheduler",
    "Coming": "PrefixWait",
    "give_way": "preempt",
    "_give_way": "_preempt",
    "coming": "prefix_wait or pending",
    "apart": "allocator",
    "laps": "times",
}
# Phrases in comments, docstrings, help texts, log lines and errors.
PHRASES = {
    r"\bgiv(e|es|en|ing) way\b|\bgave way\b": "preempt",
    r"\btwins?\b": "reference implementation",
    r"\bpictures?\b": "image",
    r"\bwhoever\b": "the request",
    r"\brehears\w+": "warm-up",
    r"\bapologi\w+": "error",
    r"\bstopwatch\w*": "step timer",
    r"\bthe front\b(?! (end|page|of|side))": "the API server",
    r"\bfeature store\b": "encoder cache",
    r"^(takes|gives|owns|never) {2,}": "a plain sentence",
}
# Names that users see and that stay: HTTP fields and command-line arguments.
ALLOWED_STRINGS = {"pictures", "PICTURE", "picture"}


def names_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def words(name: str) -> list[str]:
    parts = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).split("_")
    return [part.lower() for part in parts if part]


def prose_in(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
        elif token.type == tokenize.STRING:
            text = token.string.strip("rbfRBF\"'")
            if text not in ALLOWED_STRINGS:
                for offset, line in enumerate(text.split("\n")):
                    yield token.start[0] + offset, line


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_identifiers_use_the_words_of_the_field(path: Path) -> None:
    found = []
    for line, name in [(0, path.stem), *names_in(ast.parse(path.read_text()))]:
        if name in NAMES:
            found.append(f"{path.name}:{line} {name}: say {NAMES[name]}")
        found += [
            f"{path.name}:{line} {name}: say {IDENTIFIER_WORDS[word]}"
            for word in words(name)
            if word in IDENTIFIER_WORDS
        ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_prose_uses_the_words_of_the_field(path: Path) -> None:
    found = [
        f"{path.name}:{line} {text.strip()[:80]!r}: say {better}"
        for line, text in prose_in(path.read_text())
        for phrase, better in PHRASES.items()
        if re.search(phrase, text, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)


def test_a_class_name_is_unique_in_the_package() -> None:
    where: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                where[node.name].add(str(path.relative_to(PACKAGE)))
    assert not {name: files for name, files in where.items() if len(files) > 1}
