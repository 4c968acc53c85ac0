"""Prints the versions of all packages in this environment, as a constraints file for pip."""

import importlib.metadata
import platform
import re


def main() -> None:
    found = {
        re.sub(r"[-_.]+", "-", part.name).lower(): part.version
        for part in importlib.metadata.distributions()
    }
    for name in ("pergrad", "pip", "setuptools"):
        found.pop(name, None)
    version = ".".join(platform.python_version_tuple()[:2])
    machine = f"{platform.system()} {platform.machine()}"
    print(f"# What the tests ran with, with the extra bench: Python {version}, {machine}.")
    print("# `make constraints` writes this file. To have the same packages:")
    print("#     pip install -c constraints.txt -e '.[dev]'")
    for name in sorted(found):
        print(f"{name}=={found[name]}")


if __name__ == "__main__":
    main()
