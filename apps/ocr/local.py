"""The local engine: RapidOCR, offline, with the models that its package brings; it reads accented French."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import cv2
import numpy as np
from PIL import Image

from rowmill import Job

# ONNX Runtime reports its use to its makers unless it is told not to before it is loaded. What is read here is nobody
# else's business; and the report's own files would lie about in the temporary directory.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
from rapidocr import RapidOCR

#: Lines whose distance is this much more than the usual one on the page are in different paragraphs.
_PARAGRAPH = 1.14


class Piece(NamedTuple):
    """A run of words that was found and read, by its box."""

    left: float
    right: float
    top: float
    bottom: float
    text: str

    @property
    def middle(self) -> float:
        return (self.top + self.bottom) / 2


class LocalReader:
    """Reads pages in this process. Loading it takes a second or two, a page about as long."""

    name = "rapidocr"

    def __init__(self, threads: int = 1, detect_side: int = 960) -> None:
        cv2.setNumThreads(threads)
        self._engine = RapidOCR(
            params={
                "Global.log_level": "error",
                "Global.use_cls": False,  # registry pages stand upright
                "Global.max_side_len": 1_000_000,  # the page is as large as it was asked for
                "EngineConfig.onnxruntime.intra_op_num_threads": threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
                "Det.limit_type": "max",
                "Det.limit_side_len": detect_side,
                "Rec.rec_batch_num": 1,  # lines are of many widths: in a batch all would be as wide as the widest
            }
        )

    async def read(self, page: Image.Image, job: Job) -> str:
        """The text of a page. The engine works beside the event loop and without Python's lock."""
        return await asyncio.to_thread(self.text, page)

    def text(self, page: Image.Image) -> str:
        """The text of a page."""
        found: Any = self._engine(np.asarray(page))
        if found.boxes is None or found.txts is None:
            return ""
        return in_reading_order(
            [
                Piece(*map(float, (*_span(box[:, 0]), *_span(box[:, 1]))), text)
                for box, text in zip(found.boxes, found.txts, strict=True)
            ],
            page.width,
        )


def _span(values: Any) -> tuple[Any, Any]:
    return values.min(), values.max()


def in_reading_order(pieces: Sequence[Piece], width: float) -> str:
    """Pieces as lines, from the top, each from the left, with an empty line where a paragraph ends."""
    lines: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.middle):
        if lines and piece.top < lines[-1].middle < piece.bottom:
            lines[-1] = _side_by_side(lines[-1], piece)
        else:
            lines.append(piece)
    # Lines may go as far as the longest one does, or as the margin on the left leaves on the right.
    edge = max((*(line.right for line in lines), width - min((line.left for line in lines), default=width)))
    usual = min((after.middle - before.middle for before, after in pairwise(lines)), default=0.0)
    text = lines[0].text if lines else ""
    for before, after in pairwise(lines):
        apart = after.middle - before.middle > usual * _PARAGRAPH
        text += ("\n\n" if apart or _had_room(before, after, edge) else "\n") + after.text
    return text


def _side_by_side(one: Piece, other: Piece) -> Piece:
    first, second = sorted((one, other))
    top, bottom = min(one.top, other.top), max(one.bottom, other.bottom)
    return Piece(first.left, max(one.right, other.right), top, bottom, f"{first.text} {second.text}")


def _had_room(line: Piece, following: Piece, edge: float) -> bool:
    """The next line's first word would still have stood on this one: the paragraph ended here."""
    if line.text.endswith("-"):
        return False
    word = len(following.text.split(" ")[0]) + 1
    width = (following.right - following.left) * word / max(len(following.text), 1)
    return line.right + width * 1.1 < edge
