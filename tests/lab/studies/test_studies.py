"""Every study from end to end at a tiny size, and its own rules on numbers whose answer is known."""

import functools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pergrad as pg
from pergrad.lab import cli
from pergrad.lab.compare import decide
from pergrad.lab.compare.sweep import run_all
from pergrad.lab.config import Model, PresetName, StudyName, Train
from pergrad.lab.errors import LabError
from pergrad.lab.run.records import directory
from pergrad.lab.run.train import make_problem, parameters
from pergrad.lab.studies import STUDIES, Lab, _layers, adam, clipping, plane, scaling, sign, snr, write
from tests.support import chromium, labs, pages, sheets

TINY = Model(layers=1, width=8, heads=2, context=8)


@pytest.fixture(autouse=True, scope="module")
def as_for_users():
    with pages.jax_as_for_users():
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Train:
    folder = labs.write_text(tmp_path_factory.mktemp("text"), files=12)
    return Train(data=str(folder), model=TINY, batch_size=4, steps=24)


def tiny(name: str, base: Train) -> Any:
    """As small as a study can be."""
    fast, faster = (1e-2, 2e-2), {"seeds": 3, "tuning_seeds": 1, "extensions": 0}
    match name:
        case "sign":
            rates = dict.fromkeys((sign.MICRO, sign.MEAN, sign.LATE), fast)
            return sign.Preset(base, rates=rates, looks=2, looked_seeds=3, examples=64, **faster)
        case "adam":
            rates = dict.fromkeys(adam.NAMES, fast)
            return adam.Preset(base, rates=rates, **faster)
        case "plane":
            return plane.Preset(
                base, examples=96, batch_sizes=(4,), a=(0.0, 1.0), b=(0.0, 0.25, 1.0), **faster
            )
        case "scaling":
            return scaling.Preset(base, examples=96, batch_sizes=(1, 4, 16), rates=fast, **faster)
        case "clipping":
            rates = dict.fromkeys(clipping.OPTIMIZERS, fast)
            return clipping.Preset(base, rates=rates, batch_norms=(1.0,), example_norms=(1.0,), **faster)
        case "snr":
            return snr.Preset(base, seeds=3, points=6, looks=2, examples=32, probes=1)
    raise AssertionError(name)


CLAIMS = {"sign": 2 + 3, "adam": 8 + 2, "plane": 3, "scaling": 4, "clipping": 6, "snr": 3}
FIGURES = {"sign": 5, "adam": 3, "plane": 2, "scaling": 5, "clipping": 5, "snr": 2}


class Ran(NamedTuple):
    out: Path
    answers: list[decide.Verdict]
    told: list[tuple[Train, dict[str, Any], int, int]]


@pytest.fixture(scope="module")
def ran(base, tmp_path_factory):
    """A study of that name, run once."""

    @functools.cache
    def run(name: StudyName) -> Ran:
        out, told = tmp_path_factory.mktemp(name), []
        lab = Lab(out / "runs", 1, lambda *run: told.append(run))
        with sheets.checked() as drawn:
            page, answers = write(STUDIES[name], tiny(name, base), out, lab, "pergrad study")
        assert len(drawn) == FIGURES[name]
        assert page == out / "report.html"
        return Ran(out, answers, told)

    return run


@pytest.mark.parametrize("name", CLAIMS)
def test_study(name: StudyName, ran):
    """Results, figures and a page."""
    out, answers, told = ran(name)
    assert len(answers) == CLAIMS[name] and {v.answer for v in answers} <= set(decide.ANSWERS)
    text = (out / "report.html").read_text()
    assert all(claim in text for claim in ("Question", "Claim", "What was run", "pergrad study"))
    assert len(re.findall(r"<img [^>]*src=\"data:image/png;base64,", text)) == FIGURES[name]
    for kind in ("png", "svg"):
        drawn = list((out / "figures").glob(f"*.{kind}"))
        assert len(drawn) == FIGURES[name] and all(file.stat().st_size > 1000 for file in drawn)
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert {row["seed"] for row in rows if "seed" in row} == {0, 1, 2}
    assert all(math.isfinite(run["test_loss"]) for _, run, _, _ in told if not run["diverged"])
    assert told and len({config for config, *_ in told}) == len(told)


@pytest.mark.parametrize("name", CLAIMS)
def test_page_in_a_browser(name: StudyName, ran):
    with chromium.browser() as browser:
        chromium.check(browser, ran(name).out / "report.html")


