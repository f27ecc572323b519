"""Laws of codecs, exchanges, engines and links, for the tests of a method of one's own.

    import pytest
    from paceline.testing import laws
    from mine import Codec

    @pytest.mark.parametrize("law", laws("codec"), ids=str)
    def test_codec(law):
        law(Codec)

A law of a codec, an exchange or an engine is called with a function that makes one. A law of a link is called by every
rank, with its link, in threads or processes of the test's own. Each raises AssertionError where it is broken, and
TypeError where a method lacks a function or a codec's collectives are not as it has declared them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

MODULES = "codecs", "engines", "exchanges", "links", "in_process"
if "pytest" in sys.modules:  # a failing assertion shows its values
    sys.modules["pytest"].register_assert_rewrite(*(f"{__name__}.{each}" for each in MODULES))

from paceline.testing import codecs, engines, exchanges, links  # noqa: E402
from paceline.testing.law import Law  # noqa: E402

LAWS = {"codec": codecs.laws, "exchange": exchanges.laws, "engine": engines.laws, "link": links.laws}


def laws(kind: str) -> Sequence[Law]:
    """The laws of a ``kind`` of method; ``str`` of each is its name. Raises ValueError."""
    if kind not in LAWS:
        raise ValueError(f"there are laws of {', '.join(LAWS)}, and none of {kind!r}")
    return LAWS[kind]()
