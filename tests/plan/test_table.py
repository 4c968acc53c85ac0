"""How a plan is shown: no line is too long for a terminal, and nothing is left out."""

import html.parser
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

import pergrad as pg
from pergrad._plan import Row, ratio, short, table

STATS = {"mean": pg.Mean(), "second_moment": pg.Mean(jnp.square), "norm": pg.Norm()}
HEAD = ["parameter", "shape", "term", "strategy", "ops", "x grad", "memory", "why"]


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tokens(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def first_class(logits):
    return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])


# Real models.


def linen_transformer():
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
            return x + nn.Dense(64)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(x))))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, batch):
            return nn.Dense(1000)(Block()(Block()(nn.Embed(1000, 64)(batch))))

    model, batch = Model(), tokens(8, 32)
    params = jax.eval_shape(model.init, jax.random.key(0), batch)
    return pg.explain(lambda p, x: first_class(model.apply(p, x)), STATS)(params, batch)


def linen_cnn():
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(64, (3, 3), strides=2)(nn.relu(nn.Conv(32, (3, 3))(x))))
            return nn.Dense(10)(x.reshape(x.shape[0], -1))

    model, batch = Model(), floats(16, 28, 28, 1)
    params = jax.eval_shape(model.init, jax.random.key(0), batch)
    return pg.explain(lambda p, x: first_class(model.apply(p, x)), STATS)(params, batch)


def nnx_transformer():
    nnx = pytest.importorskip("flax.nnx")
    pergrad_nnx = pytest.importorskip("pergrad.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(100, 16, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(4, 16, rngs=rngs, decode=False)
            self.out = nnx.Linear(16, 100, rngs=rngs)

        def __call__(self, batch):
            return self.out(self.attention(self.embed(batch)))

    model = Model(nnx.Rngs(0))
    explain = pergrad_nnx.explain(lambda m, x: first_class(m(x)), STATS)
    return explain(model, jnp.zeros((8, 32), jnp.int32))


def equinox_mlp():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(64, 10, 256, 3, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return pg.explain(lambda p, x: first_class(jax.vmap(eqx.combine(p, static))(x)), STATS)(
        params, floats(32, 64)
    )


def haiku_mlp():
    hk = pytest.importorskip("haiku")
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([128, 128, 10])(x)))
    params = jax.eval_shape(model.init, jax.random.key(0), floats(32, 64))
    return pg.explain(lambda p, x: first_class(model.apply(p, x)), STATS)(params, floats(32, 64))


def stack_of_layers():
    def loss(params, batch):
        def layer(h, own):
            return jnp.tanh(h @ own["w"] + own["b"]), None

        h, _ = jax.lax.scan(layer, params["embed"][batch], params["layers"])
        return jnp.mean(h @ params["embed"].T)

    layers = {"w": floats(12, 64, 64), "b": floats(12, 64)}
    with jax.numpy_rank_promotion("allow"):
        return pg.explain(loss, STATS)({"embed": floats(512, 64), "layers": layers}, tokens(8, 32))


def several_arguments():
    def loss(w, v, x):
        return jnp.mean(jnp.tanh(x @ w["first"][0]) @ v)

    everything = {"all": pg.ClippedMean(1.0), "gram": pg.Gram(), **STATS}
    return pg.explain(loss, everything, (0, 1), batch_argnums=2)(
        {"first": [floats(8, 16)]}, floats(16), floats(4, 5, 8)
    )


MODELS = [
    *(linen_transformer, linen_cnn, nnx_transformer, equinox_mlp, haiku_mlp),
    *(stack_of_layers, several_arguments),
]


# Plans that no model has.


def rows_of(*paths, strategy="summed", kind="product", reason="one sum over all examples"):
    return [Row(path, (3, 4), kind, strategy, 1e6, 5e5, 1e3, reason) for path in paths]


# Reading a table again.


