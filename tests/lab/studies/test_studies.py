"""Every study from end to end at a tiny size, and its own rules on numbers whose answer is known."""

import functools
import io
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
from jax.tree_util import tree_leaves_with_path as leaves_with_path
from rich.console import Console

import pergrad as pg
from pergrad.lab import cli, timing
from pergrad.lab.bench import price, tables, tasks
from pergrad.lab.compare import decide
from pergrad.lab.compare.sweep import TUNING_SEED, Tuned, run_all
from pergrad.lab.config import Model, PresetName, StudyName, Train
from pergrad.lab.errors import LabError
from pergrad.lab.run import optimizers
from pergrad.lab.run.records import directory
from pergrad.lab.run.train import make_problem, parameters
from pergrad.lab.studies import (
    STUDIES,
    Lab,
    _agreement,
    _layers,
    adam,
    argument,
    arms,
    clipping,
    demo,
    law,
    plane,
    quantile,
    ramp,
    rivals,
    scaling,
    sign,
    snr,
    write,
)
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
    fast = (1e-2, 2e-2)
    faster: Any = {"seeds": 3, "tuning_seeds": 1, "extensions": 0}
    rates: Any
    match name:
        case "sign":
            rates = dict.fromkeys((sign.MICRO, sign.MEAN, sign.LATE), fast)
            return sign.Preset(base, rates=rates, looks=2, looked_seeds=3, examples=64, **faster)
        case "arms":
            return arms.Preset(base, rates=dict.fromkeys((arms.MICRO, arms.MEAN), fast), **faster)
        case "argument":
            late = replace(base, optimizer="sign_ema")
            return argument.Preset(late, seeds=3, looks=3, examples=64, batches=8, trials=2)
        case "law":
            rates = dict.fromkeys((law.ADAM, law.LATE), (*fast, 4e-2))
            sizes: Any = {"examples": 96, "batch_sizes": (4, 16, 32)}
            return law.Preset(base, seeds=3, rates=rates, extensions=1, **sizes)
        case "ramp":
            ends: Any = {"fixed": (4, 8), "largest": 32}
            return ramp.Preset(base, examples=512, rates=fast, **ends, **faster)
        case "adam":
            rates = dict.fromkeys(adam.NAMES, fast)
            return adam.Preset(base, rates=rates, **faster)
        case "plane":
            return plane.Preset(
                base, examples=96, batch_sizes=(4,), a=(0.0, 1.0), b=(0.0, 0.25, 1.0), **faster
            )
        case "rivals":
            cells: Any = {"cells": (rivals.Cell(8, 12, 8), rivals.Cell(16, 6, 8))}
            tuned_alike: Any = {"b2": (0.95,), "decays": (0.0, 0.1), "clips": (None,)}
            return rivals.Preset(
                base, home=rivals.Cell(8, 12, 8), rates=fast, **cells, **tuned_alike, **faster
            )
        case "quantile":
            norms: Any = {"batch_norms": (1.0,), "example_norms": (1.0,), "quantiles": (0.5,)}
            return quantile.Preset(replace(base, outliers=0.25), rates=fast, **norms, **faster)
        case "scaling":
            return scaling.Preset(base, examples=96, batch_sizes=(1, 4, 16), rates=fast, **faster)
        case "clipping":
            rates = dict.fromkeys(clipping.OPTIMIZERS, fast)
            return clipping.Preset(base, rates=rates, batch_norms=(1.0,), example_norms=(1.0,), **faster)
        case "snr":
            return snr.Preset(base, seeds=3, points=6, looks=2, examples=32, probes=1)
    raise AssertionError(name)


