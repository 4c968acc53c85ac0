"""What differs between kinds of a thing is the thing's own: nobody else asks for its name or its class.

A new statistic is one class, and a new strategy one file. So no file but their own may look whether a
statistic is a `Mean`, or whether a strategy is called "streamed".
"""

import ast
from collections.abc import Iterator

import pytest

import pergrad as pg
from pergrad._strategies import STRATEGIES
from tests.support.pages import ROOT

PACKAGE = ROOT / "pergrad"
FILES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(), str(path))
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.relative_to(PACKAGE).parts[0] != "lab"
}
STRATEGY_NAMES = {strategy.name for strategy in STRATEGIES}
STRATEGY_KINDS = {type(strategy).__name__ for strategy in STRATEGIES}


def kinds_below(kind: type) -> Iterator[str]:
    """The names of all kinds but the common ones of `base.py`, which may be asked for."""
    for own in kind.__subclasses__():
        if own.__module__.startswith("pergrad._statistics"):
            if own.__module__ != "pergrad._statistics.base":
                yield own.__name__
            yield from kinds_below(own)


STATISTIC_KINDS = set(kinds_below(pg.Statistic))


def test_kinds_are_known() -> None:
    assert {"Mean", "Variance", "ClippedMean", "SquaredNorm", "Saved", "Count"} <= STATISTIC_KINDS
    assert not {"Statistic", "Reading", "Accumulator"} & STATISTIC_KINDS
    assert {"Summed", "Streamed"} <= STRATEGY_KINDS and {"summed", "streamed"} <= STRATEGY_NAMES


def named(node: ast.AST | None) -> set[str]:
    """The last names of what an expression is made of: `X`, `pg.X`, `X | Y`, `(X, Y)`."""
    nodes = list(ast.walk(node)) if node else []
    names = {n.id for n in nodes if isinstance(n, ast.Name)}
    return names | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


def asked_kinds(tree: ast.AST, kinds: set[str]) -> list[str]:
    """Where a file looks whether something is of one of these kinds.

    A kind that is handed to a function is handed over to be looked for.
    """
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(args=args) if any(named(arg) & kinds for arg in args if is_kind(arg)):
                found.append(node)
            case ast.MatchClass(cls=cls) if named(cls) & kinds:
                found.append(node)
            case ast.Compare(ops=[ast.Is() | ast.IsNot() | ast.Eq() | ast.NotEq() | ast.In()]) if any(
                named(side) & kinds for side in (node.left, *node.comparators) if is_kind(side)
            ):
                found.append(node)
    return [said(node) for node in found]


def is_kind(node: ast.AST) -> bool:
    """Whether an expression may be a class or several: there is no call in it, nor anything to run."""
    allowed = (ast.Name, ast.Attribute, ast.Tuple, ast.BinOp, ast.BitOr, ast.Load)
    return all(isinstance(n, allowed) for n in ast.walk(node))


def asked_names(tree: ast.AST) -> list[str]:
    """Where a file compares the name of something, or has the name of a strategy."""
    types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and "Literal" in named(node.value)
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Compare() if any(is_name(side) for side in (node.left, *node.comparators)):
                found.append(node)
            case ast.Match(subject=subject) if is_name(subject):
                found.append(subject)
            case ast.Constant(value=str(text)) if text in STRATEGY_NAMES and id(node) not in types:
                found.append(node)
    return [said(node) for node in found]


def is_name(node: ast.AST) -> bool:
    """Whether an expression is the name of a strategy or a device.

    `forced` has the name that the user gave, and a `parameter` is one of the user's function.
    """
    match node:
        case ast.Attribute(attr="name", value=value):
            return not named(value) & {"forced", "p", "parameter"}
    return False


def said(node: ast.AST) -> str:
    return f"line {getattr(node, 'lineno', '?')}: {ast.unparse(node)}"


@pytest.mark.parametrize("file", [file for file in FILES if not file.startswith("_statistics/")])
def test_nobody_asks_what_kind_a_statistic_is(file: str) -> None:
    assert not asked_kinds(FILES[file], STATISTIC_KINDS - STRATEGY_KINDS)


ENGINE = ("_ir/", "_statistics/", "_trace/", "_cut/", "_plan/", "_run/", "_call/")


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith(ENGINE)])
def test_nobody_asks_which_strategy_or_device_it_is(file: str) -> None:
    tree = FILES[file]
    assert not asked_kinds(tree, STRATEGY_KINDS)
    # The name that the user gave is looked up in one place.
    assert file == "_call/request.py" or not asked_names(tree)


def test_what_is_found() -> None:
    asks = """
if isinstance(s, Mean) or number_of(pg.Mean, statistics) or type(s) is Mean:
    pass
match s:
    case Mean():
        pass
"""
    assert len(asked_kinds(ast.parse(asks), {"Mean"})) == 4
    fine = "stats = {'mean': Mean(), 'all': [pg.Mean(per=2)]}\nassert s == Mean()"
    assert not asked_kinds(ast.parse(fine), {"Mean"})
    asks = """
if strategy.name == "x" or choice.strategy.name in FORMING or name == "streamed":
    pass
match strategy.name:
    case _:
        pass
"""
    assert len(asked_names(ast.parse(asks))) == 4
    fine = "Name = Literal['auto', 'streamed']\nprint(strategy.name)\nforced.name == 'auto'"
    assert not asked_names(ast.parse(fine))
