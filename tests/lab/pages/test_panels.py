"""Tables as figures: every number of a table is drawn and written."""

import doctest

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from pergrad.lab.pages import panels, report, sheet
from tests.support import sheets

TABLE = report.Table(
    "Runs",
    ["method", "times the rate", "learning rate", "final loss", "diverged", "on the edge"],
    [
        ["Adam", "1", "0.0004", "2.30 (2.28 to 2.32)", "0 of 3", "yes"],
        ["Adam with a long name that has to be broken", "2", "0.04", "-1.5 (-2 to 0.5)", "1 of 3", ""],
        ["Sign", "4", "0.4", "diverged", "3 of 3", ""],
    ],
)
FIGURE = panels.of_table(TABLE, "All runs", "", names=2)


@pytest.mark.parametrize("width", [sheet.WIDE, sheet.NARROW])
def test_every_number_is_drawn_and_written(width):
    fig = Figure(layout="constrained")
    fig.set_figwidth(width)
    FIGURE.draw(fig)
    there = {ax.get_title("left"): ax for ax in fig.axes if ax.axison}
    assert list(there) == ["learning rate", "final loss", "diverged"]
    drawn = {title: {x for line in ax.lines for x in line.get_xdata()} for title, ax in there.items()}
    assert {0.0004, 0.04, 0.4} <= drawn["learning rate"] and there["learning rate"].get_xscale() == "log"
    assert {2.3, 2.28, 2.32, -1.5, -2, 0.5} <= {round(x, 9) for x in drawn["final loss"]}
    assert {0, 1, 3} <= drawn["diverged"]
    words = " ".join(" ".join(text.get_text() for text in fig.findobj(Text)).split())
    for row in TABLE.rows:
        assert all(cell in words for cell in row[2:5])
    assert "Adam, times the rate 1" in words


def test_labels_can_be_read():
    with sheets.checked() as titles:
        sheet.render(FIGURE.title, FIGURE.draw)
        sheet.narrow(FIGURE.title, FIGURE.draw)
    assert titles == ["All runs"]


def test_docstring():
    assert not doctest.testmod(panels).failed
