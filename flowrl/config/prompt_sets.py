"""Prompt sets that shipped configurations name and that do not ship: where they are published, and how to get them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GITHUB, HUB = "github", "hub"


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedFile:
    """A file of a repository.

    Attributes:
        path: in its repository.
        megabytes: of the download; None where we could not look.
        rows: prompts that it gives; None where we could not look.
        sha256: of the file at the set's revision; "" where we could not look.
        first: the lines that are kept, from the top; None keeps all.
    """

    path: str
    megabytes: float | None = None
    rows: int | None = None
    sha256: str = ""
    first: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """A set of prompts under the name that `flowrl data get` takes.

    Attributes:
        about: what it holds.
        publisher: who publishes it: OWNER/NAME of a repository.
        licence: what the publisher states.
        place: "github" or "hub" where `flowrl data get` fetches it; "" where you get or make it yourself.
        revision: commit or branch of the repository.
        files: name of the local file -> the published one.
        by_hand: names of the local files where nothing fetches them.
        how: what to do then.
        ships: prompts that ship with flowrl and serve the same purpose, to train on and to evaluate on; None where none
            do.
    """

    about: str
    publisher: str
    licence: str
    place: str = ""
    revision: str = "main"
    files: Mapping[str, PublishedFile] = field(default_factory=dict)
    by_hand: tuple[str, ...] = ()
    how: str = ""
    ships: tuple[str, str] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Local files, as configurations name them."""
        return (*self.files, *self.by_hand)

    @property
    def megabytes(self) -> float | None:
        """Of the download; None where a file's size is unknown."""
        sizes = [file.megabytes for file in self.files.values()]
        return None if None in sizes else sum(size for size in sizes if size is not None)


FLOW_GRPO, FLOW_GRPO_AT = "yifan123/flow_grpo", "ac4c86e8cae021841f1fde853d340e0db67690dd"
TEXTS = ("asset:prompts/everyday.txt", "asset:prompts/everyday_eval.txt")
EDITS = ("asset:prompts/edits_train.jsonl", "asset:prompts/edits_heldout.jsonl")


def _pair(name: str, suffix: str = ".txt") -> tuple[str, str]:
    return f"{name}_train{suffix}", f"{name}_test{suffix}"


