"""What tests of the lab share: a little text, and programs that are compiled once."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from tests.support import pages


def write_text(folder: Path, files: int = 8) -> Path:
    """A little real text: some of this project's own sources."""
    folder.mkdir(exist_ok=True)
    package = pages.ROOT / "pergrad"
    sources = sorted(file for file in package.rglob("*.py") if file.name != "__init__.py")
    for file in sources[:files]:
        shutil.copy(file, folder / "-".join(file.relative_to(package).parts))
    return folder


@contextlib.contextmanager
def compiled_once(cache: Path) -> Iterator[None]:
    """JAX as a user finds it, with what is compiled kept in `cache`."""
    settings = {
        "jax_compilation_cache_dir": str(cache),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    with pages.jax_as_for_users():
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
