"""The import rule of the design, and the size of things: kept by reading the source, not by discipline."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
PACKAGE = SOURCE / "saccade"

# Rooms that must stay loadable, and fast to load, without torch.
TORCH_FREE = (
    "saccade.server",
    "saccade.inputs.media",
    "saccade.inputs",
    "saccade.scheduler",
    "saccade.inputs.processor",
    "saccade.checkpoint",
    "saccade.request",
    "saccade.step_plan",
    "saccade.config",
    "saccade.errors",
    "saccade.metrics",
    "saccade.host.malloc",
    "saccade.host.garbage_collection",
    "saccade.cli",
    "saccade.async_llm",
    "saccade.tools.bench.options",
    "saccade.tools.options",
    "saccade.kv_cache.block_pool",
    "saccade.kv_cache.groups",
    "saccade.kv_cache.pool_sizing",
    "saccade.kv_cache.prefix_cache",
    "saccade.kv_cache.swap_space",
    "saccade.encoder.cache.store",
    "saccade.encoder.partial_views",
    "saccade.encoder.prompt_layout",
    "saccade.lod.types",
    "saccade.lod.detail",
    "saccade.lod.balance",
    "saccade.lod.allocate",
    "saccade.lod.controller",
    "saccade.lod.preview",
    "saccade.engine.client",
    "saccade.engine.ipc",
    "saccade.engine.cost_prior",
    "saccade.tools.planner",
)

# Tables from a name to the module that does it: the only places that import by name.
REGISTRIES = {
    "saccade",
    "saccade.models.registry",
    "saccade.cli.app",
    "saccade.cli.options",
}

# Rooms that know nothing of ours, and what each other room may know.
LEAVES = ("saccade.errors", "saccade.metrics", "saccade.host.allocator", "saccade.kernels")
MAY_IMPORT = {
    "saccade.errors": (),
    "saccade.metrics": (),
    "saccade.host.allocator": (),
    "saccade.kernels": ("saccade.kernels",),
    "saccade.request": ("saccade.lod.types",),
    "saccade.step_plan": ("saccade.request", "saccade.lod.types"),
    "saccade.lod": (
        "saccade.lod",
        "saccade.checkpoint",
        "saccade.encoder",
        "saccade.errors",
        "saccade.inputs",
        "saccade.kernels",
        "saccade.kv_cache",
        "saccade.models",
        "saccade.request",
        "saccade.scheduler.host_decision",
        "saccade.step_plan",
        "saccade.worker",
    ),
    "saccade.kv_cache": (
        "saccade.kv_cache",
        "saccade.errors",
        "saccade.kernels.attention.quantized_kv",
        "saccade.kernels.attention.metadata",
        "saccade.kernels.attention.paged",
        "saccade.kernels.dispatch",
        "saccade.step_plan",
        "saccade.request",
    ),
    "saccade.models": (
        "saccade.models",
        "saccade.kernels",
        "saccade.host.allocator",
        "saccade.kv_cache.groups",
        "saccade.kv_cache.pages",
        "saccade.checkpoint",
        "saccade.config",
        "saccade.errors",
    ),
    "saccade.scheduler": (
        "saccade.scheduler",
        "saccade.kv_cache.block_pool",
        "saccade.kv_cache.pool_sizing",
        "saccade.kv_cache.prefix_cache",
        "saccade.kv_cache.swap_space",
        "saccade.encoder.cache.store",
        "saccade.encoder.partial_views",
        "saccade.lod.types",
        "saccade.errors",
        "saccade.metrics",
        "saccade.step_plan",
        "saccade.request",
    ),
}

LONGEST_FILE = 400
LONGEST_FUNCTION = 60
# Exceptions may only shrink: lower the number when you shorten the thing, delete the line when it fits.
LONG_FILES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}


def modules() -> dict[str, ast.Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text())
    return found


MODULES = modules()


def walk_running(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that only a type checker sees."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from walk_running(node)


def imported(tree: ast.AST) -> Iterator[str]:
    """Names of modules a piece of source imports when it runs, `from package import module` included."""
    for node in walk_running(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


def inside(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def reachable(start: str) -> dict[str, list[str]]:
    """Every module loading `start` loads, with the way it is reached."""
    ways: dict[str, list[str]] = {start: [start]}
    queue = [start]
    while queue:
        name = queue.pop()
        parents = [name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)]
        for target in [*(imported(MODULES[name]) if name in MODULES else ()), *parents]:
            if target not in ways:
                ways[target] = [*ways[name], target]
                if target in MODULES:
                    queue.append(target)
    return ways


@pytest.mark.parametrize("name", [name for name in MODULES if inside(name, TORCH_FREE)])
def test_the_front_and_the_deciding_rooms_never_load_torch(name: str) -> None:
    for target, way in reachable(name).items():
        assert target.split(".")[0] not in ("torch", "triton"), " -> ".join(way)


def test_no_import_cycle() -> None:
    edges = {
        name: {t for t in imported(tree) if t in MODULES and t != name} for name, tree in MODULES.items()
    }
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, "cycle: " + " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for target in sorted(edges[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


@pytest.mark.parametrize("name", MODULES)
def test_rooms_import_only_what_lies_below_them(name: str) -> None:
    for room, allowed in MAY_IMPORT.items():
        if inside(name, (room,)):
            strangers = {t for t in imported(MODULES[name]) if t in MODULES and not inside(t, allowed)}
            assert not strangers, f"{name} imports {strangers}"
    if inside(name, ("saccade.engine", "saccade.worker")):
        assert not [t for t in imported(MODULES[name]) if inside(t, ("saccade.server",))]


@pytest.mark.parametrize("name", MODULES)
def test_imports_stand_at_the_top_and_nothing_is_global(name: str) -> None:
    for node in ast.walk(MODULES[name]):
        assert not isinstance(node, ast.Global), f"{name}:{node.lineno} uses `global`"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name not in REGISTRIES:
            for inner in ast.walk(node):
                lazy = isinstance(inner, ast.Import | ast.ImportFrom)
                assert not lazy, f"{name}:{inner.lineno} imports inside a function"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", MODULES)
def test_house_rules_no_unsafe_calls(name: str) -> None:
    """No pickle, eval, exec, torch.load, shell=True; no assert for what must hold in production."""
    for node in ast.walk(MODULES[name]):
        assert not isinstance(node, ast.Assert), f"{name}:{node.lineno} asserts; raise an error instead"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "torch.load", "os.system"), f"{name}:{node.lineno} {called}"
            for keyword in node.keywords:
                shell = keyword.arg == "shell" and ast.unparse(keyword.value) == "True"
                assert not shell, f"{name}:{node.lineno} runs a shell"
    assert not {"pickle", "dill", "cloudpickle", "marshal"} & set(imported(MODULES[name]))


def test_files_and_functions_fit_a_screen() -> None:
    long_files, long_functions = {}, {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        text = path.read_text()
        if (lines := text.count("\n")) > LONG_FILES.get(name, LONGEST_FILE):
            long_files[name] = lines
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                where = f"{name}:{node.name}"
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONG_FUNCTIONS.get(where, LONGEST_FUNCTION):
                    long_functions[where] = length
    assert not long_files
    assert not long_functions


def test_the_python_of_this_run_is_one_we_promise() -> None:
    assert sys.version_info >= (3, 11)
