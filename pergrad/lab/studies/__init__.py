"""Studies: each module has one question of the paper, as a `STUDY` that `pergrad study NAME` runs."""

from __future__ import annotations

from pergrad.lab.config import StudyName
from pergrad.lab.studies import adam, clipping, overhead, plane, scaling, sign, snr
from pergrad.lab.studies._study import Lab, Study, StudyResult, write

__all__ = ["STUDIES", "Lab", "Study", "StudyResult", "write"]

STUDIES: dict[StudyName, Study] = {
    "sign": sign.STUDY,
    "adam": adam.STUDY,
    "plane": plane.STUDY,
    "scaling": scaling.STUDY,
    "clipping": clipping.STUDY,
    "snr": snr.STUDY,
    "overhead": overhead.STUDY,
}
