"""Builds the documentation site: python docs/site/build_site.py [FOLDER], or `make docs`.

The pages in docs/ stay where they are; this copies them with README.md and CONTRIBUTING.md into a folder, adds those
that are made of the code, builds all of it with Sphinx, and checks every link and anchor. Nothing is fetched.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from site_interface import functions_table, interface_pages
from site_links import faults_of_site, markdown_links
from site_reference import import_tables, reference_pages, vocabulary_tables
from site_syntax import ROOT

import flowrl
from flowrl.rendering.document import DARK, LIGHT

NAVIGATION: dict[str, dict[str, str]] = {
    "Start": {
        "README.md": "what flowrl is, two commands, your own run",
        "docs/starting.md": "`flowrl init` and `flowrl plan`",
        "docs/running.md": "what a run writes, and what you do with it",
        "docs/data.md": "sets that ship, sets of papers, your own",
        "docs/cards.md": "cards of 24, 40 and 80 GB",
        "docs/python.md": "the same functions without the command line",
        "docs/migrating.md": "flow_grpo, DanceGRPO, Flow-Factory, verl-omni",
    },
    "Methods": {
        "docs/composing.md": "what there is, and which settings choose it",
        "reference/methods.md": "made from the code",
        "docs/full-training.md": "instead of a LoRA",
        "docs/rlg.md": "blend a tuned model with its base while you sample",
        "docs/gallery.md": "images, clips and edits before and after",
    },
    "Rewards and benchmarks": {
        "docs/rewards.md": "combine several, and check one before you train on it",
        "reference/rewards.md": "made from the code",
        "docs/serving.md": "other machines, other packages",
        "docs/benchmarks.md": "what their numbers say",
        "docs/unigenbench.md": "600 prompts, and a judge that reads them by test point",
        "docs/published.md": "and what each was checked against",
    },
    "Models": {
        "docs/families.md": "and what was checked of each",
        "reference/families.md": "with licences and sizes",
        "docs/generic.md": "pipelines that flowrl has no code for",
        "reference/configurations.md": "from the embedded models to FLUX, Qwen-Image and Wan",
    },
    "Running": {
        "docs/watching.md": "curves and images while a run trains",
        "docs/trackers.md": "the same numbers elsewhere",
        "docs/resuming.md": "Ctrl-C, crashes, and longer trainings",
        "docs/memory.md": "what fills a card, and what makes room",
        "docs/speed.md": "`flowrl bench`",
        "docs/gpu.md": "ten minutes, and where to send the result",
        "docs/scaling.md": "which setting to turn when",
        "docs/sharding.md": "models that one card does not hold",
        "docs/workers.md": "while this one learns",
        "docs/sharing.md": "model cards, exports, uploads",
        "docs/troubleshooting.md": "symptoms and what to change",
    },
    "Reference": {
        "reference/keys.md": "type, default and allowed values of each",
        "reference/metrics.md": "every number of metrics.jsonl",
        "reference/commands.md": "every command and flag",
        "reference/api.md": "public functions and classes",
    },
    "Measured": {
        "docs/research/methods.md": "side by side at equal cost, with what did not help",
        "docs/research/claims.md": "what papers say, and what came out here",
        "docs/research/hacking.md": "runs that hack their reward",
        "docs/research/embedded-run.md": "how the settings of the demo were found",
        "docs/research/rlg.md": "scales of guidance, beside search and another KL",
        "docs/research/rewards.md": "judges that err, discriminators that learn",
        "docs/research/speed.md": "the embedded model, and flow_grpo's script beside it",
        "docs/research/serving.md": "requests per second, alone and under load",
        "docs/research/trials.md": "bad input, kills, power cuts and more",
    },
    "Project": {
        "docs/upgrading.md": "what becomes of your runs and caches",
        "docs/versions.md": "oldest and newest that were tested",
        "CONTRIBUTING.md": "how to contribute",
    },
}
"""Section -> page -> what a reader wants there. A page that is not there is left out; one of docs/ that is not named
stands at the end, so that none is lost."""
MADE = {
    "<!-- generated: functions -->": functions_table,
    "<!-- generated: vocabulary -->": vocabulary_tables,
    "<!-- generated: imports -->": import_tables,
}
"""Mark in a page -> tables that are put in its place, from the code that goes by them."""


def main(arguments: list[str]) -> int:
    """Builds the site into a folder (default build/docs) and says what is wrong; exit code 0 where nothing is."""
    folder = Path(arguments[0] if arguments else ROOT / "build" / "docs").resolve()
    try:
        from sphinx.application import Sphinx
    except ImportError:
        install = "in flowrl's folder, pip install -e '.[docs]', or make docs"
        print(f"the site needs Sphinx and its theme: {install}", file=sys.stderr)
        return 1
    source, html = folder / "source", folder / "html"
    for old in (source, html):
        shutil.rmtree(old, ignore_errors=True)
    write_sources(source)
    app = Sphinx(
        source, None, html, folder / "doctrees", "html", confoverrides=settings(), status=None, warning=sys.stderr,
        freshenv=True, warningiserror=True, exception_on_warning=False,
    )  # fmt: skip
    app.build(force_all=True)
    count, wrong = faults_of_site(html)
    for fault in wrong:
        print(fault, file=sys.stderr)
    print(f"{html / 'index.html'}: {len(list(html.rglob('*.html')))} pages, {count} links, {len(wrong)} broken")
    return 1 if wrong or app.statuscode else 0


def write_sources(folder: Path) -> None:
    """Writes the site's sources: pages by hand, pages made of the code, and the files that they link to."""
    pages = sources()
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for name in linked_files(pages):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)


