# SPDX-License-Identifier: Apache-2.0
"""Image processor of the tiny Kimi-K2.5 checkpoint (loaded as remote code; images only).

Stands in for the real checkpoint's `kimi_k25_vision_processing.py`: scales an image down to the
patch limits, pads it to whole merge windows, and cuts it into patches.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.image_processing_utils import BaseImageProcessor, BatchFeature


class TinyKimiImageProcessor(BaseImageProcessor):
    """The part of the real processor's interface that vLLM calls.

    A "media" is `{"type": "image", "image": PIL image}` or
    `{"type": "video_chunk", "video_chunk": [PIL images]}`.
    """

    model_type = "kimi_k25"

    def __init__(self, media_proc_cfg: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.media_proc_cfg = dict(media_proc_cfg)
        self.num_frames_per_chunk = media_proc_cfg["temporal_merge_kernel_size"]

    @property
    def _window(self) -> int:
        """Side of one merge window, which becomes one token, in pixels."""
        return self.media_proc_cfg["patch_size"] * self.media_proc_cfg["merge_kernel_size"]

    def _sizes(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Scaled width and height, and the padding that completes merge windows, in pixels."""
        config = self.media_proc_cfg
        patch = config["patch_size"]
        longest = config["patch_limit_on_one_side"] * patch
        num_patches = max(1.0, width // patch) * max(1.0, height // patch)
        scale = min(
            1.0,
            math.sqrt(config["in_patch_limit"] / num_patches),
            longest / width,
            longest / height,
        )
        new_width = min(max(1, int(width * scale)), longest)
        new_height = min(max(1, int(height * scale)), longest)
        return new_width, new_height, -new_width % self._window, -new_height % self._window

    @staticmethod
    def _frames(media: dict[str, Any]) -> list[Image.Image]:
        frames = [media["image"]] if media["type"] == "image" else list(media["video_chunk"])
        # vLLM wraps images together with their bytes
        return [getattr(frame, "media", frame).convert("RGB") for frame in frames]

    def media_tokens_calculator(self, media: dict[str, Any]) -> int:
        """How many tokens the media becomes."""
        width, height, pad_width, pad_height = self._sizes(*self._frames(media)[0].size)
        return (width + pad_width) // self._window * ((height + pad_height) // self._window)

    def split_video_chunks(self, video: Any) -> Any:
        raise NotImplementedError("the tiny test checkpoint takes images only")

    def preprocess(
        self, medias: Any, return_tensors: str | None = None, **kwargs: Any
    ) -> BatchFeature:
        """Returns `pixel_values` [patches, 3, patch, patch] and `grid_thws` [medias, 3]."""
        medias = medias if isinstance(medias, list) else [medias]
        if not medias:
            return BatchFeature(data={}, tensor_type=return_tensors)
        config = self.media_proc_cfg
        patch = config["patch_size"]
        mean = np.array(config["image_mean"], np.float32)
        std = np.array(config["image_std"], np.float32)
        patches, grids = [], []
        for media in medias:
            frames = self._frames(media)
            width, height, pad_width, pad_height = self._sizes(*frames[0].size)
            arrays = []
            for frame in frames:
                resized = frame.resize((width, height), Image.Resampling.BICUBIC)
                pixels = np.asarray(resized, dtype=np.float32) / 255.0
                pixels = np.pad(pixels, ((0, pad_height), (0, pad_width), (0, 0)))
                arrays.append((pixels - mean) / std)
            video = torch.from_numpy(np.stack(arrays)).float()  # [frames, height, width, channels]
            num_frames, rows, columns = (
                len(arrays),
                video.shape[1] // patch,
                video.shape[2] // patch,
            )
            video = video.view(num_frames, rows, patch, columns, patch, 3)
            patches.append(video.permute(0, 1, 3, 5, 2, 4).reshape(-1, 3, patch, patch))
            grids.append([num_frames, rows, columns])
        data = {"pixel_values": torch.cat(patches), "grid_thws": torch.tensor(grids)}
        return BatchFeature(data=data, tensor_type=return_tensors)
