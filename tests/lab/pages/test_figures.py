"""Figures: all that is given is seen, and what lies outside the axes has an arrow and its number."""

import math

import numpy as np
import pytest
from matplotlib.figure import Figure as Sheet

import pergrad.lab.pages.sheet
from pergrad.lab.compare.decide import estimate
from pergrad.lab.errors import LabError
from pergrad.lab.pages import figures
from pergrad.lab.pages.sheet import NARROW, WIDE, limits, look_of, outside, short
from tests.support import sheets
from tests.support.made_up import BEST, DRAWINGS, FALL, LOST, RATES, STEPS, a_map


def drawn(name, width=WIDE):
    sheet = Sheet(layout="constrained")
    sheet.set_figwidth(width)
    DRAWINGS[name](sheet)
    sheet.draw_without_rendering()
    return sheet


def arrows(ax, to):
    return [line.get_xydata()[0].tolist() for line in sheets.arrows(ax) if line.get_marker() == to]


def legend_of(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_lines():
    (ax,) = drawn("lines").axes
    assert legend_of(ax) == [
        *("never\ndiverged at once", "SignSGD", "one seed", "Adam"),  # as they end, from the top
        *("95% interval over seeds", "diverged from here on"),
    ]
    crosses = [
        line.get_xydata() for line in ax.lines if line.get_marker() == "x" and len(line.get_xdata())
    ]
    np.testing.assert_allclose(np.concatenate(crosses), [[19, FALL[18] + 0.5]])
    assert ax.get_xscale() == "log"
    low, high = ax.get_ylim()
    assert low < 2 and FALL[0] + 0.5 < high < 10


def test_a_curve_that_exploded_does_not_hide_the_others():
    sheet = Sheet(layout="constrained")
    wild = np.geomspace(3, 1e6, len(STEPS))
    curves = {"calm": (STEPS, FALL, FALL, FALL), "wild": (STEPS, wild, wild, wild)}
    figures.lines_with_bands(sheet, curves, "step", "loss")
    assert FALL.max() <= sheet.axes[0].get_ylim()[1] < 100
    assert legend_of(sheet.axes[0]) == ["wild\n▲ outside: up to 1e6", "calm"]
    ((_, top),) = arrows(sheet.axes[0], "^")
    assert top == sheet.axes[0].get_ylim()[1]
    sheets.check(sheet)


def test_what_comes_after_a_point_that_diverged_is_drawn():
    """Final losses by batch size, say, of which the smallest two diverged."""
    sheet = Sheet(layout="constrained")
    nan = math.nan
    mean = np.array([nan, 3.0, nan, 2.0, nan])
    figures.lines_with_bands(sheet, {"x": ([1, 2, 4, 8, 16], mean, mean, mean)}, "size", "loss")
    (ax,) = sheet.axes
    np.testing.assert_equal(ax.lines[0].get_ydata(), mean)
    top = ax.get_ylim()[1]
    crosses = [line.get_xydata().tolist() for line in ax.lines if line.get_marker() == "x"]
    assert crosses == [[[8, 2.0]], [[1, top], [4, top]]]
    assert legend_of(ax) == ["x", "at the top: diverged", "diverged from here on"]


def test_a_curve_below_every_logarithm():
    sheet = Sheet(layout="constrained")
    mean = np.array([1.0, 0.0, 3.0])
    figures.lines_with_bands(sheet, {"x": ([1, 2, 3], mean, mean, mean)}, "step", "x", logy=True)
    (ax,) = sheet.axes
    assert legend_of(ax) == ["x\n▼ outside: down to 0"]
    assert arrows(ax, "v") == [[2, ax.get_ylim()[0]]]
    sheets.check(sheet)


def test_lines_without_bands_or_crosses():
    sheet = Sheet()
    figures.lines_with_bands(sheet, {"x": (STEPS, FALL, FALL, FALL)}, "step", "loss")
    assert legend_of(sheet.axes[0]) == ["x"]


def test_rates():
    top, ax = drawn("rates").axes
    assert legend_of(ax) == [
        *("Adam\nbest: 1.867 at 0.003", "SignSGD\nbest: 2.3 at 0.001", "never\ndiverged at every rate"),
        *("best rate of a method", "95% interval over seeds", "diverged"),
    ]
    rings = [tuple(line.get_xydata()[0]) for line in ax.lines if line.get_markersize() == 13]
    assert rings == [(3e-3, BEST["Adam"].mean), (1e-3, 2.3)]
    assert [line.get_xydata().tolist() for line in top.lines] == [[[1e-2, 0]], [[1e-3, 1]]]
    assert [text.get_text() for text in top.get_yticklabels()] == ["Adam", "never"]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["0.0001", "0.001", "0.003", "0.01"]


def test_rates_at_which_the_loss_exploded():
    """Their numbers stand above the axes, in the row of the method."""
    sheet = Sheet(layout="constrained")
    at = {1e-3: estimate([2.0]), 2e-3: estimate([1.9]), 4e-3: estimate([2.1]), 8e-3: estimate([77.0])}
    figures.loss_against_rate(sheet, {"Adam": at, "calm": {1e-3: estimate([2.2])}})
    top, ax = sheet.axes
    assert [(text.get_text(), text.get_position()) for text in top.texts] == [("▲77", (8e-3, 0))]
    assert [text.get_text() for text in top.get_yticklabels()] == ["Adam"]
    assert ax.get_ylim()[1] < 3 and ax.get_xlim()[1] > 8e-3
    sheets.check(sheet)


def test_long_numbers_beside_the_names_of_the_strip():
    """At the first and the last rate, where they reach over the edge."""
    sheet = Sheet(layout="constrained")
    losses = {1e-3: 2.42e10, 2e-3: 1.9, 4e-3: 2.0, 8e-3: 2.1, 1.6e-2: 5.67e12}
    at = {rate: estimate([loss]) for rate, loss in losses.items()}
    calm = {rate: estimate([2.0]) for rate in losses}
    figures.loss_against_rate(sheet, {"MicroAdamMSQ, clipped": at, "calm": calm, "other": calm})
    assert [text.get_text() for text in sheet.axes[0].texts] == ["▲2.42e10", "▲5.67e12"]
    sheets.check(sheet)


def test_rates_without_divergence_have_no_strip():
    sheet = Sheet()
    figures.loss_against_rate(sheet, {"SignSGD": RATES["SignSGD"]})
    (ax,) = sheet.axes
    assert legend_of(ax) == ["SignSGD\nbest: 2.3 at 0.001", "best rate of a method"]


def test_bars():
    sheet = drawn("bars")
    (ax,) = sheet.axes
    assert [text.get_text() for text in ax.get_yticklabels()] == ["Adam", "SignSGD", "never"]
    numbers = [text.get_text() for text in ax.child_axes[0].get_yticklabels()]
    assert numbers == ["1.87 (1.72 to 2.01)", "2.3 (1 seed)", "diverged"]
    assert not [line for line in ax.lines if list(line.get_xdata()) == [0, 0]]


@pytest.mark.parametrize("log", [False, True])
def test_bars_that_differ_by_far(log):
    """Two are far above the others: they have a marker, or an arrow beside their number."""
    sheet = Sheet(layout="constrained")
    means = {"a": 0.08, "b": 0.079, "c": 0.085, "d": 0.09, "e": 0.1, "f": 0.11, "g": 0.429, "h": 1.32}
    figures.bars_with_intervals(sheet, {n: estimate([x, 1.1 * x]) for n, x in means.items()}, log=log)
    (ax,) = sheet.axes
    low, high = ax.get_xlim()
    seen = [line.get_xdata()[0] for line in ax.lines if line.get_ms() == 7]
    assert all(low <= x <= high for x in seen)
    if log:
        assert len(seen) == 8 and not arrows(ax, ">")
    else:
        assert len(seen) == 7 and arrows(ax, ">") == [[high, 7]]
        assert "(an arrow: it goes on outside)" in ax.get_xlabel().replace("\n", " ")
    sheets.check(sheet)


def test_bars_of_one_kind_have_one_colour():
    sheet = Sheet(layout="constrained")
    bars = dict.fromkeys(("a, signs", "a, gradients", "b, signs"), estimate([1.0]))
    figures.bars_with_intervals(sheet, bars, kind=lambda name: name.split(", ")[1])
    one, other, same = (line.get_color() for line in sheet.axes[0].lines if line.get_ms() == 7)
    assert one == same != other


def test_a_line_at_no_difference():
    sheet = Sheet()
    figures.bars_with_intervals(sheet, {"a - b": estimate([-0.1, 0.1, 0.15])}, xlabel="difference")
    assert [line for line in sheet.axes[0].lines if list(line.get_xdata()) == [0, 0]]


def test_map():
    sheet = drawn("map")
    ax, bar = sheet.axes
    assert bar.get_ylabel() == "loss"
    assert [text.get_text() for text in sheet.legends[0].get_texts()] == ["best", "theory", "diverged"]
    assert [tuple(line.get_xydata()[0]) for line in ax.lines] == [(1e-4, 0.0), (3e-4, 0.5)]
    (mesh,) = [c for c in ax.collections if hasattr(c, "get_coordinates")]
    corners = mesh.get_coordinates()
    np.testing.assert_allclose(corners[0, :, 0], [10**-4.5, 10**-3.5, 10**-2.5, 10**-1.5])
    np.testing.assert_allclose(corners[:, 0, 1], [-0.5, 0.5, 1.5])
    assert mesh.get_array().mask.tolist() == [[False, False, True], [False, False, True]]


def test_map_of_another_shape():
    with pytest.raises(
        LabError, match=r"a heat map of 3 by 2 points needs values \[2, 3\], not \(3, 2\)"
    ):
        a_map(Sheet(), np.zeros((3, 2)))


def test_a_method_keeps_its_colour():
    names = ["Adam", "SignSGD", "never"]
    colours_of = []
    for some in (["Adam", "SignSGD"], ["SignSGD"]):
        sheet = Sheet()
        figures.bars_with_intervals(sheet, {name: BEST[name] for name in some}, names=names)
        (line,) = [
            line
            for line in sheet.axes[0].lines
            if list(line.get_xdata()) == [2.3] and line.get_ms() == 7
        ]
        colours_of.append((line.get_color(), line.get_marker()))
    assert colours_of[0] == colours_of[1]


def test_methods_differ_in_more_than_colour():
    names = [f"method {i}" for i in range(20)]
    looks = [tuple(sorted(look_of(name, names).items())) for name in names]
    assert len(set(looks)) == 20
    first = [look_of(name, names) for name in names[:7]]
    assert len({look["color"] for look in first}) == len({look["marker"] for look in first}) == 7


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("name", DRAWINGS)
def test_labels_stay_beside_the_data_and_on_the_sheet(name, width):
    sheet = drawn(name, width)
    assert sheet.get_figwidth() == width
    legends = [*sheet.legends, *(ax.get_legend() for ax in sheet.axes if ax.get_legend())]
    for legend in legends:
        box = legend.get_window_extent()
        assert not any(box.overlaps(ax.get_window_extent()) for ax in sheet.axes)
    sheets.check(sheet)


@pytest.mark.parametrize("count", [2, 9, 30])
def test_long_names_are_read_in_full(count):
    names = [
        f"method {i}, learning rate 0.0123, batch size 128, layers 10, width 64" for i in range(count)
    ]
    curves = {name: (STEPS, FALL + i, FALL + i, FALL + i + 1) for i, name in enumerate(names)}
    bars = {name: estimate([i, i + 1, i + 3]) for i, name in enumerate(names)}
    rates = {name: {1e-3: e, 2e-3: LOST} for name, e in bars.items()}
    with sheets.checked() as titles:
        for render in (pergrad.lab.pages.sheet.render, pergrad.lab.pages.sheet.narrow):
            render("lines", lambda fig: figures.lines_with_bands(fig, curves, "step", "loss"))
            render("bars", lambda fig: figures.bars_with_intervals(fig, bars))
            render("rates", lambda fig: figures.loss_against_rate(fig, rates))
    assert len(titles) == 3


# The limits.


def test_limits():
    x = np.array([1.0, 2.0, 3.0])
    assert limits([], [], []) is None
    assert limits(x, x, x) == (1 - 0.12, 3 + 0.12)
    low, high = limits([*x, 1e6], [*x, 1e6], [*x, 1e6], usual=3.0) or (0, 0)
    assert low < 1 and 3 < high < 4
    low, high = limits([1e-3, 1.0, 1e3, 0.0], *[[1e-3, 1.0, 1e3, -1.0]] * 2, log=True) or (0, 0)
    assert 1e-4 < low < 1e-3 and 1e3 < high < 1e4


def test_where_values_leave_the_limits():
    values = [0, 5, 9, 7, 1, -3, -2, math.nan, 1, 6]
    assert list(outside(values, (0, 4))) == [(2, 9, True), (5, -3, False), (9, 6, True)]
    assert not list(outside([], (0, 4))) and not list(outside([1, 2], (0, 4)))


@pytest.mark.parametrize(
    ("value", "said"), [(3e-4, "0.0003"), (1e-5, "1e-5"), (2890, "2890"), (1.29e5, "1.29e5"), (0, "0")]
)
def test_short_numbers(value, said):
    assert short(value) == said


# What checks the figures.


def test_a_value_that_is_hidden_is_found():
    sheet = Sheet(layout="constrained")
    ax = sheet.add_subplot()
    ax.plot([1, 2, 3], [0.1, 0.2, 1.32])
    sheets.check(sheet)
    ax.set_ylim(0, 0.3)
    with pytest.raises(AssertionError, match=r"1\.32"):
        sheets.check(sheet)


def test_a_label_that_is_covered_or_cut_is_found():
    for x, words in ((0.5, "covers"), (1.5, "leaves the sheet")):
        sheet = Sheet(layout="none")
        sheet.text(0.5, 0.5, "one")
        sheet.text(x, 0.5, "another")
        with pytest.raises(AssertionError, match=words):
            sheets.check(sheet)


def test_a_reference_in_a_figure():
    sheet = Sheet()
    curve = ([1, 2, 4], [2.0, 3.0, 20.0], [1.5, 2.5, 18.0], [2.5, 3.5, 22.0])
    level = {"logx": True, "logy": True, "reference": (1.0, "jax.grad")}
    figures.lines_with_bands(sheet, {"ours": curve}, "T / D", "time", **level)
    (ax,) = sheet.axes
    low, high = ax.get_ylim()
    assert 0 < low < 1 and high > 20
    legend = ax.get_legend()
    assert legend is not None and "jax.grad" in [text.get_text() for text in legend.get_texts()]
