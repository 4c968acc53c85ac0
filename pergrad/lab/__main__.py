"""`python -m pergrad.lab`, and the command `pergrad`."""

import os
import sys


def main() -> int:
    """Runs the command and returns its exit code. A closed output (`pergrad | head`) is not an error."""
    try:
        try:
            return _run()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the last flush, at exit
        return 128 + 13  # as a shell reports SIGPIPE


def _run() -> int:
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
