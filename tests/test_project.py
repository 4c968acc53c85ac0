"""What the project says of itself: examples that run, rooms in order, the names of the contract."""

import ast
import doctest
import importlib.util
import inspect
import operator
import subprocess
import sys
import tomllib
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend.core import primitives

import pergrad as pg
from tests.support import pages
from tests.support.pages import ROOT

PACKAGE = ROOT / "pergrad"
# test_frameworks.py runs docs/frameworks.md, and looks at its results; docs/devices.md needs devices.
ELSEWHERE = {ROOT / "docs" / "frameworks.md", ROOT / "docs" / "devices.md"}
PAGES = [page for page in pages.EVERY if page not in ELSEWHERE and "```python" in page.read_text()]

# Packages that a page may use and the tests can do without. They may call what others deprecate.
OPTIONAL = {"jax_privacy"}
NOT_INSTALLED = {name for name in OPTIONAL if importlib.util.find_spec(name) is None}

NAMES = {
    *("value_and_stats", "grad_stats", "explain", "check", "Plan"),
    *("Mean", "Variance", "Individual", "Fold", "Loss", "Count", "power", "plan_for", "Statistic"),
    *("Norm", "WeightedMean", "ClippedMean", "Gram", "Dot", "Project", "Factors", "FactorPair", "gram"),
    *("combine", "all_combine"),
    *("PergradError", "ArgumentError", "NotPerExampleError"),
}
ROOMS = {"noise", "optim", "scaling"}

# The folders of the package and the files beside them. Each imports from those above it alone, and what
# it takes from a folder it takes from the folder's own `__init__`.
ORDER = [
    *("_errors", "_compat"),
    *("_ir", "_statistics", "_trace", "_cut", "_strategies", "_plan", "_run", "_call"),
    *("_moments", "noise", "scaling", "optim"),
    *("", "linen", "nnx", "lab"),
]


ENGINE = ORDER[: ORDER.index("_moments")]


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): ast.parse(path.read_text(), str(path)) for path in sorted(PACKAGE.rglob("*.py"))
}


