"""Connected components of masks, of several images at once."""

from __future__ import annotations

import numpy as np

Box = tuple[int, slice, slice]
"""An image, and the rows and columns in it that a component spans."""


def label_blobs(mask: np.ndarray, least: int) -> tuple[np.ndarray, list[Box]]:
    """Numbers the components of masks; pixels that share a side belong together.

    A row's runs of True pixels are what is joined: a run touches those of the row above that share a column with it.
    Each run takes the smallest number of those that it touches until none changes; numbers are looked up through each
    other meanwhile, so that a long winding component takes few rounds.

    Args:
        mask: bool `[B, H, W]`.
        least: pixels of a component; smaller ones are left out.

    Returns:
        int32 `[B, H, W]` with 0 for the ground and components numbered from 1 by first pixels, and the place of each.
    """
    images, height, width = mask.shape
    framed = np.zeros((images, height + 1, width + 2), dtype=np.int8)  # an empty row parts images
    framed[:, 1:, 1:-1] = mask
    edges = np.diff(framed.reshape(-1, width + 2), axis=1)
    row, start = np.nonzero(edges == 1)
    stop = np.nonzero(edges == -1)[1]
    # On one line, row after row, runs of a row stand as far before those of the next as rows are wide.
    pitch = width + 1
    first = np.searchsorted(row * pitch + stop, (row - 1) * pitch + start, side="right")
    last = np.searchsorted(row * pitch + start, (row - 1) * pitch + stop, side="left")
    touches = np.maximum(last - first, 0)
    below = np.repeat(np.arange(len(row)), touches)
    above = np.repeat(first, touches) + np.arange(touches.sum()) - np.repeat(np.cumsum(touches) - touches, touches)
    number = np.arange(len(row))
    while True:
        smaller = number.copy()
        np.minimum.at(smaller, number[below], number[above])
        np.minimum.at(smaller, number[above], number[below])
        smaller = smaller[smaller]
        if np.array_equal(smaller, number):
            break
        number = smaller
    size = np.bincount(number, weights=stop - start, minlength=len(row))
    kept = (size >= least) & (number == np.arange(len(row)))
    label = (np.cumsum(kept) * kept)[number].astype(np.int32)
    where = label > 0
    row, start, stop, label = row[where], start[where], stop[where], label[where]
    low, high = np.full((2, kept.sum() + 1), 2**31), np.zeros((2, kept.sum() + 1), dtype=np.int64)
    for axis, (begin, end) in enumerate(((row, row + 1), (start, stop))):
        np.minimum.at(low[axis], label, begin)
        np.maximum.at(high[axis], label, end)
    labels = np.zeros((images * (height + 1), width), dtype=np.int32)
    at = np.repeat(row * width + start, stop - start)
    at += np.arange(len(at)) - np.repeat(np.cumsum(stop - start) - (stop - start), stop - start)
    labels.ravel()[at] = np.repeat(label, stop - start)
    image, top = np.divmod(low[0, 1:], height + 1)
    bottom = high[0, 1:] - image * (height + 1)
    places = zip(image.tolist(), top.tolist(), bottom.tolist(), low[1, 1:].tolist(), high[1, 1:].tolist(), strict=True)
    boxes = [(one, slice(y1 - 1, y2 - 1), slice(x1, x2)) for one, y1, y2, x1, x2 in places]
    return labels.reshape(images, height + 1, width)[:, 1:], boxes