CLAIMS = {
    "sign": 2,
    "arms": 4,
    "argument": 8,
    "adam": 8 + 2,
    "plane": 3,
    "rivals": 2 + 10 + 1,
    "scaling": 4,
}
CLAIMS |= {"law": 4, "ramp": 3, "clipping": 8, "quantile": 4, "snr": 4}
FIGURES = {"sign": 5, "arms": 3, "argument": 4, "adam": 4, "plane": 3, "rivals": 8, "scaling": 6}
FIGURES |= {"law": 2, "ramp": 2, "clipping": 6, "quantile": 4, "snr": 3}


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
    assert len(re.findall(r"<img [^>]*src=\"data:image/svg\+xml;base64,", text)) == FIGURES[name]
    for kind in ("png", "svg"):
        drawn = list((out / "figures").glob(f"*.{kind}"))
        assert len(drawn) == FIGURES[name] and all(file.stat().st_size > 1000 for file in drawn)
    for section in re.findall(r'<section id="s.*?</section>', text, re.DOTALL):
        assert '<table class="numbers">' not in section or "<img " in section, section[:80]
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    seeds = {row["seed"] for row in rows if "seed" in row}
    assert seeds - {TUNING_SEED} == {0, 1, 2}
    assert all(math.isfinite(run["test_loss"]) for _, run, _, _ in told if not run["diverged"])
    times = 4 if name == "ramp" else 1  # whose four plans are not in a run's options
    assert told and len(told) <= times * len({config for config, *_ in told})


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


def test_domains_and_kinds():
    """Every study has the data and the model that were asked for, or says that it cannot."""
    for name, study in STUDIES.items():
        lstm = study.preset("demo", "text", "lstm").base
        assert (lstm.domain, lstm.data, lstm.model.kind) == ("text", "stdlib", "lstm"), name
        assert study.preset("demo") == study.presets["demo"]
        if "images" in study.domains:
            assert study.preset("demo", "images").base.data == "photos"
        else:
            with pytest.raises(LabError, match="about text alone, not images"):
                study.preset("demo", "images")


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


def test_all_studies(monkeypatch):
    """Every study that the domain allows, each in a directory of its own."""
    asked = []
    monkeypatch.setattr(cli, "_study", lambda *args: asked.append(args))
    assert cli.main(["study", "all", "--domain", "images", "--out", "there"]) == 0
    assert [chosen for _, chosen, *_ in asked] == [
        one for name, one in STUDIES.items() if name != "overhead"
    ]
    assert {preset.base.data for _, _, preset, *_ in asked} == {"photos"}
    assert asked[0][3] == Path("there/sign")
    assert asked[0][5] == "pergrad study sign --preset demo --domain images"
    asked.clear()
    assert cli.main(["study", "all", "--model", "lstm"]) == 0
    assert len(asked) == len(STUDIES) and asked[0][2].base.model.kind == "lstm"
    assert asked[0][3] == Path("studies/sign-demo-lstm")


def test_the_demonstration(base, ran, monkeypatch, capsys):
    """A plan, prices beside jax.grad, the noise of a run, a study; the page's path comes last."""
    signs = replace(tiny("sign", base), looks=0, looked_seeds=0)
    noisy = replace(base, noise_every=4, steps=20)
    monkeypatch.setattr(demo, "PRESET", demo.Preset(noisy, signs))
    monkeypatch.setattr(cli, "DEMO", base)
    out = ran("sign").out
    shown = []
    for _ in range(2):  # what is done is shown again
        assert cli.main(["demo", "--out", str(out), "--processes", "1"]) == 0
        shown.append(capsys.readouterr().out)
        parts = ["['head']", "candidate", "vmap(grad)", "noise scale ", "Sign ends below MicroSign"]
        places = [shown[-1].index(part) for part in parts]
        assert places == sorted(places) and shown[-1].endswith(f"{out}/report.html\n")
    pictures = [re.findall(r"^ *[\d,]* [│└].*$", text, re.MULTILINE) for text in shown]
    assert pictures[0] == pictures[1] and len(pictures[0]) >= 11
    page = (out / "report.html").read_text()
    assert "The noise scale" in page and "signal-to-noise" not in page


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ([10, 20, 30, 40, 50, 60], "grew from 15 in the first third of the run to 55 in the last third"),
        ([60, 50, 40, 30, 20, 10], "did not grow in this run: it went from 55 in the first third"),
        ([-1, -1, -1, 10, 20, 30], "too little signal"),
    ],
)
def test_what_the_demonstration_says_of_the_noise(scales, words):
    """Sums of noise over sums of signal; a signal may be estimated to be negative."""
    rows = [{"noise": {"signal": math.copysign(2.0, x), "noise": 2.0 * abs(x)}} for x in scales]
    measured = demo.noise_of([{"step": i} | row for i, row in enumerate(rows)] + [{"step": 9}])
    assert words in demo.in_words(measured)


