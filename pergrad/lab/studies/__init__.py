"""Studies: each module has one question of the paper, as a `STUDY` that `pergrad study NAME` runs."""

from __future__ import annotations

from pergrad.lab.config import StudyName
from pergrad.lab.studies import (
    adam,
    argument,
    arms,
    clipping,
    law,
    overhead,
    plane,
    quantile,
    ramp,
    rivals,
    scaling,
    sign,
    snr,
)
from pergrad.lab.studies._study import Lab, Study, StudyResult, write

__all__ = ["STUDIES", "Lab", "Study", "StudyResult", "write"]

STUDIES: dict[StudyName, Study] = {
    "sign": sign.STUDY,
    "arms": arms.STUDY,
    "argument": argument.STUDY,
    "adam": adam.STUDY,
    "plane": plane.STUDY,
    "rivals": rivals.STUDY,
    "scaling": scaling.STUDY,
    "law": law.STUDY,
    "ramp": ramp.STUDY,
    "clipping": clipping.STUDY,
    "quantile": quantile.STUDY,
    "snr": snr.STUDY,
    "overhead": overhead.STUDY,
}
