"""The judged benchmarks by name."""

from __future__ import annotations

from collections.abc import Mapping

from flowrl.benchmarks.judged.cases import Protocol
from flowrl.benchmarks.judged.gedit_bench import GEDIT_CN, GEDIT_EN
from flowrl.benchmarks.judged.geneval2 import GENEVAL2
from flowrl.benchmarks.judged.imgedit_bench import IMGEDIT
from flowrl.benchmarks.judged.tiif_bench import TIIF_LONG, TIIF_SHORT
from flowrl.benchmarks.judged.wise_bench import WISE, WISE_VERIFIED

PROTOCOLS: Mapping[str, Protocol] = {
    "gedit_cn": GEDIT_CN,
    "gedit_en": GEDIT_EN,
    "geneval2": GENEVAL2,
    "imgedit": IMGEDIT,
    "tiif_long": TIIF_LONG,
    "tiif_short": TIIF_SHORT,
    "wise": WISE,
    "wise_verified": WISE_VERIFIED,
}
"""The rules of each benchmark by its name."""
