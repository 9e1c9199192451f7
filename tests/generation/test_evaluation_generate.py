"""Images of an evaluation: layout, shared noise, going on after a kill, and folders that are refused."""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toy_pipeline
from evaluation_folders import RECORDS
from PIL import Image
from toy_pipeline import Toy

from flowrl.generation import generate
from flowrl.generation.folders import DRAWN, read_folder
from flowrl.generation.generate import choose, draw_folder
from flowrl.generation.models import Source
from flowrl.pipelines import PIPELINES
from flowrl.prompts.loading import Prompt
from flowrl.runtime.randomness import sample_normals

SOURCE = Source(
    model="toy", lora=None, num_steps=3, guidance_scale=1.0, grid="diffusers", max_sequence_length=16, dtype="float32"
)
PROMPTS = [Prompt(text=record["prompt"], metadata=record) for record in RECORDS]


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PIPELINES, "sd3", "toy_pipeline")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was loaded; the fingerprint is known without loading, as of a local model."""
    loaded: list[str] = []

    def load(source: Source, device: str) -> Any:
        loaded.append(source.model)
        return toy_pipeline.load(source.model)

    monkeypatch.setattr(generate, "load_source", load)
    monkeypatch.setattr(generate, "fingerprint", lambda source: f"mark of {source.model}")
    return loaded


def drawn(folder: Path, prompts: list[Prompt] = PROMPTS, source: Source = SOURCE, **options: Any) -> dict[str, bytes]:
    """Draws and returns all images by name."""
    settings: dict[str, Any] = {
        "label": "toy",
        "samples": 3,
        "seed": 5,
        "batch_size": 4,
        "device": "cpu",
        "show": False,
    }
    draw_folder(source, prompts, folder, **settings | options)
    return {image.file: image.path.read_bytes() for image in read_folder(folder)}


def test_the_layout_is_the_published_one(tmp_path: Path) -> None:
    files = drawn(tmp_path / "a")
    assert list(files) == [f"{i:05d}/samples/{s:05d}.png" for i in range(6) for s in range(3)]
    assert len(set(files.values())) == len(files)
    for index, record in enumerate(RECORDS):
        lines = (tmp_path / "a" / f"{index:05d}" / "metadata.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [record]


def test_images_are_functions_of_seed_prompt_and_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = drawn(tmp_path / "a")
    last = drawn(tmp_path / "b", PROMPTS[5:], samples=2)
    assert list(last.values()) == [whole["00005/samples/00000.png"], whole["00005/samples/00001.png"]]
    assert not set(drawn(tmp_path / "c", seed=6).values()) & set(whole.values())

    asked: list[Any] = []

    def watched(shape: Any, keys: Any) -> Any:
        asked.extend(keys)
        return sample_normals(shape, keys)

    monkeypatch.setattr(generate, "sample_normals", watched)
    drawn(tmp_path / "d", source=replace(SOURCE, model="another", num_steps=2))
    # The counters of evaluations during training, so that images of both can be compared; no model among them.
    assert asked == [(5, "eval", prompt.text, sample) for prompt in PROMPTS for sample in range(3)]


def test_a_prompt_that_stands_in_the_list_twice_gets_other_noise(tmp_path: Path) -> None:
    assert len(set(drawn(tmp_path / "a", [PROMPTS[0], PROMPTS[0]]).values())) == 6


def test_prompts_are_taken_once_and_evenly() -> None:
    doubled = [row for row in PROMPTS for _ in range(3)]
    assert choose(doubled, None) == PROMPTS
    assert choose(doubled, 3) == [PROMPTS[1], PROMPTS[3], PROMPTS[5]]
    assert choose(PROMPTS, 100) == PROMPTS
    other = Prompt(text=PROMPTS[0].text, metadata={"tag": "another"})
    assert choose([*PROMPTS, other, other], None) == [*PROMPTS, other]  # a record of its own is another question


def test_prompts_of_one_text_with_other_images_are_told_apart(tmp_path: Path) -> None:
    first, second = (Prompt(text="make it red", metadata={}, sources=(f"/images/{name}.png",)) for name in "ab")
    assert choose([first, second, first], None) == [first, second]
    items = [(index, sample) for index in range(2) for sample in range(2)]
    assert list(generate._numbers([first, second], items).values()) == [0, 1, 0, 1]
    assert list(generate._numbers([first, first], items).values()) == [0, 1, 2, 3]


def test_a_folder_is_not_continued_from_another_source_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.generation.generate.refuse_sources", lambda rows, source: None)  # the toy takes none
    image = tmp_path / "a.png"
    Image.new("RGB", (2, 2), (255, 0, 0)).save(image)
    prompt = Prompt(text="a", metadata={"prompt": "a"}, sources=(str(image),))
    drawn(tmp_path / "out", [prompt], samples=1)
    Image.new("RGB", (2, 2), (0, 0, 255)).save(image)
    with pytest.raises(ValueError, match="drawn with other settings: sources"):
        drawn(tmp_path / "out", [prompt], samples=1)


def test_records_name_images_by_absolute_paths(tmp_path: Path) -> None:
    image = str(tmp_path / "elsewhere" / "a.png")
    prompt = Prompt(text="a", metadata={"prompt": "a", "tag": "x", "references": "a.png"}, references=(image,))
    drawn(tmp_path / "a", [prompt], samples=1)
    record = json.loads((tmp_path / "a" / "00000" / "metadata.jsonl").read_text())
    assert record == {"prompt": "a", "tag": "x", "references": [image]}


def test_prompts_without_a_negative_prompt_take_that_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    encode = Toy.encode

    def watched(self: Toy, prompts: Any, sources: Any = None) -> Any:
        asked.extend(prompts)
        return encode(self, prompts, sources)

    monkeypatch.setattr(Toy, "encode", watched)
    rows = [PROMPTS[0], replace(PROMPTS[1], negative="grey"), replace(PROMPTS[1], negative="brown")]
    source = replace(SOURCE, guidance_scale=2.0, negative="blurred")
    drawn(tmp_path / "a", rows, source, samples=1)
    texts = [PROMPTS[0].text, PROMPTS[1].text]
    assert asked[:6] == [texts[0], "blurred", texts[1], "grey", texts[1], "brown"]  # before the encoders go
    assert asked[6:] == [texts[0], texts[1], texts[1], "blurred", "grey", "brown"]


def test_a_folder_from_before_further_settings_were_noted_goes_on(tmp_path: Path, loads: list[str]) -> None:
    source = replace(SOURCE, options={"height": 2, "width": 2, "vae_slice": 1})
    whole = drawn(tmp_path / "a", source=source)
    note = json.loads((tmp_path / "a" / DRAWN).read_text())
    for name in ("options", "shift", "training_size", "negative"):
        assert note.pop(name) is None
    assert (note["height"], note["width"]) == (2, 2)
    (tmp_path / "a" / DRAWN).write_text(json.dumps(note))
    assert drawn(tmp_path / "a", source=replace(source, options=source.options | {"vae_slice": 2})) == whole


def test_a_complete_folder_loads_no_model(tmp_path: Path, loads: list[str]) -> None:
    whole = drawn(tmp_path / "a")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")}
    assert loads == ["toy"]
    assert drawn(tmp_path / "a") == whole
    assert loads == ["toy"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")} == times


def test_what_is_missing_is_drawn_and_nothing_else(tmp_path: Path, loads: list[str]) -> None:
    whole = drawn(tmp_path / "a")
    places = [tmp_path / "a" / name for name in whole]
    times = {path: path.stat().st_mtime_ns for path in places}
    for path in (places[2], places[9], places[17]):
        path.unlink()
    (places[0].parent / ".00002.png.abc.tmp").write_bytes(b"half")
    assert drawn(tmp_path / "a") == whole
    assert {path for path in places if path.stat().st_mtime_ns != times[path]} == {places[2], places[9], places[17]}
    assert not list((tmp_path / "a").rglob(".*"))


@pytest.mark.slow
def test_a_killed_process_is_continued_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    child = multiprocessing.get_context("fork").Process(target=_draw_slowly, args=(folder,))  # torch has one thread
    child.start()
    deadline = time.monotonic() + 120
    while len(list(folder.glob("*/samples/0*.png"))) < 10:
        assert time.monotonic() < deadline
        assert child.is_alive()
        time.sleep(0.02)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    kept = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.glob("*/samples/0*.png")}
    assert 10 <= len(kept) < 200
    with pytest.raises(ValueError, match=r"half-written: 6 prompts with 40 images each are expected"):
        read_folder(folder)
    finished = drawn(folder, samples=40)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in kept} == kept
    assert finished == drawn(tmp_path / "b", samples=40)
    assert not list(folder.rglob(".*"))


def _draw_slowly(folder: Path) -> None:
    """Draws until killed."""
    decode = Toy.decode

    def slowly(self: Toy, latents: Any, *, gradient: bool = False) -> Any:
        time.sleep(0.15)
        return decode(self, latents, gradient=gradient)

    PIPELINES["sd3"] = "toy_pipeline"
    Toy.decode = slowly  # type: ignore[method-assign]
    draw_folder(SOURCE, PROMPTS, folder, label="toy", samples=40, seed=5, batch_size=4, device="cpu", show=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 6}, r"seed 5 \(now 6\)"),
        ({"samples": 4}, r"samples 3 \(now 4\)"),
        ({"prompts": PROMPTS[:5]}, r"num_prompts 6 \(now 5\), prompts"),
        ({"source": replace(SOURCE, num_steps=4)}, r"num_steps 3 \(now 4\)"),
        ({"source": replace(SOURCE, guidance_scale=2.0)}, r"guidance_scale 1.0 \(now 2.0\)"),
        ({"source": replace(SOURCE, model="other")}, r"fingerprint 'mark of toy' \(now 'mark of other'\), model"),
        ({"source": replace(SOURCE, dtype="bfloat16")}, r"dtype 'float32' \(now 'bfloat16'\)"),
        ({"source": replace(SOURCE, shift=3.0)}, r"shift None \(now 3.0\)"),
        ({"source": replace(SOURCE, training_size=(64, None))}, r"training_size None \(now \[64, None\]\)"),
        ({"source": replace(SOURCE, negative="grey")}, r"negative None \(now 'grey'\)"),
        ({"source": replace(SOURCE, options={"upcast": True})}, r"options None \(now {'upcast': True}\)"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, loads: list[str], change: dict[str, Any], words: str) -> None:
    drawn(tmp_path / "a")
    with pytest.raises(ValueError, match=f"was drawn with other settings: {words}"):
        drawn(tmp_path / "a", **change)
    assert loads == ["toy"]


def test_the_same_weights_under_another_path_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "fingerprint", lambda source: "the same bytes")
    whole = drawn(tmp_path / "a")
    assert drawn(tmp_path / "a", source=replace(SOURCE, model="moved")) == whole


def test_foreign_folders_and_empty_lists_are_refused(tmp_path: Path, loads: list[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="not drawn by this command"):
        drawn(tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["thesis.txt"]
    with pytest.raises(ValueError, match="is a file"):
        drawn(tmp_path / "a" / "thesis.txt")
    with pytest.raises(ValueError, match="there is no prompt to draw"):
        drawn(tmp_path / "b", prompts=[])
    assert loads == []


def test_a_folder_whose_first_note_was_cut_short_starts_anew(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / f".{DRAWN}.writing").write_text('{"form')
    assert len(drawn(tmp_path / "a")) == 18


def test_an_image_that_is_not_finite_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Toy.decode

    def decode(self: Toy, latents: Any, *, gradient: bool = False) -> Any:
        return broken(self, latents, gradient=gradient) * float("nan")

    monkeypatch.setattr(Toy, "decode", decode)
    with pytest.raises(ValueError, match="not finite"):
        drawn(tmp_path / "a")
    assert Counter(path.suffix for path in (tmp_path / "a").rglob("*.png")) == {}
