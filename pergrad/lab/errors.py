"""Errors of the lab, each told in one line in the terminal."""

import re

import jax

import pergrad as pg


class LabError(pg.PergradError):
    """A problem with files, arguments or a run that the user can mend, told without a traceback."""


def in_one_line(error: BaseException) -> str | None:
    """The line that tells of an error which the user can mend; None if it needs a traceback."""
    if isinstance(error, pg.PergradError):
        return str(error)
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in _of_jax(error):
        size = re.search(r"allocat\w* (\d+) bytes", str(error))
        wanted = f": {int(size[1]) / 2**30:.1f} GiB more were asked for" if size else ""
        return (
            f"the memory is not enough{wanted}. --microbatch-size 1 takes the examples of a batch one "
            "at a time; a smaller --batch-size, --model.context or --model.width needs less, too."
        )
    return None


def _of_jax(error: BaseException) -> str:
    return str(error) if isinstance(error, jax.errors.JaxRuntimeError) else ""