def test_prices_fit_a_terminal():
    """The table of the demonstration, with the longest names, in 80 columns."""
    names = [
        tasks.FLOOR,
        tasks.VMAP,
        f"{tasks.MICRO_GRAD}{tasks.MICROBATCH}1",
        tasks.PERGRAD,
        tasks.AUTO,
    ]
    built = timing.Executable(lambda: None, 1.0, 1.0, 1.2345e9)
    found = [timing.Result(name, built, (1.234, 1.3)) for name in names]
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal, color_system=None)
        tables.show(console, "", price.numbers(found), tables.BRIEF)
        lines = console.file.getvalue().splitlines()  # type: ignore
        assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
        assert all(any(name in line and "1234.0" in line for line in lines) for name in names)


# Where the sign goes.


def test_where_signs_disagree():
    """Gradients whose signs are known: a third of the examples outweighs the others."""
    x = jnp.where(jnp.arange(300) % 3 == 0, 4.0, -1.0)  # mean 2/3, median -1
    stats_fn = pg.grad_stats(
        lambda params, x: jnp.mean(params["head"]["kernel"] * x),
        {
            "mean": pg.Mean(),
            "second_moment": pg.Mean(jnp.square),
            "sign": pg.Mean(jnp.sign),
            "count": pg.Count(),
        },
    )
    (row,) = sign.measure(stats_fn({"head": {"kernel": jnp.ones(())}}, x))
    assert _layers.group(row["layer"]) == "head"
    assert row["disagree"] == row["sure"] == 1  # the mean is above 0, that of the signs below


def test_arms_between_the_signs(base):
    """Signs of the mean in some layers, of the examples in the others."""
    head, more = arms.arms_of(base).values()
    assert head.mean_signs == "head" and more.mean_signs == "head,up,down,embed,position"
    lstm = arms.arms_of(replace(base, model=replace(TINY, kind="lstm")))
    assert [arm.mean_signs for arm in lstm.values()] == ["head", "head,embed"]
    photos = arms.arms_of(replace(base, domain="images", data="photos"))
    assert [arm.mean_signs for arm in photos.values()] == ["head"]
    params = {name: {"kernel": jnp.zeros(2)} for name in ("head", "qkv")}
    mean = {name: {"kernel": jnp.array([3.0, -2.0])} for name in params}
    signs = {name: {"kernel": jnp.array([-0.5, 0.25])} for name in params}
    tx: Any = optimizers.make(head)
    updates, _ = tx.update(mean, tx.init(params), params, stats={"mean": mean, "sign": signs})
    np.testing.assert_allclose(updates["head"]["kernel"], -0.1 * np.array([1, -1]), rtol=1e-6)
    np.testing.assert_allclose(updates["qkv"]["kernel"], -0.1 * np.array([-0.5, 0.25]), rtol=1e-6)
    with pytest.raises(LabError, match="no layer hed"):
        optimizers.make(replace(head, mean_signs="hed")).init(params)


def test_layers():
    assert _layers.group("['block_0']['qkv']['kernel'].value") == "attention"
    assert _layers.group("['block_0']['mlp_norm']['scale'].value") == "norms"
    assert _layers.group("['position']['embedding'].value") == "embedding"
    assert _layers.short("['position']['embedding'].value") == "position"
    for config in (Train(model=replace(TINY, kind="lstm")), Train(domain="images", model=TINY)):
        paths = [jax.tree_util.keystr(p) for p, _ in leaves_with_path(make_problem(config).params)]
        middle = "recurrent" if config.domain == "text" else "convolutions"
        assert middle in _layers.groups(paths) and _layers.groups(paths)[-1] == "head"


