"""A wall clock that jumps: on the path of a process, it adds what a file says to `time.time`.

The file is named by CLOCK_OFFSET_FILE and holds seconds. Monotonic clocks are left alone, as when
somebody sets the clock of a host. gRPC sees no jump: it makes a deadline of this clock and has the
kernel's clock count it down, and on a real host both jump as one.
"""

import os
import sys
import time

_PATH = os.environ["CLOCK_OFFSET_FILE"]
_time, _time_ns = time.time, time.time_ns


def _is_grpc(depth: int = 2) -> bool:
    return str(sys._getframe(depth).f_globals.get("__name__")).startswith("grpc")


def _offset_s() -> float:
    with open(_PATH) as file:
        return float(file.read())


def _jumping_time() -> float:
    return _time() if _is_grpc() else _time() + _offset_s()


def _jumping_time_ns() -> int:
    return _time_ns() if _is_grpc() else _time_ns() + int(_offset_s() * 1e9)


time.time, time.time_ns = _jumping_time, _jumping_time_ns
