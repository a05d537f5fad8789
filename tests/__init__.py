"""Tests of megarl."""

import os


def examples(count: int) -> int:
    """Random examples of a property test: all of them in ``make test``, a part in ``make test-fast``, which has a minute for everything."""
    return count * 6 // 10 if os.environ.get("MEGARL_TEST_FAST") == "1" else count