def test_names_and_presets():
    assert set(get_args(StudyName)) == set(STUDIES)
    for study in STUDIES.values():
        assert set(study.presets) == set(get_args(PresetName))
        assert study.title and study.question.endswith("?") and study.claim.endswith(".")
    for name, claims in (("sign", sign.CLAIMS), ("adam", adam.CLAIMS), ("clipping", clipping.CLAIMS)):
        assert len(set(claims)) == len(claims), name


def test_the_command(base, ran, monkeypatch, capsys):
    """What is done is not run again, and the page comes out the same."""
    monkeypatch.setitem(STUDIES, "plane", replace(plane.STUDY, presets={"demo": tiny("plane", base)}))
    monkeypatch.chdir(ran("plane").out.parent)
    before = (ran("plane").out / "figures" / "batches-of-4.svg").read_bytes()
    assert cli.main(["study", "plane", "--out", ran("plane").out.name, "--processes", "1"]) == 0
    shown = capsys.readouterr().out
    assert "Adam, batch 4" in shown and shown.endswith(f"{ran('plane').out.name}/report.html\n")
    assert "1 of" not in shown
    assert (ran("plane").out / "figures" / "batches-of-4.svg").read_bytes() == before
    with pytest.raises(SystemExit):
        cli.main(["study", "sing"])
    assert "sing" in capsys.readouterr().err
    Path("file").write_text("")
    assert cli.main(["study", "plane", "--out", "file", "--processes", "1"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_demonstration(base, ran, monkeypatch, capsys):
    """A plan, prices beside jax.grad, a study; the page's path comes last."""
    monkeypatch.setitem(STUDIES, "sign", replace(sign.STUDY, presets={"demo": tiny("sign", base)}))
    monkeypatch.setattr(cli, "DEMO", base)
    out = ran("sign").out
    assert cli.main(["demo", "--out", str(out), "--processes", "1"]) == 0
    shown = capsys.readouterr().out
    parts = ["['head']", "candidate", "vmap(grad)", "Sign ends below MicroSign"]
    places = [shown.index(part) for part in parts]
    assert places == sorted(places) and shown.endswith(f"{out}/report.html\n")


# Where the sign goes.


def test_what_signs_keep():
    """Gradients whose signs are known: a third of the examples outweighs the others."""
    n = 300
    x = jnp.where(jnp.arange(n) % 3 == 0, 4.0, -1.0)  # mean 2/3, median -1
    stats_fn = pg.grad_stats(
        lambda params, x: jnp.mean(params["head"]["kernel"] * x),
        {
            "mean": pg.Mean(),
            "second_moment": pg.Mean(jnp.square),
            "sign": pg.Mean(jnp.sign),
            "nonzero": pg.Mean(lambda g: (g != 0).astype(g.dtype)),
            "sign_factor": pg.noise.SIGN_FACTOR,
            "count": pg.Count(),
        },
    )
    (row,) = sign.measure(stats_fn({"head": {"kernel": jnp.ones(())}}, x))
    assert _layers.group(row["layer"]) == "head"
    assert row["disagree"] == row["sure"] == 1  # the mean is above 0, that of the signs below
    g, s = np.array(x), np.sign(x)
    for key, values in (("before", g), ("after", s)):
        noise = values.var(ddof=1)
        expected = [values.mean() ** 2 - noise / n, noise]
        np.testing.assert_allclose(row[key], expected, rtol=1e-4)


def test_layers():
    assert _layers.group("['block_0']['qkv']['kernel'].value") == "attention"
    assert _layers.group("['block_0']['mlp_norm']['scale'].value") == "norms"
    assert _layers.group("['position']['embedding'].value") == "embedding"
    assert _layers.short("['position']['embedding'].value") == "position"


# What Adam divides by.


def test_spikes():
    calm = list(np.linspace(4, 3, 60))
    assert not adam.has_spike(calm) and adam.has_spike([*calm, 3.0 + adam.SPIKE + 0.2])
    assert adam.has_spike([*calm, None]) and not adam.has_spike([5.0, 9.0])
    assert adam.has_spike([5.0, None])  # however early


# The plane.


def test_rays_are_one_optimizer():
    """(c a, c b) with sqrt(c) times the learning rate, as the map says."""
    stats = {"mean": jnp.array([0.3, -2.0]), "second_moment": jnp.array([1.0, 5.0]), "count": 8}

    def update(scale: float) -> Any:
        tx = pg.optim.preconditioned_adam(
            scale**0.5, mean_square=scale * 1.0, variance=scale * 0.25, eps=0.0
        )
        return tx.update(stats["mean"], tx.init(stats["mean"]), stats["mean"], stats=stats)[0]

    np.testing.assert_allclose(update(1.0), update(9.0), rtol=1e-5)


def test_points_of_the_plane(base):
    assert plane._on_ray(0.25, 1.0) == (0.25, 1.0) and plane._on_ray(0.25, 0.0625) == (1.0, 0.25)
    assert plane._name(16, (1.0, 1 / 16)) == "Adam, batch 16"
    assert plane._name(4, (1.0, 1 / 16)) == "a = 1, b = 1/16, batch 4"
    with pytest.raises(LabError, match="1/8"):
        replace(tiny("plane", base), batch_sizes=(8,))


# Batch sizes.


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({1: 2.0, 2: 2.0, 4: 2.0, 8: 2.0, 16: 2.0}, (1, 16)),
        ({1: 2.3, 2: 2.01, 4: 2.0, 8: 2.02, 16: 2.2}, (2, 8)),
        ({1: 2.0, 2: 2.3, 4: 2.0, 8: 2.3, 16: 2.0}, (4, 4)),  # a gap ends it
        ({1: 2.0, 2: 2.0, 4: 2.0, 8: math.inf, 16: math.inf}, (1, 4)),
    ],
)
def test_how_far_a_rule_carries(ends, expected):
    noise = {0: 0.001, 1: -0.002, 2: 0.001, 3: 0.0, 4: 0.002}
    losses = {
        size: {s: x + (e if size != 4 else -e) for s, e in noise.items()} for size, x in ends.items()
    }
    assert scaling.reach(scaling.agreeing(losses, 4), 4) == expected