def sources() -> dict[str, str]:
    """Path within the site -> Markdown, of every page."""
    by_hand = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    pages = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in by_hand}
    for mark, tables in MADE.items():
        pages = {name: text.replace(mark, tables()) if mark in text else text for name, text in pages.items()}
    pages |= reference_pages() | interface_pages()
    return pages | {"index.md": front_page(pages)}


def front_page(pages: dict[str, str]) -> str:
    """The first page: what flowrl is, and sections of the navigation with a line for each page."""
    sections = {
        name: {page: said for page, said in found.items() if page in pages} for name, found in NAVIGATION.items()
    }
    named = {page for found in sections.values() for page in found}
    if more := {page: title_of(text) for page, text in pages.items() if page.startswith("docs/") and page not in named}:
        sections["More"] = more
    out = [
        "# flowrl",
        "**Fine-tune diffusion and flow-matching models of images and video with reinforcement learning, and trust the "
        "numbers.**",
        "![Six prompts before and after training, same start noise](docs/gallery/before_after.png)",
        "```\nmake demo                                  # a laptop, no download: 7 to 15 minutes\n"
        ".venv/bin/flowrl train sd35m_evening       # one 24 GB card: Stable Diffusion 3.5 Medium, one evening\n```",
    ]
    for name, found in sections.items():
        toc = "\n".join(f"{title_of(pages[page])} <{page.removesuffix('.md')}>" for page in found)
        listed = "\n".join(f"- [{title_of(pages[page])}]({page}): {said}" for page, said in found.items())
        out += [f"## {name}", listed, f"```{{toctree}}\n:hidden:\n:caption: {name}\n\n{toc}\n```"]
    return "\n\n".join(out) + "\n"


def title_of(text: str) -> str:
    """The heading of a page, without marks; the overview's is the project's name."""
    title = next(line for line in text.splitlines() if line.startswith("# ")).removeprefix("# ").replace("`", "")
    return "Overview" if title == "flowrl" else title


def linked_files(pages: dict[str, str]) -> Iterator[str]:
    """Files of the repository that pages link to and that are no pages: results, images, configurations."""
    found = set()
    for name, text in pages.items():
        for target in markdown_links(text):
            parts = urlsplit(target)
            path = Path(os.path.normpath((ROOT / name).parent / unquote(parts.path)))  # folders of made pages are none
            if parts.scheme or not parts.path or path.suffix == ".md" or not path.is_file():
                continue
            found.add(path.relative_to(ROOT).as_posix())
    yield from sorted(found)


def settings() -> dict[str, Any]:
    """Sphinx's settings: Markdown, a theme that loads nothing from elsewhere, the colours of the reports."""
    return {
        "project": "flowrl", "release": flowrl.__version__, "language": "en",
        "html_title": f"flowrl {flowrl.__version__}", "extensions": ["myst_parser"],
        "root_doc": "index", "html_theme": "furo", "myst_heading_anchors": 6,
        "myst_heading_slug_func": "site_links.anchor_of", "html_show_sourcelink": False, "html_copy_source": False,
        "html_show_copyright": False, "pygments_style": "friendly", "suppress_warnings": ["misc.highlighting_failure"],
        "html_theme_options": {
            "light_css_variables": _colours(LIGHT), "dark_css_variables": _colours(DARK), "footer_icons": [],
        },
    }  # fmt: skip


def _colours(palette: str) -> dict[str, str]:
    """The brand's colours in a palette of the reports."""
    found = dict(part.split(":") for part in palette.replace("\n", "").strip(";").split(";"))
    return {"color-brand-primary": found["--p1"], "color-brand-content": found["--p1"]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
