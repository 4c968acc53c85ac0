"""What other versions of JAX get: a warning that names the tested range, and never a bare KeyError."""

import re
import subprocess
import sys
import tomllib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pergrad as pg
from pergrad import _compat
from tests.support.pages import ROOT


def imported(version: str, *options: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """A process that imports pergrad and believes that JAX has this version."""
    numbers = tuple(map(int, version.split(".")))
    code = f"import jax; jax.__version__, jax.__version_info__ = {version!r}, {numbers}"
    code = "\n".join([code, before, "import pergrad", "print('imported')"])
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def found(version: str) -> str:
    return f"pergrad is tested with JAX {_compat.TESTED}, and this is JAX {version}."


def test_newer_jax_is_imported_with_a_warning(version: str = "0.13.0"):
    ran = imported(version)
    assert ran.stdout == "imported\n"
    assert (
        f"UserWarning: pergrad is tested with JAX {_compat.TESTED}, and this is JAX {version}."
        in ran.stderr
    )
    assert "pip install 'jax<0.13'" in ran.stderr


def test_tested_jax_is_imported_without_a_warning(version: str = "0.12.7"):
    ran = imported(version, "-W", "error")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "imported\n", "")


def test_older_jax_is_refused(version: str = "0.7.1"):
    ran = imported(version)
    assert ran.returncode != 0
    assert (
        f"ImportError: pergrad is tested with JAX {_compat.TESTED}, and this is JAX {version}"
        in ran.stderr
    )


def test_missing_internals_are_explained():
    ran = imported("0.13.0", before="import jax.interpreters.partial_eval as m; del m.dce_jaxpr")
    assert ran.returncode != 0
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {found('0.13.0')}")
    assert "dce_jaxpr" in last and "pip install 'jax<0.13'" in last


def scanned_loss(w: jax.Array, x: jax.Array) -> jax.Array:
    h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=2)
    return jnp.mean(h)


@pytest.mark.parametrize("call", [pg.grad_stats, pg.explain])
def test_newer_jax_that_renames_a_parameter(call: Any, monkeypatch: pytest.MonkeyPatch):
    def renamed(eqn: Any) -> Any:
        return eqn.params["no such parameter"]

    monkeypatch.setattr(_compat, "scan_lengths", renamed)
    args = jnp.eye(2), jnp.ones((3, 2))
    with pytest.raises(
        KeyError, match="no such parameter"
    ):  # in a tested version it is a mistake of ours
        call(scanned_loss, pg.Mean())(*args)
    monkeypatch.setattr(jax, "__version_info__", (0, 13, 0))
    with pytest.raises(pg.PergradError, match=f"no such parameter.*tested with JAX {_compat.TESTED}"):
        call(scanned_loss, pg.Mean())(*args)


def test_range_is_the_same_everywhere():
    """In pyproject.toml, the Makefile, the README and the table of differences."""
    oldest, newest = (".".join(map(str, v)) for v in (_compat.OLDEST, _compat.NEWEST))
    assert f"{oldest} to {newest}" == _compat.TESTED
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"jax>={oldest}" in project["dependencies"]
    assert f"OLDEST_JAX := jax=={oldest} jaxlib=={oldest}\n" in (ROOT / "Makefile").read_text()
    assert f"jax >= {oldest}" in (ROOT / "README.md").read_text()
    assert re.search(rf"JAX {oldest} .*to {newest} ", (_compat.__doc__ or ""))


@pytest.mark.parametrize("version", [(0, 7, 2), (0, 10, 2), (0, 12), (0, 12, 0, 1), (0, 12, 9)])
def test_tested_versions(version: tuple[int, ...]):
    assert not _compat.is_untested(version)


@pytest.mark.parametrize("version", [(0, 13), (0, 99, 2), (1, 0, 0)])
def test_untested_versions(version: tuple[int, ...]):
    assert _compat.is_untested(version)


def test_this_jax_is_tested():
    assert jax.__version_info__ >= _compat.OLDEST and not _compat.is_untested(jax.__version_info__)
