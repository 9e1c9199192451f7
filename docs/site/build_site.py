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
from flowrl.rendering.style import DARK, LIGHT

NAVIGATION: dict[str, dict[str, str]] = {
    "Start": {
        "README.md": "What it is, five minutes, your own run",
        "docs/starting.md": "Your first own run",
        "docs/running.md": "A run: its command, its folder, its LoRA",
        "docs/data.md": "Where the prompts of a configuration come from",
        "docs/cards.md": "I have this card and this model",
        "docs/python.md": "From Python and notebooks",
        "docs/migrating.md": "What flow_grpo, DanceGRPO and others call it",
    },
    "Methods": {
        "docs/composing.md": "A method is a setting: what there is, and what it computes",
        "reference/methods.md": "What each method computes, with its options",
        "docs/full-training.md": "In the place of a LoRA",
        "docs/rlg.md": "Guidance by the tuned model",
        "docs/gallery.md": "Samples over a training: images, clips and edits",
    },
    "Rewards and measures": {
        "docs/rewards.md": "Choose, combine, check a reward",
        "reference/rewards.md": "Every reward and its options",
        "docs/serving.md": "Rewards behind HTTP",
        "docs/benchmarks.md": "Benchmarks and what their numbers say",
        "docs/unigenbench.md": "A judge that reads 600 prompts by test point",
        "docs/published.md": "What each published name reproduces",
    },
    "Models": {
        "docs/families.md": "Families, what was checked of each",
        "reference/families.md": "Every family and checkpoint, licences",
        "docs/generic.md": "Stock pipelines without a family of their own",
        "reference/configurations.md": "What to build on, from the embedded models to FLUX, Qwen-Image and Wan",
    },
    "Running": {
        "docs/watching.md": "Watch runs",
        "docs/trackers.md": "Weights & Biases, trackio, TensorBoard",
        "docs/resuming.md": "Ctrl-C, crashes, and going on with the same bits",
        "docs/memory.md": "What fills a card",
        "docs/speed.md": "Where the seconds go",
        "docs/gpu.md": "Ten minutes on your card, and where to send what they say",
        "docs/scaling.md": "Several cards, several machines",
        "docs/sharding.md": "One copy over several cards",
        "docs/workers.md": "Images drawn elsewhere, while this one learns",
        "docs/sharing.md": "Share what was trained",
        "docs/troubleshooting.md": "Symptoms and what to change",
    },
    "Reference": {
        "reference/keys.md": "Every key: type, default, allowed values",
        "reference/metrics.md": "Every number of metrics.jsonl",
        "reference/commands.md": "Every command and flag",
        "reference/api.md": "Public functions and classes",
    },
    "Research": {
        "docs/research/methods.md": "Measured side by side at equal cost, with what did not help",
        "docs/research/claims.md": "What papers say, and what came out here",
        "docs/research/hacking.md": "Runs that hack their reward, and what stops them",
        "docs/research/embedded-run.md": "How the settings of the demo were found",
        "docs/research/rlg.md": "Scales of guidance beside search and another KL",
        "docs/research/rewards.md": "Judges that err, discriminators that learn",
        "docs/research/speed.md": "Seconds of the embedded model, and beside flow_grpo",
        "docs/research/serving.md": "Requests per second, alone and under load",
        "docs/research/trials.md": "What was tried that takes minutes, and how",
    },
    "Project": {
        "docs/upgrading.md": "Runs, caches and names of older versions",
        "docs/versions.md": "Versions of libraries",
        "CONTRIBUTING.md": "How to contribute",
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
    """The first page: sections of the navigation with a line for each page."""
    sections = {
        name: {page: said for page, said in found.items() if page in pages} for name, found in NAVIGATION.items()
    }
    named = {page for found in sections.values() for page in found}
    if more := {page: title_of(text) for page, text in pages.items() if page.startswith("docs/") and page not in named}:
        sections["More"] = more
    out = [
        "# flowrl",
        "Fine-tune diffusion and flow-matching generators of images and video with reinforcement learning, and trust "
        "the numbers.",
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
