"""Keep freed memory with the process.

glibc gives every large block back to the system when it is freed, and asks for it again in the next step: hundreds of
thousands of page faults in a step that are nothing but clearing pages. Three settings of its allocator end that.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


def keep_memory() -> bool:
    """True where the C library knows how; memory then grows to what a step needs and stays there."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    largest = (1 << 31) - 1
    return all(
        mallopt(option, value) == 1
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, largest), (M_TOP_PAD, 64 << 20))
    )