@pytest.mark.parametrize(
    ("ours", "theirs", "answer"),
    [
        ((8, 8), (3, 3), "supported"),
        ((5, 8), (3, 4), "supported"),
        ((5, 8), (3, 6), "not shown"),  # the other may reach as far
        ((3, 3), (5, 6), "contradicted"),
        ((4, 4), (4, 4), "contradicted"),  # as far is not farther
    ],
)
def test_octaves_are_counted(ours, theirs, answer):
    verdict = scaling.more_octaves("", scaling.Octaves(*ours), scaling.Octaves(*theirs))
    assert verdict.answer == answer and verdict.why.startswith(f"{ours[0]} octaves")


def test_batch_sizes_that_do_not_fit(base):
    preset = tiny("scaling", base)
    with pytest.raises(LabError, match="whole number of batches of 5"):
        replace(preset, batch_sizes=(4, 5))
    with pytest.raises(LabError, match="do not contain"):
        replace(preset, batch_sizes=(1, 16))


def test_scaled_rates(ran):
    """Each rule's learning rates, and the same examples for all."""
    told = [config for config, *_ in ran("scaling").told]
    assert {config.steps * config.batch_size for config in told} == {96}
    (rate,) = {config.learning_rate for config in told if config.noise_every}
    found = sorted({config.learning_rate for config in told if config.batch_size == 16})
    assert found == pytest.approx([rate, 2 * rate, 4 * rate])


# Clipping.


def test_a_difference_ends_where_one_diverged():
    assert clipping._difference([3.0, 2.0, 1.0], [2.0, 2.5, 1.0]) == [1.0, -0.5, 0.0]
    assert clipping._difference([3.0, None], [2.0, 2.5, 1.0]) == [1.0, None]


# Signal and noise.


def test_ratios_are_taken_of_sums():
    assert snr._ratio([(1.0, 4.0), (3.0, 4.0)]) == 2.0
    assert math.isnan(snr._ratio([(-1.0, 4.0)]))
    x, mean, low, high = snr._band([1, 2, 3], [[1.0, math.nan, 4.0], [4.0, 1.0, 4.0]])
    np.testing.assert_allclose(x, [1, 3])
    np.testing.assert_allclose(mean, [2, 4])
    assert low[0] < 2 < high[0]


def test_products_with_the_hessian(base, tmp_path):
    """At a checkpoint, mu' H mu by hand."""
    preset = tiny("snr", base)
    config = replace(base, checkpoint_every=12, keep=0)
    lab = Lab(tmp_path / "runs")
    run_all([config], lab.runs)
    rows = snr._critical(preset, [config], lab)
    assert [row["step"] for row in rows] == [12, 24]
    problem = make_problem(replace(config, batch_size=preset.examples))
    params = parameters(config, directory(lab.runs, config))[12]
    gradient = jax.grad(lambda p: problem.loss(p, problem.batches[12]))
    g = gradient(params)
    product = jax.jvp(gradient, (params,), (g,))[1]
    dot = sum(jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (g, product)), strict=True))
    signal, noise = rows[0]["curvature"]
    assert signal + noise / preset.examples == pytest.approx(float(dot), rel=1e-3)
