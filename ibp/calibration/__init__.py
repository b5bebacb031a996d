"""Measures the rates of a machine.

    calibration = ibp.calibration.calibrate()    # a few seconds, once for each GPU and driver
    print(calibration)

`ibp.compress` uses them to choose a scheme, and the calls that fetch use them to choose a path.
"""

from .._common.publishing import published
from .._machine.calibration import H200, Calibration, CoderRates
from ._measuring import calibrate

__all__ = ["H200", "Calibration", "CoderRates", "calibrate"]

__dir__ = published(__name__)
