"""What the lab cannot do, in one line for the terminal."""

from pergrad._errors import PergradError


class LabError(PergradError):
    """A problem with files, arguments or a run, that the user can mend. One line, no traceback."""
