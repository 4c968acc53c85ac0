"""What the project says of itself: examples that run, rooms in order, the names of the contract."""

import ast
import doctest
import inspect
import operator
import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.extend.core import primitives

import pergrad as pg
from tests import pages
from tests.pages import ROOT

PACKAGE = ROOT / "pergrad"
# test_frameworks.py runs docs/frameworks.md, and looks at its results; docs/devices.md needs devices.
ELSEWHERE = {ROOT / "docs" / "frameworks.md", ROOT / "docs" / "devices.md"}
PAGES = sorted({ROOT / "README.md", *ROOT.glob("docs/*.md")} - ELSEWHERE)

NAMES = {
    *("value_and_stats", "grad_stats", "explain", "check", "Plan"),
    *("Mean", "Variance", "Individual", "Fold", "Loss", "Count", "power", "Statistic"),
    *("Norm", "ClippedMean", "Gram", "Dot", "Factors", "FactorPair", "combine", "all_combine"),
    *("PergradError", "ArgumentError", "NotPerExampleError"),
}
ROOMS = {"noise", "optim", "scaling"}

# Every module imports from those above it alone.
ORDER = [
    "pergrad._errors",
    "pergrad._devices",
    "pergrad._compat",
    "pergrad._cost",
    "pergrad._eval",
    "pergrad._statistics",
    "pergrad._whole",
    "pergrad._steps",
    "pergrad.terms._term",
    "pergrad.terms.convolution",
    "pergrad.terms.product",
    "pergrad.terms.ragged",
    "pergrad.terms.scatter",
    "pergrad.terms.total",
    "pergrad.terms",
    "pergrad._tail",
    "pergrad._ways",
    "pergrad.strategies._strategy",
    "pergrad.strategies.summed",
    "pergrad.strategies.factored",
    "pergrad.strategies.centred",
    "pergrad.strategies.gram",
    "pergrad.strategies.streamed",
    "pergrad.strategies.sparse",
    "pergrad.strategies.materialise",
    "pergrad.strategies",
    "pergrad._flow",
    "pergrad._conditional",
    "pergrad._loop",
    "pergrad._squeeze",
    "pergrad._trace",
    "pergrad._walk",
    "pergrad._units",
    "pergrad._leave",
    "pergrad._hoist",
    "pergrad._cut",
    "pergrad._price",
    "pergrad._choose",
    "pergrad._start",
    "pergrad._table",
    "pergrad._plan",
    "pergrad._factors",
    "pergrad._run",
    "pergrad._request",
    "pergrad._wrap",
    "pergrad._arguments",
    "pergrad._call",
    "pergrad._spmd",
    "pergrad._check",
    "pergrad._combine",
    "pergrad._api",
    "pergrad._moments",
    "pergrad._names",
    "pergrad.noise",
    "pergrad.scaling",
    "pergrad.optim._found",
    "pergrad.optim._base",
    "pergrad.optim._preconditioner",
    "pergrad.optim._sign",
    "pergrad.optim._clip",
    "pergrad.optim._accumulate",
    "pergrad.optim",
    "pergrad",
    "pergrad.nnx",
    "pergrad.lab",
    "pergrad.lab.errors",
    "pergrad.lab.files",
    "pergrad.lab.timing",
    "pergrad.lab.config",
    "pergrad.lab.data",
    "pergrad.lab.model",
    "pergrad.lab.optimizers",
    "pergrad.lab.peers",
    "pergrad.lab.devices",
    "pergrad.lab.checkpoints",
    "pergrad.lab.runs",
    "pergrad.lab.train",
    "pergrad.lab.events",
    "pergrad.lab.progress",
    "pergrad.lab.sweep",
    "pergrad.lab.decide",
    "pergrad.lab.sheet",
    "pergrad.lab.figures",
    "pergrad.lab.report",
    "pergrad.lab.tasks",
    "pergrad.lab.price",
    "pergrad.lab.bench",
    "pergrad.lab.bench.models",
    "pergrad.lab.bench.cases",
    "pergrad.lab.bench.peak",
    "pergrad.lab.bench.run",
    "pergrad.lab.bench.tables",
    "pergrad.lab.bench.drawings",
    "pergrad.lab.findings",
    "pergrad.lab.gather",
    "pergrad.lab.studies._study",
    "pergrad.lab.studies._layers",
    "pergrad.lab.studies.sign",
    "pergrad.lab.studies.adam",
    "pergrad.lab.studies.plane",
    "pergrad.lab.studies.scaling",
    "pergrad.lab.studies.clipping",
    "pergrad.lab.studies.snr",
    "pergrad.lab.studies.overhead",
    "pergrad.lab.studies",
    "pergrad.lab.cli",
    "pergrad.lab.__main__",
]


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


DOCUMENTED = NAMES | ROOMS | {f"optim.{name}" for name in pg.optim.__all__}


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
def test_page(page, as_for_users, capsys):
    namespace = {"__name__": page.name}
    for code, output in pages.blocks(page):
        exec(code, namespace)
        printed = capsys.readouterr().out
        assert output is None or printed.split() == output.split()


def test_readme_has_code():
    assert "```python" in (ROOT / "README.md").read_text()


# The rooms.


def test_order_names_every_module():
    assert sorted(ORDER) == sorted(MODULES)


@pytest.mark.parametrize("module", ORDER)
def test_imports_go_one_way(module):
    ours = {name for name in imports(MODULES[module]) if name.split(".")[0] == "pergrad"}
    # `a.b.c` is the module of this name, or else the name c in the module a.b.
    used = {name if name in MODULES else name.rpartition(".")[0] for name in ours}
    assert used <= set(ORDER[: ORDER.index(module)])


@pytest.mark.parametrize("module", sorted(set(ORDER) - {"pergrad._compat"}))
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


@pytest.mark.parametrize("module", ORDER[: ORDER.index("pergrad._api")])
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
    optional = ["equinox", "flax", "haiku", "matplotlib"]
    code = f"import sys, pergrad; print([name for name in {optional} if name in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == pg.__version__