PROMPT_SETS: dict[str, PromptSet] = {
    "pickscore": PromptSet(
        about="captions that users of Pick-a-Pic wrote",
        publisher=FLOW_GRPO,
        licence="MIT",
        place=GITHUB,
        revision=FLOW_GRPO_AT,
        files={
            "pickscore_train.txt": PublishedFile(
                path="dataset/pickscore/train.txt",
                megabytes=2.9,
                rows=25_432,
                sha256="2f425adcbb9a6d0feee7c6c448e1cb83a1f71deca9434b803907e2578eca837f",
            ),
            "pickscore_test.txt": PublishedFile(
                path="dataset/pickscore/test.txt",
                megabytes=0.24,
                rows=2_048,
                sha256="d75c025fa451866e70f7e36243f7cdd93095523cb51f5f9651f2ce3236d20262",
            ),
        },
        ships=TEXTS,
    ),
    "ocr": PromptSet(
        about='prompts that ask for written words, in straight double quotes: a sign that says "Open"',
        publisher=FLOW_GRPO,
        licence="MIT",
        place=GITHUB,
        revision=FLOW_GRPO_AT,
        files={
            "ocr_train.txt": PublishedFile(path="dataset/ocr/train.txt"),
            "ocr_test.txt": PublishedFile(
                path="dataset/ocr/test.txt",
                megabytes=0.22,
                rows=1_018,
                sha256="4dd8caf3ab6ade73bd376c7d14c6ca49b6eacfb1bd321e22c40714ae4a98d4dc",
            ),
        },
    ),
    "geneval": PromptSet(
        about="prompts with GenEval's records: what an image has to show",
        publisher=FLOW_GRPO,
        licence="MIT",
        place=GITHUB,
        revision=FLOW_GRPO_AT,
        files={
            "geneval_train.jsonl": PublishedFile(path="dataset/geneval/train_metadata.jsonl"),
            "geneval_test.jsonl": PublishedFile(
                path="dataset/geneval/test_metadata.jsonl",
                megabytes=0.34,
                rows=2_212,
                sha256="cec4b24b9fee7bac21c8f787054ecc8dc9ff831674037713a4cd35e0f0a74a28",
            ),
        },
    ),
    "hpd": PromptSet(
        about="the prompts of HPDv2: DiffusionDB and COCO captions, each once",
        publisher="ymhao/HPDv2",
        licence="Apache-2.0",
        place=HUB,
        files={
            "hpd_train.txt": PublishedFile(path="train.json", megabytes=116.0),
            "hpd_test.txt": PublishedFile(path="test.json", megabytes=0.44),
        },
        ships=TEXTS,
    ),
    "video": PromptSet(
        about="what users asked video models for",
        publisher="X-GenGroup/Flow-Factory",
        licence="Apache-2.0",
        place=GITHUB,
        revision="a0b2bc5a2b4fbf9125429b3fb70c0c5d7631047c",
        files={
            "video_train.txt": PublishedFile(
                path="dataset/vid_prompt/train.txt",
                megabytes=3.8,
                rows=48_976,
                sha256="8572f9cc51bce3976ebf2e565bdd4d488e022690919c652fa52c3ef531738c2f",
            ),
            "video_test.txt": PublishedFile(
                path="dataset/vid_prompt/test.txt",
                megabytes=0.08,
                rows=1_024,
                sha256="7b68ffc2a68dfb845d68f186d3cb30b6cd6085e32918edbb4398c74317c0abb7",
            ),
        },
        ships=("asset:prompts/motion_train.jsonl", "asset:prompts/motion_heldout.jsonl"),
    ),
    "animals": PromptSet(
        about="names of animals: 45 common ones, and the first 398 classes of ImageNet",
        publisher="kvablack/ddpo-pytorch",
        licence="MIT",
        place=GITHUB,
        revision="1958463f020112c9a7bc85768d296daacc2e1b4b",
        files={
            "simple_animals.txt": PublishedFile(
                path="ddpo_pytorch/assets/simple_animals.txt",
                megabytes=0.0003,
                rows=45,
                sha256="ee3d9b638ce2a40e896a34319af85709d3c1c3188da0b8feda739dcb7363188d",
            ),
            "imagenet_animals.txt": PublishedFile(
                path="ddpo_pytorch/assets/imagenet_classes.txt",
                megabytes=0.02,
                rows=398,
                sha256="a40d9be82eb4738becd1dd69991b89f87f309975e860a6f3f45395d8c06a7e0d",
                first=398,
            ),
        },
        ships=TEXTS,
    ),
    "counting_edit": PromptSet(
        about="edits that change a number of objects, with GenEval's record of the result",
        by_hand=_pair("counting_edit", ".jsonl"),
        publisher=FLOW_GRPO,
        licence="MIT",
        how="Run the scripts in its folder dataset/counting_edit: they draw the source images. Then give each line its "
        "image under `source`.",
        ships=EDITS,
    ),
    "edit": PromptSet(
        about="instructions, each with the image that it changes",
        by_hand=_pair("edit", ".jsonl"),
        publisher="X-GenGroup/Flow-Factory",
        licence="Apache-2.0; that of the images is with them",
        how="Run dataset/sharegpt4o_image_mini/download.sh there, and give each line its image under `source`.",
        ships=EDITS,
    ),
    "i2v": PromptSet(
        about="texts of videos, each with its first frame",
        by_hand=_pair("i2v", ".jsonl"),
        publisher="X-GenGroup/Flow-Factory",
        licence="Apache-2.0; that of the images is with them",
        how="Run dataset/sharegpt4o_image_mini/download.sh there, and give each line its first frame under `source`.",
    ),
    "t2is": PromptSet(
        about="prompts for a grid of two by two images that belong together",
        by_hand=_pair("t2is", ".jsonl"),
        publisher="X-GenGroup/PaCo-RL",
        licence="none is stated, so ask its authors",
        how="The files are PaCo-GRPO/dataset/T2IS/half_2by2/train_metadata.jsonl and test_metadata.jsonl.",
        ships=("asset:prompts/world_grids_train.jsonl", "asset:prompts/world_grids_heldout.jsonl"),
    ),
    "adv": PromptSet(
        about="prompts, each with reference images of the look that is wanted",
        by_hand=(*_pair("adv"), "references.json"),
        publisher="showlab/Adv-GRPO",
        licence="MIT",
        how="Write one prompt a line, draw eight images of each with a model whose look you want (there Qwen-Image), "
        "and list them in references.json: prompt -> paths.",
    ),
    "fill": PromptSet(
        about="what to draw into the white part of a mask",
        by_hand=_pair("fill", ".jsonl"),
        publisher="nobody that we know of",
        licence="yours",
        how='Write one object a line: {"prompt": "a paper cup", "sources": ["desk.png", "desk_mask.png"]}.',
    ),
    "vace": PromptSet(
        about="texts of videos, each with a control video",
        by_hand=_pair("vace", ".jsonl"),
        publisher="nobody that we know of",
        licence="yours",
        how='Write one object a line: {"prompt": "a fox runs", "source_video": "run.mp4", "mask_video": "mask.mp4"}.',
    ),
}
"""Name -> set. docs/data.md is made from this table."""


def set_of_file(path: str) -> str | None:
    """The set to which a file of a configuration belongs, by its name; None where no set has it.

    Args:
        path: as the configuration has it, in the folder `data`.
    """
    folder, _, name = path.rpartition("/")
    return next((key for key, found in PROMPT_SETS.items() if folder == "data" and name in found.names), None)


def advice_on(path: str) -> str:
    """What to do about a file that is not there; "" where no set has it."""
    name = set_of_file(path)
    if name is None:
        return ""
    found = PROMPT_SETS[name]
    way = f"'flowrl data get {name}' fetches it" if found.place else f"'flowrl data list {name}' says how to get it"
    instead = f"; {found.ships['_test' in path]} ships and needs no download" if found.ships else ""
    return f"{way} ({found.about}; from {found.publisher}, licence {found.licence}){instead}"