def read(text):
    """The rows, as cells with the whole path in front and the reason at the end, and the totals."""
    head, dashes, *lines = text.splitlines()
    spans = [match.span() for match in re.finditer("-+", dashes)]
    assert [head[a:b].strip() for a, b in spans] == HEAD
    end = lines.index("")
    notes, totals = [list(g) for full, g in itertools.groupby(lines[end + 1 :], key=bool) if full]
    reasons = re.split(r"\n +\d+  ", re.sub(r"\n +(?!\s*\d+  )", " ", "\n".join(notes)))
    assert reasons[0] == "why"

    rows, above, last = [], "", None
    for line in lines[:end]:
        cells = [line[a:b].strip() for a, b in spans]
        if cells[-1].isdigit():
            inside = line.startswith(" ")
            above = above if inside else ""
            rows.append([above + cells[0], *cells[1:-1], reasons[int(cells[-1])]])
        elif line.startswith(" "):  # terms and strategies go on
            rows[-1] = [f"{a} {b}".strip() for a, b in zip(rows[-1], [*cells[:-1], ""], strict=True)]
        else:
            above = above + line if last == "above" else line
        last = "row" if cells[-1].isdigit() or line.startswith(" ") else "above"
    return rows, totals


def cells_of(row):
    shape = "x".join(map(str, row.shape)) or "scalar"
    operations = short(row.operations), ratio(row.operations, row.plain_operations)
    return [row.path, shape, row.kind, row.strategy, *operations, f"{short(row.bytes)}B", row.reason]


def widest(text):
    return max(map(len, text.splitlines()))


@pytest.mark.parametrize("make", MODELS)
def test_a_plan_fits_a_terminal_and_says_everything(make):
    plan = make()
    rows, totals = read(plan.text)
    assert rows == [cells_of(row) for row in plan.rows]
    assert len(totals) == 3
    assert widest(plan.text) <= 80


def test_a_small_table_has_one_line_a_parameter():
    rows = rows_of("['b']", "['w']")
    text = table.as_text(rows, ["the total"])
    assert text.splitlines() == [
        "parameter  shape  term     strategy  ops  x grad  memory  why",
        "---------  -----  -------  --------  ---  ------  ------  ---",
        "['b']      3x4    product  summed    1M   2.00    1kB     1",
        "['w']      3x4    product  summed    1M   2.00    1kB     1",
        "",
        "why",
        "  1  one sum over all examples",
        "",
        "the total",
    ]


LONG = "['parameters_of_the_model']['the_third_block']['attention']['query']"


@pytest.mark.parametrize(
    "rows",
    [
        rows_of(f"{LONG}['kernel']", "['w']", f"{LONG}['bias']", f"{LONG}['scale']"),
        rows_of(LONG * 3, LONG * 3 + "['w']"),
        rows_of("['w']", strategy="streamed:4, gram, factored, materialise, summed, sparse, centred"),
        rows_of("['w']", kind="product + scatter + convolution + ragged product + sum + value"),
        rows_of(f"['{'name' * 15}']", f"['{'name' * 14}']"),
        rows_of("['w']", reason="; ".join(["made by dot_general at model.py:12 (Model.__call__)"] * 4)),
        rows_of("""["it's"]['a.b[0]c'].d[3][<flat index 0>]args[0].."""),
        [row for n in range(12) for row in rows_of(f"['w'][{n}]", reason=f"the reason {n}")],
    ],
    ids=["deep", "deeper", "strategies", "terms", "names", "reason", "odd", "many"],
)
def test_what_is_long_is_broken_and_not_lost(rows):
    text = table.as_text(rows, ["the total"])
    assert read(text) == ([cells_of(row) for row in rows], ["the total"])
    assert widest(text) <= 80


def test_a_name_that_is_too_long_stays_whole():
    path = f"['{'x' * 100}']"
    assert path in table.as_text(rows_of(path, "['w']"), ["the total"])


class Cells(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.rows, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        self.text = ""

    def handle_data(self, data):
        self.text += data

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.rows[-1].append(self.text)


@pytest.mark.parametrize("make", [linen_cnn, stack_of_layers])
def test_notebooks_show_a_table(make):
    plan = make()
    text = plan._repr_html_()
    assert Cells(text).rows == [HEAD, *(cells_of(row) for row in plan.rows)]
    for line in plan.text.splitlines()[-3:]:
        assert line in text


def test_html_is_escaped():
    (row,) = rows_of("['<b>&']", reason="made by mul at page.py:1 (<lambda>)")
    text = table.as_html([row], ["1 < 2"])
    assert "<b>" not in text and "<lambda>" not in text and "1 < 2" not in text
    assert Cells(text).rows[1] == cells_of(row)
