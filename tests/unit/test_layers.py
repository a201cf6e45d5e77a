"""The layers of the design: what may import what, read from the source, so that nothing needs to run."""

import ast
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
PACKAGE = SRC / "headrace"
AGENT = PACKAGE / "observe" / "agent"

#: Layer -> layers it may import, besides itself. Lower layers never know the upper ones.
ALLOWED = {
    "errors": set(),
    "records": {"errors"},
    "options": {"errors"},
    "core": {"records", "errors", "options"},
    "host": {"core", "records", "errors", "options"},
    "loader": {"host", "core", "records", "errors", "options"},
    "observe": {"host", "core", "records", "errors", "options"},
    "report": {"core", "records", "errors", "options"},
    "run": {"observe", "report", "host", "core", "records", "errors", "options"},
    "testing": {"host", "core", "records", "errors", "options"},
    "demo": {"testing", "report", "core", "records", "errors", "options"},
    # The command line, one function per verb.
    "commands": {"run", "report", "observe", "demo", "host", "core", "records", "errors", "options"},
    "cli": {"commands", "run", "report", "observe", "demo", "host", "core", "records", "errors", "options"},
    "__main__": {"cli"},
    # What `import headrace` offers: names that are looked up when they are first used.
    "__init__": {"loader", "observe", "records", "errors", "options"},
}
#: `headrace.observe()` is a verb, like those of `cli`: its call hands over to the layer above, late.
EXTRA = {"observe/__init__.py": {"run"}}
PURE = ("core", "records")
#: Modules through which a pure layer would reach the world.
IMPURE = {"os", "sys", "time", "subprocess", "threading", "multiprocessing", "socket", "pathlib", "io", "tempfile",
          "shutil", "signal", "mmap", "torch", "psutil", "pynvml", "rich"}  # fmt: skip


def sources():
    return sorted(path for path in PACKAGE.rglob("*.py") if AGENT not in path.parents)


def layer_of(path):
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported(path):
    """Names of all modules that a file imports anywhere, but under TYPE_CHECKING: those cost nothing at run time."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    only_types = {id(child) for node in ast.walk(tree) if _guards_types(node) for child in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in only_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{_absolute(path, node)}.{alias.name}" for alias in node.names)


def _absolute(path, node):
    """The module that a from-import names, also when it is written with leading dots."""
    parts = path.relative_to(SRC).parts[: -node.level] if node.level else ()
    return ".".join([*parts, node.module] if node.module else parts)


def _guards_types(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def called(path):
    """Names of the functions that a module calls, but in its `if __name__ == "__main__"` block."""
    body = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if "__main__" not in ast.dump(node)]
    calls = (node for top in body for node in ast.walk(top) if isinstance(node, ast.Call))
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def module_name(path):
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path):
    """A module imports its own layer and lower ones, never an upper one."""
    layer = layer_of(path)
    assert layer in ALLOWED, f"{layer} is no layer of the design"
    allowed = ALLOWED[layer] | {layer} | EXTRA.get(str(path.relative_to(PACKAGE)), set())
    ours = {name.split(".")[1] for name in imported(path) if name.startswith("headrace.")}
    assert ours - {"__version__"} <= allowed


def test_no_import_cycles():
    """The modules can be put in an order in which each imports only earlier ones."""
    modules = {module_name(path): path for path in sources()}
    graph = {}
    for name, path in modules.items():
        targets = {target for target in imported(path) if target.startswith("headrace")}
        # `from a.b import c` names the module a.b.c, or c inside a.b.
        known = {target if target in modules else target.rpartition(".")[0] for target in targets}
        graph[name] = {target for target in known if target in modules and target not in (name, "headrace")}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("layer", PURE)
def test_core_and_records_are_pure(layer):
    """No clock, files, processes, device or printing in the layers that are tested without a machine."""
    for path in (PACKAGE / layer).rglob("*.py"):
        # The schema that is shipped in the package is read through importlib.resources.
        reached = {name.split(".")[0] for name in imported(path)} & IMPURE
        assert not reached, f"{path.relative_to(SRC)} imports {reached}"
        assert not called(path) & {"print", "open", "input"}, f"{path.relative_to(SRC)} talks to the world"


def test_report_never_touches_torch():
    """A report is drawn from a record alone."""
    for path in (PACKAGE / "report").rglob("*.py"):
        assert "torch" not in {name.split(".")[0] for name in imported(path)}


@pytest.mark.parametrize("path", sorted(AGENT.rglob("*.py")), ids=lambda path: path.name)
def test_the_agent_runs_on_the_oldest_python_with_the_standard_library_alone(path):
    """The agent's files parse as Python 3.10 and import only the standard library, themselves, and the user's torch."""
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 10))
    allowed = sys.stdlib_module_names | {"_headrace_agent", "sitecustomize", "torch"}
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        assert {name.split(".")[0] for name in names} <= allowed


@pytest.mark.slow
@pytest.mark.parametrize("module", ["headrace", "headrace.cli", "headrace.report.files", "headrace.testing"])
def test_torch_is_imported_only_where_it_is_needed(module):
    """`headrace --help` and `headrace report` must not wait for torch, nor need it."""
    code = f"import sys, {module}; assert 'torch' not in sys.modules, 'torch was imported'"
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
