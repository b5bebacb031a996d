"""The rates of a machine, by which `ibp.compress` chooses a scheme and the calls that fetch choose a path.

calibration = ibp.calibration.calibrate()    # a few seconds, once for each GPU and driver
print(calibration)
"""

from .._machine.calibration import H200, Calibration, CoderRates
from ._measuring import calibrate

__all__ = ["H200", "Calibration", "CoderRates", "calibrate"]


def __dir__() -> list[str]:
    return __all__
