"""A bench, or two beside each other, on a terminal of 80 columns."""

from __future__ import annotations

from flowrl.profiling.result import SECTIONS, WRONG, Bench, Phase, TimeSpread
from flowrl.rendering.terminal_text import COLUMNS, Table, as_table, wrapped
from flowrl.runs.vital_signs import ALIKE

_HEAD = ("of", "seconds", "min..max", "of ceiling", "roofline")
READING = (
    "seconds: median of one repeat, CPU seconds of all threads on a CPU, on a GPU between two events. of ceiling: "
    "FLOPs of the model (LoRA counted, recomputation not) a second, beside a large matrix product on this machine. "
    "roofline: the least a phase could take, by FLOPs or by bytes. An iteration and its stages are on the clock, and "
    "on a CPU, where ceilings are in CPU seconds, held against none."
)


def as_text(bench: Bench) -> str:
    """The whole bench."""
    parts = [wrapped(note) for note in bench.notes]
    for section in SECTIONS:
        rows = tuple(_row(bench, phase) for phase in bench.phases if phase.section == section)
        if rows:
            parts.append(as_table(Table(title=section, head=("", *_HEAD), rows=rows)))
        parts += [wrapped(line) for line in notes_of(bench, section)]
    return "\n\n".join([*parts, *last_words(bench), wrapped(READING)])


def notes_of(bench: Bench, section: str) -> list[str]:
    """What is particular about the phases of a section, those of one note together."""
    found: dict[str, list[str]] = {}
    for phase in bench.phases:
        if phase.section == section and phase.note:
            found.setdefault(phase.note, []).append(phase.name)
    return [f"{'; '.join(names)}: {note}" for note, names in found.items()]


def last_words(bench: Bench) -> list[str]:
    """What counts most: the pace, and whether the first ratio is 1."""
    said = list[str]()
    if (found := bench.throughput) is not None:
        said.append(wrapped(f"{rate(found[0])} on the clock, {_OF[found[1]]}"))
    if bench.ratio_first_deviation is not None:
        exact = bench.ratio_first_deviation == 0
        said.append(
            wrapped(
                "Rollout and update give the same log-densities, to the last bit."
                if exact
                else "Log-densities of rollout and update differ by at most "
                f"{bench.ratio_first_deviation:.2g} nats per latent dimension; above {ALIKE:g} look for the cause."
            )
        )
    said += [wrapped(f"{one.name}: {one.note}") for one in bench.phases if one.note.startswith(WRONG)]
    return said if bench.finished else [*said, "Cut off: what was measured until then is kept."]


_OF = {"whole": "of whole iterations", "forward and backward": "of forward and backward alone"}


def progress_line(bench: Bench, phase: Phase) -> str:
    """A phase as it ends."""
    if phase.seconds is None:
        return f"  {phase.key}  {phase.note}"[:COLUMNS]
    share = bench.utilisation(phase)
    return f"  {phase.key}  {time(phase.seconds.median)}" + (f"  {share:.0%} of ceiling" if share else "")


def as_comparison(first: Bench, second: Bench, names: tuple[str, str]) -> str:
    """Two benches: phases of both, and which changed beyond their spread."""
    rows = tuple(
        (key, time(a.median), time(b.median), f"{a.median / b.median:.2f}x" if b.median else "-", verdict)
        for key, a, b, verdict in compare_phases(first, second)
    )
    head = ("", "A", "B", "A / B", "beyond spread")
    only = [wrapped(f"Only in {name}: {'; '.join(keys)}") for name, keys in alone(first, second, names) if keys]
    differ = [wrapped(f"{key}: {a} | {b}") for key, a, b in facts_that_differ(first, second)]
    table = as_table(Table(title=f"A is {names[0]}, B is {names[1]}", head=head, rows=rows))
    return "\n\n".join([table, *only, *(["They differ in:\n" + "\n".join(differ)] if differ else [])])


def compare_phases(first: Bench, second: Bench) -> list[tuple[str, TimeSpread, TimeSpread, str]]:
    """Phases that both measured: key, spreads, and "faster", "slower" or "" where the ranges of repeats overlap."""
    later = {phase.key: phase for phase in second.phases}
    rows = []
    for phase in first.phases:
        other = later.get(phase.key)
        if phase.seconds is None or other is None or other.seconds is None:
            continue
        a, b = phase.seconds, other.seconds
        verdict = "faster" if b.high < a.low else "slower" if b.low > a.high else ""
        rows.append((phase.key, a, b, verdict))
    return rows


def alone(first: Bench, second: Bench, names: tuple[str, str]) -> list[tuple[str, list[str]]]:
    """Phases that only one of two measured."""
    keys = [{phase.key for phase in one.phases if phase.seconds is not None} for one in (first, second)]
    return [(names[0], sorted(keys[0] - keys[1])), (names[1], sorted(keys[1] - keys[0]))]


def facts_that_differ(first: Bench, second: Bench) -> list[tuple[str, str, str]]:
    """Facts of two benches that are not the same."""
    keys = [key for key in dict.fromkeys([*first.facts, *second.facts]) if key not in ("date", "command")]
    found = [(key, str(first.facts.get(key, "-")), str(second.facts.get(key, "-"))) for key in keys]
    return [(key, a, b) for key, a, b in found if a != b]


def _row(bench: Bench, phase: Phase) -> tuple[str, ...]:
    if phase.seconds is None:
        return (phase.name, amount(phase), "-", "", "", "")
    least, share = bench.roofline(phase), bench.utilisation(phase)
    if phase.section == "ceilings" and not phase.ceiling:
        return (phase.name, "", time(phase.seconds.median), span(phase.seconds), pace(phase), "")
    return (
        phase.name,
        amount(phase),
        time(phase.seconds.median),
        span(phase.seconds),
        "" if share is None else f"{share:.0%}",
        "" if least is None else time(least),
    )


def amount(phase: Phase) -> str:
    """How much one repeat is of: rows of the network, images or prompts; "" where it has none."""
    if phase.rows:
        return f"{phase.rows} row{'s' * (phase.rows != 1)}"
    what = "prompt" if phase.section == "text" else "image"
    return f"{phase.items} {what}{'s' * (phase.items != 1)}" if phase.items else ""


def time(seconds: float) -> str:
    """Seconds in three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def span(spread: TimeSpread) -> str:
    """Least and most of the repeats, in the unit of the median."""
    size = next((size for size in (1.0, 1e-3) if spread.median >= size), 1e-6)
    return f"{spread.low / size:.3g}..{spread.high / size:.3g}"


def pace(phase: Phase) -> str:
    """FLOPs or bytes a second of a ceiling."""
    if phase.seconds is None or not phase.seconds.median:
        return ""
    if phase.flops:
        return rate(phase.flops / phase.seconds.median)
    return f"{phase.least_bytes / phase.seconds.median / 1e9:.3g} GB/s"


def rate(flops: float) -> str:
    """FLOPs a second."""
    return f"{flops / 1e12:.3g} TFLOP/s" if flops >= 1e11 else f"{flops / 1e9:.3g} GFLOP/s"
