# SPDX-License-Identifier: Apache-2.0
"""A small picture, and messages with it, in the form that each API wants."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any


def png(width: int = 56, height: int = 42) -> bytes:
    """A colour gradient as a PNG file."""
    rows = b"".join(
        b"\0" + bytes(v for x in range(width) for v in (4 * x % 256, 6 * y % 256, (x * y) % 256))
        for y in range(height)
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


PNG = base64.b64encode(png()).decode()


def rendered(text: str, image: bool = False) -> str:
    """What the tiny target's chat template makes of a user's message."""
    picture = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>" if image else ""
    return f"<|im_user|>{picture}{text}<|im_end|><|im_assistant|>"


def messages(text: str, image: bool = False) -> list[dict[str, Any]]:
    """The same message for the chat completions API."""
    if not image:
        return [{"role": "user", "content": text}]
    url = {"url": f"data:image/png;base64,{PNG}"}
    parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]
