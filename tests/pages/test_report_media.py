"""Reports of runs that make videos or edit images."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch

from flowrl.media.kept import write_samples
from flowrl.pages import shown_samples
from flowrl.pages.report import report
from flowrl.rendering import embedded_images

PROMPT = 'turn it <b>red</b> & "round"'


class Media(HTMLParser):
    """Collects images, clips, figures and the policy of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.images: list[dict[str, str | None]] = []
        self.clips: list[dict[str, str | None]] = []
        self.figures = 0
        self.policy = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "img":
            self.images.append(found)
        if tag == "video":
            self.clips.append(found)
        self.figures += tag == "figure" and str(found.get("class")) == "pair"
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(found["content"])


def media_of(path: Path) -> tuple[Media, str]:
    page = path.read_text(encoding="utf-8")
    parser = Media()
    parser.feed(page)
    parser.close()
    return parser, page


def make_run(
    folder: Path, *, video: bool, sources: int, iterations: tuple[int, ...] = (0, 2, 4), samples: int = 2
) -> Path:
    """A run folder with samples of three evaluations; brightness tells the iteration."""
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = [{"iteration": k, "reward": 0.1 * k, "num_images": 8} for k in range(4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [[torch.rand(3, 20, 30) for _ in range(sources)] for _ in range(samples)] if sources else None
    for iteration in iterations:
        shape = (4, 3, 32, 32) if video else (3, 32, 32)
        kept = [torch.full(shape, 0.2 * iteration + 0.01 * k) for k in range(samples)]
        write_samples(folder / "samples", iteration, kept, [PROMPT] * samples, given, 8.0 if video else None)
    listed = [{"prompt": PROMPT, "sample": 0, "seed": 70 + k} for k in range(samples)]
    (folder / "samples" / "prompts.json").write_text(json.dumps(listed))
    return folder


def clip_bytes(folder: Path, iteration: int, sample: int) -> bytes:
    return (folder / f"samples/iteration_{iteration:06d}/{sample:04d}.mp4").read_bytes()


def test_a_video_run_plays_its_first_and_last_clips_beside_their_frames(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", video=True, sources=0)
    media, page = media_of(report(run))
    assert media.figures == 2
    assert [clip["aria-label"] for clip in media.clips] == [f"{s} training: {PROMPT}" for s in ("before", "after")] * 2
    assert all({"muted", "loop", "autoplay", "controls", "playsinline"} <= set(clip) for clip in media.clips)
    embedded = [base64.b64decode(str(clip["src"]).removeprefix("data:video/mp4;base64,")) for clip in media.clips]
    assert embedded == [clip_bytes(run, mark, sample) for sample in (0, 1) for mark in (0, 4)]
    assert len(media.images) == 4
    assert all(str(image["src"]).startswith("data:image/") and image["alt"] for image in media.images)
    assert "media-src data:" in media.policy
    assert "Above before training, below after 4 iterations" in page
    assert "32 videos drawn" in page
    assert "<b>red</b>" not in page


def test_clips_beyond_the_limit_are_linked_from_wherever_the_page_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "a run", video=True, sources=0)
    total = sum(len(clip_bytes(run, mark, sample)) for mark in (0, 4) for sample in (0, 1))
    monkeypatch.setattr(embedded_images, "MAX_EMBEDDED", total)
    assert str(media_of(report(run))[0].clips[0]["src"]).startswith("data:")
    monkeypatch.setattr(embedded_images, "MAX_EMBEDDED", total - 1)
    inside = report(run)
    outside = report(run, tmp_path / "pages" / "other.html")
    for page in (inside, outside):
        media, text = media_of(page)
        found = [(page.parent / unquote(str(clip["src"]))).resolve() for clip in media.clips]
        names = [f"samples/iteration_00000{mark}/000{sample}.mp4" for sample in (0, 1) for mark in (0, 4)]
        assert found == [(run / name).resolve() for name in names]
        assert "keep this page where it is" in text
        assert "file:" in media.policy
    assert str(media_of(outside)[0].clips[0]["src"]).startswith("../a%20run/samples/")


def test_only_the_first_clips_are_shown_and_the_rest_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown_samples, "MAX_CLIPS", 1)
    media, page = media_of(report(make_run(tmp_path / "r", video=True, sources=0)))
    assert (media.figures, len(media.clips)) == (1, 2)
    assert "1 more in samples/." in page


def test_a_video_run_in_progress_shows_its_only_sampling(tmp_path: Path) -> None:
    media, page = media_of(report(make_run(tmp_path / "r", video=True, sources=0, iterations=(0,))))
    assert len(media.clips) == 2
    assert ">Videos</h2>" in page
    assert "there is no later sampling yet" in page


@pytest.mark.parametrize("sources", [1, 2])
def test_an_edit_run_shows_source_before_and_after(tmp_path: Path, sources: int) -> None:
    media, page = media_of(report(make_run(tmp_path / "r", video=False, sources=sources)))
    sides = ["source: "] * sources + ["before training: ", "after training: "]
    assert [image["alt"] for image in media.images] == [f"{side}{PROMPT}" for side in sides] * 2
    assert page.count("<span>source</span>") == 2 * sources
    assert "First the source, which was given with the prompt." in page
    assert 'style="--share:150"' in page  # 30 x 20: its part of the row, so that all are equally tall
    assert "media-src" not in media.policy
    assert "32 images drawn" in page


def test_an_animated_source_stands_above_its_clips(tmp_path: Path) -> None:
    media, page = media_of(report(make_run(tmp_path / "r", video=True, sources=1)))
    assert len(media.clips) == 4
    assert [str(image["alt"]).split()[0] for image in media.images] == ["source:", "frames", "frames"] * 2
    assert "First the source" in page


def test_a_damaged_image_hides_its_prompt_only(tmp_path: Path) -> None:
    clips = make_run(tmp_path / "clips", video=True, sources=0)
    (clips / "samples/iteration_000004/0000.png").write_bytes(b"\x89PNG broken")
    edits = make_run(tmp_path / "edits", video=False, sources=1)
    (edits / "samples/sources/0001.png").write_bytes(b"\x89PNG broken")
    assert [media_of(report(run))[0].figures for run in (clips, edits)] == [1, 1]


def test_runs_of_images_load_nothing_as_before(tmp_path: Path) -> None:
    media, page = media_of(report(make_run(tmp_path / "r", video=False, sources=0)))
    assert len(media.images) == 4
    assert not media.clips
    assert media.policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert "Left before training, right after 4 iterations" in page
