"""The errors that pergrad raises. Each names the culprit, the reason and the way out."""


class PergradError(Exception):
    """Base class of every error that pergrad raises on purpose."""


class ArgumentError(PergradError, ValueError):
    """An argument that cannot be right: a wrong shape, an unknown name, an empty batch."""


class NotPerExampleError(PergradError):
    """The loss of the whole batch is not the mean of its examples' own losses."""
