"""TODO _trace."""

from pergrad._trace.trace import Program as Program
from pergrad._trace.trace import flat_jaxpr as flat_jaxpr
from pergrad._trace.trace import inlined as inlined
from pergrad._trace.trace import trace as trace
