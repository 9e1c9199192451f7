"""Prompts from datasets of the `datasets` library: `dataset:ID_OR_FOLDER[:SPLIT]`.

A dataset is on the hub, or a folder that the library reads: parquet, JSONL or CSV files, images with a metadata file,
or the output of `save_to_disk`; folders need no network. The columns are the keys of a JSONL prompt file (see
`flowrl.prompts.prompt_files`); image columns hold images, or paths from the dataset's folder. A column `image` of
images is the source if there is no other. All other columns except images, sounds and bytes are metadata.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from flowrl.prompts.foreign_rows import PROMPTS
from flowrl.prompts.prompt_files import REFERENCES, SOURCES, Prompt, prompt_of, relative_to
from flowrl.prompts.source_images import keep_image

PREFIX = "dataset:"
SPLIT = "train"
_BATCH = 64  # rows whose images are in memory at once


def is_dataset(text: str | Path) -> bool:
    """Whether this names a dataset and not a file."""
    return str(text).startswith(PREFIX)


def read_dataset(text: str, negative: str = "") -> list[Prompt]:
    """Reads the prompts of a dataset; images that it holds become files (see `flowrl.prompts.source_images`).

    Args:
        text: dataset:ID_OR_FOLDER, and :SPLIT unless it is train; the library's slices (train[:100]) work too.
        negative: for rows without their own negative prompt.

    Raises ValueError: no such dataset or split, no column `prompt`, or a bad row; rows count from 0.
    """
    name, split = _parse(text)
    table = _load(text, name, split)
    if not {"prompt", *PROMPTS} & set(table.column_names):
        raise ValueError(
            f"{text}: needs a column 'prompt' of text, got {', '.join(table.column_names)}; rename one "
            "(rename_column of datasets) and save it as a folder"
        )
    files: dict[str, Path] = {}
    beside = relative_to(Path(name) if Path(name).is_dir() else Path.cwd())

    def find(path: str) -> Path:
        return files.get(path) or beside(path)

    missing = "needs text under 'prompt'"
    rows = [
        prompt_of(row, f"{text}, row {number}", find=find, negative=negative, missing=missing)
        for number, row in enumerate(_rows(text, table, files))
    ]
    if not rows:
        raise ValueError(f"{text}: holds no prompt")
    return rows


def read_edits(text: str, source: str, columns: Collection[str]) -> list[dict[str, Any]]:
    """Reads a dataset of edits with other column names; leaves out all image columns but one.

    Args:
        text: as `read_dataset` takes it.
        source: the column of source images; it becomes `source`, the path of a file of this process.
        columns: further columns that it must have.

    Raises ValueError: no such dataset or split, or a column that is missing.
    """
    name, split = _parse(text)
    table = _load(text, name, split)
    if lacking := [column for column in (source, *columns) if column not in table.column_names]:
        raise ValueError(f"{text}: lacks the columns {', '.join(lacking)}; it has {', '.join(table.column_names)}")
    files: dict[str, Path] = {}
    rows = _rows(text, table.rename_column(source, "source"), files)
    return [{**row, "source": str(files[row["source"]])} for row in rows if "source" in row]


def _parse(text: str) -> tuple[str, str | None]:
    given = text.removeprefix(PREFIX)
    name, _, split = (given, "", "") if Path(given).expanduser().is_dir() else given.partition(":")
    if not name or (given != name and not split):
        raise ValueError(f"'{text}': write dataset:ID_OR_FOLDER or dataset:ID_OR_FOLDER:SPLIT")
    path = Path(name).expanduser()
    if path.is_file():
        raise ValueError(
            f"{text}: {name} is a file; give the folder that holds it, or a .txt, .jsonl or .csv file without dataset:"
        )
    if name.startswith(("/", "./", "../", "~")) and not path.is_dir():
        raise ValueError(f"{text}: there is no folder {path}; give one that exists, or the id of a dataset on the hub")
    return str(path), split or None


def _load(text: str, name: str, split: str | None) -> Any:
    """The dataset's table, typed Any as the library is an extra."""
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise ValueError(
            f"{text}: datasets are read by the library datasets, which is not installed: "
            "in flowrl's folder, pip install -e '.[data]'"
        ) from error
    folder = Path(name)
    try:
        if not any((folder / part).is_file() for part in ("state.json", "dataset_dict.json")):
            return datasets.load_dataset(name, split=split or SPLIT)
        saved: Any = datasets.load_from_disk(name)
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        reasons = ": ".join(" ".join(str(reason).split()) for reason in (error, error.__cause__) if reason is not None)
        raise ValueError(f"{text}: the dataset cannot be read ({type(error).__name__}: {reasons})") from error
    if isinstance(saved, datasets.DatasetDict):
        if (split or SPLIT) not in saved:
            raise ValueError(f"{text}: there is no split '{split or SPLIT}', only {', '.join(map(str, saved))}")
        return saved[split or SPLIT]
    if split is not None and split != str(saved.split):
        raise ValueError(f"{text}: was saved as one table without splits: leave out ':{split}'")
    return saved


def _rows(text: str, table: Any, files: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """The rows as in JSON without the nulls that the library adds; names of files, added to `files`, replace images."""
    import datasets

    def kind(feature: Any) -> Any:
        return feature.feature if isinstance(feature, datasets.List) else feature

    def without_nulls(found: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in found.items() if value is not None}

    images = {name for name, feature in table.features.items() if isinstance(kind(feature), datasets.Image)}
    others = {
        name
        for name, feature in table.features.items()
        if isinstance(kind(feature), (datasets.Audio, datasets.Video))
        or (isinstance(feature, datasets.Value) and "binary" in feature.dtype)
    }
    if "image" in images and not any(key in table.column_names for key in SOURCES):
        table, images = table.rename_column("image", "source"), images - {"image"} | {"source"}
    wanted = images & {*SOURCES, *REFERENCES}
    encoded = table.select_columns(sorted(wanted)).with_format("arrow")  # mappings with bytes and path, not pixels
    encoded_rows = (row for batch in encoded.iter(_BATCH) for row in batch.to_pylist())
    for number, row in enumerate(table.remove_columns(sorted(images | others))):
        for key, value in (next(encoded_rows) if wanted else {}).items():
            row[key] = _kept(value, f"{text}, row {number}: column '{key}'", files)
        yield json.loads(json.dumps(row, default=str), object_hook=without_nulls)


def _kept(image: Any, where: str, files: dict[str, Path]) -> Any:
    """The name of an image's file, or the names of a list of them; None for no image."""
    if isinstance(image, list):
        if None in image:
            raise ValueError(f"{where} lists an image that is null: leave it out of the list")
        return [_kept(one, where, files) for one in image]
    if image is None:
        return None
    try:
        path = keep_image(image["bytes"] or Path(image["path"]).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
    files[path.name] = path
    return path.name