# The signal-to-noise argument.


@pytest.mark.parametrize("rho", [0.03, 0.1, 0.5])
def test_ratios_by_brute_force(rho):
    """Mean over deviation of each placement's average, of Gaussian numbers."""
    B, b1, trials = 4, 0.8, 20_000
    g = rho + np.random.default_rng(0).standard_normal((40, B, trials))
    batches = {
        _agreement.EARLY: np.sign(g).mean(1),
        _agreement.MIDDLE: np.sign(g.mean(1)),
        _agreement.LATE: g.mean(1),
    }
    decays = (1 - b1) * b1 ** np.arange(40)
    found = _agreement.ratios(rho, B, b1)
    for place, of in batches.items():
        average = np.tensordot(decays, of, 1)
        assert average.mean() / average.std() == pytest.approx(found[place], rel=0.05, abs=0.02), place
    right = np.mean(np.tensordot(decays, batches[_agreement.LATE], 1) > 0)
    assert right == pytest.approx(_agreement.predicted(rho, B, b1)[_agreement.LATE], abs=0.01)


def test_numbers_of_the_argument():
    """At B = 16 and b1 = 0.9, signs after all averages: early and middle are near, late is above."""
    after = {
        k: v if k != "late" else _agreement.kept(v) for k, v in _agreement.ratios(0.1, 16, 0.9).items()
    }
    assert [round(float(x), 2) for x in after.values()] == [1.39, 1.43, 2.33]


def test_a_trial_by_hand():
    """One coordinate that is mostly negative, with a positive mean; one that is Gaussian-like."""
    loss = lambda p, x: jnp.mean(x @ p)  # noqa: E731
    x = np.tile(np.array([[4.0, 1.0], [-1.0, 1.0], [-1.0, -0.5], [-1.0, 1.0]], np.float32), (5, 1, 1))
    params, mu = jnp.zeros(2), x.mean((0, 1))
    moments = _agreement.Moments(jnp.asarray(mu), jnp.ones(2))
    right = _agreement.make_trial(_agreement.of_gradients(loss), 0.9)(params, moments, x)
    assert {place: np.asarray(own).tolist() for place, own in right.items()} == {
        "early": [0.0, 1.0],
        "middle": [1.0, 1.0],
        "late": [1.0, 1.0],
    }


def test_gaussian_surrogates():
    """Trials of surrogates are right as often as the formulas say."""
    rho = jnp.repeat(jnp.array([0.02, 0.1, 0.3]), 2000)
    moments = _agreement.Moments({"head": rho}, {"head": jnp.ones_like(rho)})
    trial = _agreement.make_trial(_agreement.of_gaussians(8), 0.9)
    right = trial(moments, moments, jax.random.split(jax.random.key(0), 44))
    right = jax.tree.map(np.asarray, right)
    expected = _agreement.predicted(np.asarray(rho, float), 8, 0.9)
    for place, own in right.items():
        ours, theirs = (np.asarray(x).reshape(3, -1).mean(1) for x in (own["head"], expected[place]))
        np.testing.assert_allclose(ours, theirs, atol=0.03)
    moments = jax.tree.map(np.asarray, moments)
    shares, groups, bins = _agreement.summed(moments, {_agreement.REAL: right}, 8, 0.9)
    weights = np.asarray(rho, float)
    late = np.average(right["late"]["head"], weights=weights)
    assert shares[_agreement.REAL]["late"] == pytest.approx(late, rel=1e-5)
    assert groups["head"]["weight"] == 1 and groups["head"][_agreement.REAL] == shares[_agreement.REAL]
    assert sum(x is not None for x in bins[_agreement.FORMULA]["late"]) == 3


# The law of the best learning rate.


def test_the_lowest_point():
    curve = {rate: 2 + (math.log(rate) - math.log(0.013)) ** 2 for rate in (4e-3, 8e-3, 1.6e-2, 3.2e-2)}
    assert math.exp(law.lowest(curve)) == pytest.approx(0.013)
    assert math.isnan(law.lowest({1.0: 1.0, 2.0: 2.0, 4.0: 3.0}))  # on the edge
    assert math.isnan(law.lowest({1.0: math.inf, 2.0: 2.0, 4.0: 3.0}))  # a neighbour diverged


