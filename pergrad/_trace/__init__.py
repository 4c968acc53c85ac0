"""Stage 1: a loss becomes the gradient program of one example.

In reading order: `trace` (the program, with its calls inlined), `unit_axes` (axes of length 1 leave it),
`lookups` (lookups come before differences), `ragged` (a ragged product becomes one that can be mapped
over examples), `rounds` (loops have the same number of rounds on all devices), `gathers` (parameters
that are divided among devices are gathered where they are used).
"""

from pergrad._trace.gathers import with_gathers as with_gathers
from pergrad._trace.rounds import with_common_rounds as with_common_rounds
from pergrad._trace.trace import Program as Program
from pergrad._trace.trace import flat_jaxpr as flat_jaxpr
from pergrad._trace.trace import inlined as inlined
from pergrad._trace.trace import trace as trace