def imports(tree):
    """The dotted name of everything that is imported anywhere in a module, `TYPE_CHECKING` or not."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are written out in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


# What is written for users runs, with JAX as they find it.


@pytest.fixture
def as_for_users():
    with pages.jax_as_for_users():
        yield


def docstring_examples(name):
    finder = doctest.DocTestFinder(exclude_empty=True)
    globs = {"pg": pg, "jax": jax, "jnp": jnp, "optax": optax}
    found = finder.find(operator.attrgetter(name)(pg), name, globs=globs)
    return [test for test in found if test.examples]


FOLDERS = {"noise": pg.noise, "optim": pg.optim}
DOCUMENTED = NAMES | ROOMS | {f"{room}.{name}" for room in FOLDERS for name in FOLDERS[room].__all__}


@pytest.mark.parametrize("name", sorted(name for name in DOCUMENTED if docstring_examples(name)))
def test_docstring(name, as_for_users):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    report = []
    for test in docstring_examples(name):
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)


@pytest.mark.parametrize("name", sorted(n for n in NAMES if inspect.isfunction(getattr(pg, n))))
def test_every_function_has_an_example(name):
    assert docstring_examples(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(page, as_for_users, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # pages draw figures
    namespace = {"__name__": page.name}
    blocks = list(pages.blocks(page))
    assert len(blocks) == page.read_text().count("```python")
    for code, output in blocks:
        if not NOT_INSTALLED.isdisjoint(code.co_names):
            continue
        with warnings.catch_warnings():
            if not OPTIONAL.isdisjoint(code.co_names):
                warnings.simplefilter("ignore", DeprecationWarning)
            exec(code, namespace)
        printed = capsys.readouterr().out
        assert output is None or printed.split() == output.split()
    for name in pages.figures(page):
        assert (tmp_path / name).exists() and (page.parent / name).exists(), "run make docs-figures"
    left_out = NOT_INSTALLED & {name for code, _ in blocks for name in code.co_names}
    if left_out:
        pytest.skip(f"the blocks that use {', '.join(left_out)} were left out; the others are right")


def test_readme_has_code():
    assert "```python" in (ROOT / "README.md").read_text()


# The rooms.


def room_of(name):
    """The folder or file that a module, or a name in one, belongs to; "" for the package itself."""
    room = name.split(".")[1] if "." in name else ""
    return room if room in ORDER else ""


def test_order_names_every_room():
    entries = [
        path for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    ]
    assert sorted(ORDER) == sorted({module_name(path).partition(".")[2] for path in entries})


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_one_way(module):
    own = room_of(module)
    ours = {name for name in imports(MODULES[module]) if name.split(".")[0] == "pergrad"}
    others = {name for name in ours if room_of(name) != own}
    assert {room_of(name) for name in others} <= set(ORDER[: ORDER.index(own)])
    # `pergrad._cut.Tail` is what the folder gives, `pergrad._cut.tail.Tail` what one of its files has.
    assert not {name for name in others if name.count(".") > 2}


# The folders of the lab and the files beside them, in the same way.
LAB_ORDER = [
    *("errors", "files", "config", "timing", "floor"),
    *("run", "compare", "pages", "watch", "bench", "studies"),
    *("progress", "picture", "cli_bench", "cli", "__main__"),
]
LAB_MODULES = sorted(module for module in MODULES if module.startswith("pergrad.lab."))


def lab_room_of(name):
    return name.split(".")[2]


def test_order_of_the_lab_names_every_room():
    assert sorted(LAB_ORDER) == sorted({lab_room_of(module) for module in LAB_MODULES})


@pytest.mark.parametrize("module", LAB_MODULES)
def test_imports_in_the_lab_go_one_way(module):
    own = lab_room_of(module)
    in_lab = {name for name in imports(MODULES[module]) if name.startswith("pergrad.lab.")}
    others = {name for name in in_lab if lab_room_of(name) != own}
    assert {lab_room_of(name) for name in others} <= set(LAB_ORDER[: LAB_ORDER.index(own)])
    # `pergrad.lab.run.records` is what the folder gives, `pergrad.lab.run.records.Run` what a file has.
    folders = {lab_room_of(module) for module in LAB_MODULES if module.count(".") > 2}
    assert not {name for name in others if lab_room_of(name) in folders and name.count(".") > 3}


@pytest.mark.parametrize("module", ["pergrad.lab", *LAB_MODULES])
def test_lab_uses_what_is_public(module):
    ours = {name for name in imports(MODULES[module]) if name.split(".")[0] == "pergrad"}
    outside = {name.split(".")[1] for name in ours if "." in name} - {"lab"}
    assert outside <= NAMES | ROOMS | {"linen", "nnx"}
    private = {
        ast.unparse(node)
        for node in ast.walk(MODULES[module])
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("pg._")
    }
    assert private <= {"pg.__version__"}


# The rooms on top of the engine use its public names. Besides these they need the types of arguments,
# the dtype of sums, how results are merged, which arguments of a call are whose, and internals of JAX.
ON_TOP = ("_moments", "noise", "scaling", "optim", "linen", "nnx")
NOT_PUBLIC = {
    *("_statistics.By", "_statistics.Per", "_statistics.Where"),
    *("_call.ArgNums", "_call.MicrobatchSize", "_call.Nonfinite", "_call.StrategyName"),
    *("_ir.accumulation_dtype", "_ir.widen", "_statistics.Merging"),
    *("_call.keywords_of", "_call.places", "_compat.drop_dead_code", "_compat.is_computed"),
}


def test_rooms_on_top_use_public_names():
    modules = [module for module in MODULES if room_of(module) in ON_TOP]
    taken = {name for module in modules for name in imports(MODULES[module])}
    of_engine = {name.removeprefix("pergrad.") for name in taken if room_of(name) in ENGINE}
    assert {name for name in of_engine if name.split(".")[-1] not in NAMES} == NOT_PUBLIC


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"pergrad._compat"}))
def test_internals_of_jax_enter_through_compat(module):
    tree = MODULES[module]
    internal = ("jax._src", "jax.interpreters", "jaxlib")
    used = {name for name in imports(tree) if f"{name}.".startswith(tuple(f"{i}." for i in internal))}
    used |= {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in internal
    }
    assert not used


PRIMITIVE_NAMES = {p.name for p in vars(primitives).values() if isinstance(p, jax.extend.core.Primitive)}


@pytest.mark.parametrize("module", sorted(m for m in MODULES if room_of(m) in ENGINE))
def test_no_primitive_is_matched_by_name(module):
    def strings(node):
        return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)} & PRIMITIVE_NAMES

    found = []
    for node in ast.walk(MODULES[module]):
        match node:
            case ast.Attribute(attr="name", value=value) if "primitive" in ast.unparse(value):
                found.append(ast.unparse(node))
            case ast.Compare() | ast.MatchValue() if strings(node):
                found.append(ast.unparse(node))
            case ast.Dict(keys=keys) if any(strings(key) for key in keys if key):
                found.append(ast.unparse(node))
    assert not found


def test_primitive_names_are_known():
    assert {"scan", "dot_general", "reduce_sum"} <= PRIMITIVE_NAMES


# The names.


def test_public_names():
    assert set(pg.__all__) == NAMES | ROOMS
    assert len(pg.__all__) == len(NAMES | ROOMS)
    assert pg.__all__ == sorted(pg.__all__)


def test_nothing_else_is_public():
    public = {name for name, value in vars(pg).items() if name[0] != "_" and not inspect.ismodule(value)}
    assert public == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_docstring_is_there(name):
    doc = getattr(pg, name).__doc__
    assert doc
    assert not doc.startswith(f"{name}("), "a dataclass wrote it itself"


def test_import_needs_no_optional_package():
    optional = ["equinox", "flax", "haiku", "matplotlib", "rich"]
    code = f"import sys, pergrad; print([name for name in {optional} if name in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == pg.__version__