def test_slopes_below_and_above():
    assert law.parts([1, 4, 16, 64], 20) == {"below": [1, 4, 16], "above": [16, 64]}
    assert law.parts([1, 4], math.nan) == {"below": [1, 4]}
    rate = {1: 0.01, 4: 0.02, 16: 0.04, 64: 0.044}  # the square-root rule, which then breaks
    own = {size: {s: math.log(x) + 1e-3 * s for s in range(5)} for size, x in rate.items()}
    below, above = law.verdicts({law.ADAM: own}, 20)
    assert (below.answer, above.answer) == ("supported", "supported")
    below, above = law.verdicts({law.MICRO: own}, 20)
    assert (below.answer, above.answer) == ("contradicted", "supported")
    own[1][0] = math.nan
    assert law.verdicts({law.ADAM: own}, 20)[0].answer == "not shown"


# Batches that follow the noise.


def test_plans_see_the_same_examples(ran):
    rows = [json.loads(line) for line in (ran("ramp").out / "results.jsonl").read_text().splitlines()]
    rows = rows[1:]  # the first one has the command
    steps = {(row["plan"], row["steps"]) for row in rows}
    assert {("fixed 4", 128), ("fixed 8", 64), ("ramp by hand", 32 + 16 + 8 + 4)} <= steps
    hand = next(row for row in rows if row["plan"] == "ramp by hand")
    assert hand["grown"] == [[0, 4], [128, 8], [256, 16], [384, 32]]
    assert {row["seed"] for row in rows} == {0, 1, 2, TUNING_SEED}


# What Adam divides by.


def test_spikes():
    calm = list(np.linspace(4, 3, 60))
    assert not adam.has_spike(calm) and adam.has_spike([*calm, 3.0 + adam.SPIKE + 0.2])
    assert adam.has_spike([*calm, None]) and not adam.has_spike([5.0, 9.0])
    assert adam.has_spike([5.0, None])  # however early


def test_stability_is_judged_at_several_rates(ran):
    """Made up: MicroAdam has spikes at all rates from 4 times the best on, the others nowhere."""
    rows = [
        {"stability": name, "factor": factor, "seed": seed, "learning_rate": 1e-2 * factor}
        | {"diverged": False, "spike": name == adam.MICRO and factor >= 4}
        for name in (adam.ADAM, *adam.LESS_STABLE)
        for factor in adam.FACTORS
        for seed in range(8)
    ]
    section = adam.stability(rows)
    assert [v.answer for v in section.verdicts] == ["supported", "not shown"]
    assert ["MicroAdam", "4", "0.04", "0 of 8", "8 of 8"] in section.tables[0].rows
    told = [config for config, *_ in ran("adam").told if config.optimizer == "micro_adam"]
    reported = {config.learning_rate for config in told if config.seed == 0 and config.clip is None}
    best = min(reported)
    assert sorted(reported) == pytest.approx([factor * best for factor in adam.FACTORS], rel=1e-5)


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


# Rivals of Adam.


def test_what_has_not_run_yet_is_left_out(base):
    """The rest is decided at the level that all cells, or all rivals, share."""

    def ended(loss: float) -> Tuned:
        return Tuned(base, {}, {seed: {"test_loss": loss + 0.01 * seed} for seed in range(3)})

    preset = tiny("rivals", base)
    pair = {rivals.ADAM: ended(2.0), rivals.FLOORED: ended(1.5)}
    in_one_cell = {rivals.name_in(preset.home, name): own for name, own in pair.items()}
    (verdict,) = rivals.where(preset, in_one_cell)
    assert verdict.answer == "supported" and "(97.5%" in verdict.why
    (verdict,) = rivals.beside(pair)
    assert verdict.claim == "MSQ with a floor ends below Adam" and "(99.5%" in verdict.why
    assert len(rivals.beside(pair | {rivals.CAPPED: ended(2.001)})) == 3


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
