"""Measures how fast a machine moves and decodes data.

    calibration = ibp.calibration.calibrate()    # a few seconds, once for each GPU and driver
    print(calibration)

`ibp.compress` uses the rates to choose a scheme, and calls that fetch rows use them to choose a path to the GPU.
"""

from .._common.publishing import published
from .._machine.calibration import H200, Calibration, CoderRates
from ._measuring import calibrate

__all__ = ["H200", "Calibration", "CoderRates", "calibrate"]

__dir__ = published(__name__)
