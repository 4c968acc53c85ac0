"""Looks into a built sdist and wheel, and tries the wheel in empty environments: `make dist`.

    python tests/support/dist.py DIST_DIRECTORY PYTHON...

The environments have the library's own dependencies and no extras. In each of them pergrad is imported
and used, and the command `pergrad` must say in one line what it lacks. All this needs is Python and git.
"""

import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"pergrad-{PROJECT['version']}"
# A link or a picture in Markdown or HTML that only works beside the files of the checkout.
RELATIVE = re.compile(r"""\]\((?!https?:|\#)[^)]*\)|(?:src|srcset|href)=["'](?!https?:|\#)[^"']*["']""")
TRIED = f"""
import warnings
warnings.simplefilter("error")
import jax, jax.numpy as jnp, pergrad as pg
assert pg.__version__ == {PROJECT["version"]!r}, pg.__version__
loss = lambda w, x: jnp.mean((x @ w) ** 2)
stats = {{"mean": pg.Mean(), "variance": pg.Variance(), "norm": pg.Norm()}}
args = jnp.ones(2), jnp.array([[1.0, 0.0], [0.0, 2.0]])
value, found = jax.jit(pg.value_and_stats(loss, stats))(*args)
assert found["mean"].tolist() == [1, 4] and found["variance"].tolist() == [2, 32], found
assert jnp.allclose(found["norm"], jnp.array([2.0, 8.0])), found
pg.check(loss)(*args)
print("JAX", jax.__version__, end="")
"""


def main(directory: str, *pythons: str) -> None:
    wheel, sdist = (Path(directory) / f"{NAME}{end}" for end in ("-py3-none-any.whl", ".tar.gz"))
    look_into_wheel(wheel)
    look_into_sdist(sdist)
    print(f"{wheel.name} and {sdist.name} have what they should have")
    assert pythons, "no Python to try the wheel in"
    for python in pythons:
        print(try_out(wheel, python))


def tracked(folder: str) -> set[str]:
    """The files below a folder of the checkout that git knows; a release has these."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", folder], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(filter(None, listed.stdout.split("\0")))


def look_into_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        described = Parser().parsestr(archive.read(f"{NAME}.dist-info/METADATA").decode())
    info = {name for name in names if name.startswith(f"{NAME}.dist-info/")}
    assert names - info == tracked("pergrad"), (names - info) ^ tracked("pergrad")
    assert f"{NAME}.dist-info/licenses/LICENSE" in info
    assert "pergrad/py.typed" in names
    text = described.get_payload()
    assert "# pergrad" in text and not (relative := RELATIVE.findall(text)), relative
    for key, values in (
        ("Requires-Dist", PROJECT["dependencies"]),
        ("Classifier", PROJECT["classifiers"]),
    ):
        missing = set(values) - set(described.get_all(key) or [])
        assert not missing, f"{key}: {missing}"
    assert len(described.get_all("Project-URL") or []) == len(PROJECT["urls"])


def look_into_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {member.name.removeprefix(f"{NAME}/") for member in archive if member.isfile()}
    kept = {name for name in tracked(".") if not name.startswith((".ci/", ".github/"))}
    assert names - {"PKG-INFO"} == kept, (names - {"PKG-INFO"}) ^ kept


def try_out(wheel: Path, python: str) -> str:
    """Installs the wheel into an empty environment, and uses it in a directory without a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        run = {"cwd": folder, "capture_output": True, "text": True}
        environment = Path(folder) / "environment"
        subprocess.run([python, "-m", "venv", environment], check=True, **run)
        own = environment / "bin"
        install = [own / "python", "-m", "pip", "install", "--quiet", wheel.resolve()]
        installed = subprocess.run(install, **run)
        assert installed.returncode == 0, installed.stderr
        tried = subprocess.run([own / "python", "-c", TRIED], **run)
        assert tried.returncode == 0, tried.stderr
        command = subprocess.run([own / "pergrad", "train"], **run)
        line = command.stderr.strip()
        assert command.returncode == 1 and not command.stdout, command
        assert re.fullmatch(r"error: .*pip install 'pergrad\[lab\]'", line), line
        which = subprocess.run([own / "python", "--version"], **run).stdout.strip()
    return f"{which}, {tried.stdout}: imported and used; pergrad train: {line}"


if __name__ == "__main__":
    main(*sys.argv[1:])
