"""Runs the tutorials and writes the figures that they draw: `make docs-figures`.

Each tutorial draws its own figure, into the directory that it runs in. The tests run the same code in a
directory of their own.
"""

import contextlib
import os

from tests.support import pages


def main() -> None:
    for page in sorted((pages.ROOT / "docs" / "tutorials").glob("*.md")):
        figures = pages.figures(page)
        if not figures:
            continue
        namespace: dict[str, object] = {}
        with contextlib.chdir(page.parent), open(os.devnull, "w") as nowhere:
            for code, _ in pages.blocks(page):
                with contextlib.redirect_stdout(nowhere):
                    exec(code, namespace)
        print(f"{page.name}: {', '.join(figures)}")


if __name__ == "__main__":
    main()
