"""`python -m pergrad.lab`, and the command `pergrad`."""

import sys


def main() -> int:
    try:
        from pergrad.lab.cli import main as run
    except ImportError as error:
        print(
            f"error: {error}. The command needs more than the library: pip install 'pergrad[lab]'",
            file=sys.stderr,
        )
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
