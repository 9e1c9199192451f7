"""ImageReward v1.0: human preference by a BLIP that reads prompt and image together (Xu et al. 2023).

arXiv 2304.05977. BLIP's text encoder (BERT-base with cross attention, run as an encoder, without causal mask) reads
the prompt, at most 35 tokens, and attends to the image's tokens of a ViT-L/16 at 224; five linear layers without
activations turn its first hidden state into a number that is standardised by two constants:

    value = (MLP(h_text[0]) - 0.16717362830052426) / 1.0333394966054072,     about -2 to 2
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from flowrl.config.strict_yaml import read_mapping
from flowrl.rewards.base import FunctionReward, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.base.text_limits import TextLimit
from flowrl.rewards.networks import pretrained
from flowrl.rewards.networks.clip_encoder import clip_pixels
from flowrl.rewards.networks.pretrained import OneModel
from flowrl.runtime.precision import network_autocast
from flowrl.runtime.shapes import Float, Int64

FILE = "ImageReward.pt"
MEAN, STD = 0.16717362830052426, 1.0333394966054072
MAX_TOKENS = 35
HEAD_WIDTH = 64  # of an attention head, in both towers
OWNER = "reward 'image_reward'"

# The checkpoint's blip.text_encoder has the names of transformers' `BlipTextModel`, and the score does not use
# blip.vision_proj and blip.text_proj.
_NAMES = read_mapping(Path(__file__).parent / "networks" / "blip_keys.yaml")
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageReward(OneModel):
    """ImageReward of image and prompt, on its own scale. Runs in float32."""

    model: str = "THUDM/ImageReward"
    """The file ImageReward.pt, a folder that holds it, or a hub id."""
    revision: str | None = None
    """Branch, tag or commit of `model` on the hub."""
    tokenizer: str = "google-bert/bert-base-uncased"
    """BERT's uncased tokenizer, a folder or a hub id."""
    tokenizer_revision: str | None = None
    """Likewise of `tokenizer`."""

    def __post_init__(self) -> None:
        pretrained.check_file(self.model, option="model")
        pretrained.check_model(self.tokenizer, what="BERT", option="tokenizer")

    @property
    def text_limit(self) -> TextLimit:
        """What BERT reads."""
        return TextLimit(tokens=MAX_TOKENS, tokenizer=self.tokenizer)

    def build(self, device: torch.device) -> Reward:
        """Loads weights and tokenizer."""
        from transformers import BertTokenizer

        words = pretrained.load_processor(
            BertTokenizer,
            self.tokenizer,
            revision=self.tokenizer_revision,
            owner=OWNER,
            option="tokenizer",
            what="BERT",
        )
        words.add_tokens(["[DEC]", "[ENC]"], special_tokens=True)  # BLIP's: ids follow BERT's own vocabulary

        def load() -> Blip:
            from transformers import BlipTextModel, BlipVisionModel

            path = pretrained.fetch_file(self.model, FILE, revision=self.revision, owner=OWNER, option="model")
            image, text, head = to_transformers(pretrained.read_weights(path, owner=OWNER))
            try:
                vision_config, text_config = configs(image, text)
                blip = Blip(
                    BlipVisionModel(vision_config),
                    BlipTextModel(text_config, add_pooling_layer=False),
                    linear_head(text_config.hidden_size),
                )
                for module, state in ((blip.vision, image), (blip.text, text), (blip.head, head)):
                    module.load_state_dict({name: weight.float() for name, weight in state.items()})
            except KeyError as error:
                raise ValueError(f"{OWNER}: the checkpoint lacks {error}: give a complete {FILE}.") from error
            except RuntimeError as error:
                raise ValueError(f"{OWNER}: the checkpoint does not fit: {' '.join(str(error).split())}") from error
            return blip.to(device).eval().requires_grad_(False)

        network = pretrained.shared_network(("image_reward", self.model, self.revision, str(device)), load)
        if len(words) > (size := network.text.config.vocab_size):
            raise ValueError(
                f"{OWNER}: the tokenizer {self.tokenizer!r} has {len(words)} words, the checkpoint {size}: give "
                f"tokenizer: the uncased one of BERT."
            )

        @torch.no_grad()
        def score(inputs: RewardInputs) -> RewardOutput:
            size = network.vision.config.image_size
            pixels = torch.stack([clip_pixels(Image.fromarray(image), size) for image in to_uint8(inputs.images)]).to(
                device
            )
            tokens = words(
                inputs.prompts, padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
            ).to(device)
            with network_autocast(device):
                output = network(pixels, tokens["input_ids"], tokens["attention_mask"])
            return output_of(((output.cpu().double() - MEAN) / STD).tolist(), inputs)

        version = (
            f"image_reward:{self.model}@{pretrained.fingerprint(network.head.parameters())}:standardised:"
            f"bicubic-crop-{network.vision.config.image_size}:{MAX_TOKENS}-tokens:float32"
        )
        return FunctionReward(name="image_reward", score=score, needs=frozenset({"images", "prompts"}), version=version)


class Blip(nn.Module):
    """BLIP's two towers and the head."""

    def __init__(self, vision_tower: Any, text_tower: Any, head: nn.Module) -> None:
        super().__init__()
        self.vision = vision_tower
        self.text = text_tower
        self.head = head

    def forward(
        self, pixels: Float[Tensor, " b 3 s s"], input_ids: Int64[Tensor, " b l"], mask: Int64[Tensor, " b l"]
    ) -> Float[Tensor, " b"]:
        """The head's output for images and tokens, before standardisation."""
        image = self.vision(pixel_values=pixels).last_hidden_state
        # Left at its default, the argument is_decoder keeps the mask two-sided, although the configuration says
        # decoder; transformers makes cross attention only under that configuration.
        hidden = self.text(input_ids=input_ids, attention_mask=mask, encoder_hidden_states=image).last_hidden_state
        return self.head(hidden[:, 0])[:, 0]


def linear_head(width: int) -> nn.Sequential:
    """Five linear layers and dropout between them: an affine map in evaluation mode. Places as in the checkpoint."""
    return nn.Sequential(
        nn.Linear(width, 1024),
        nn.Dropout(0.2),
        nn.Linear(1024, 128),
        nn.Dropout(0.2),
        nn.Linear(128, 64),
        nn.Dropout(0.1),
        nn.Linear(64, 16),
        nn.Linear(16, 1),
    )


def to_transformers(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The checkpoint's weights of image tower, text tower and head, under the names of the modules here."""
    image, text, head = {}, {}, {}
    for name, weight in weights.items():
        rest = name.removeprefix("blip.visual_encoder.")
        block = _BLOCK.fullmatch(rest)
        if name.startswith("blip.text_encoder."):
            if not name.endswith(".position_ids"):
                text[name.removeprefix("blip.text_encoder.")] = weight
        elif name.startswith("mlp.layers."):
            head[name.removeprefix("mlp.layers.")] = weight
        elif rest != name and rest in _NAMES["whole"]:
            image[_NAMES["whole"][rest]] = weight
        elif rest != name and block and block[2] in _NAMES["in_block"]:
            image[f"encoder.layers.{block[1]}.{_NAMES['in_block'][block[2]]}.{block[3]}"] = weight
        elif not name.startswith(("blip.vision_proj.", "blip.text_proj.")):
            raise ValueError(f"{OWNER}: the checkpoint holds {name!r}, so it is not ImageReward v1.0: give {FILE}.")
    return image, text, head


def configs(image: Mapping[str, Tensor], text: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """Configurations of the two towers, sizes from the weights' shapes, the rest as BLIP was trained."""
    from transformers import BlipTextConfig, BlipVisionConfig

    width, _, patch, _ = image["embeddings.patch_embedding.weight"].shape
    side = round((image["embeddings.position_embedding"].shape[1] - 1) ** 0.5)
    words, size = text["embeddings.word_embeddings.weight"].shape
    return (
        BlipVisionConfig(
            hidden_size=width,
            intermediate_size=image["encoder.layers.0.mlp.fc1.weight"].shape[0],
            num_hidden_layers=_layers(image, "encoder.layers."),
            num_attention_heads=width // HEAD_WIDTH,
            image_size=side * patch,
            patch_size=patch,
            hidden_act="gelu",
            layer_norm_eps=1e-6,
        ),
        BlipTextConfig(
            vocab_size=words,
            hidden_size=size,
            encoder_hidden_size=width,
            is_decoder=True,
            hidden_act="gelu",
            intermediate_size=text["encoder.layer.0.intermediate.dense.weight"].shape[0],
            num_hidden_layers=_layers(text, "encoder.layer."),
            num_attention_heads=size // HEAD_WIDTH,
            max_position_embeddings=text["embeddings.position_embeddings.weight"].shape[0],
            layer_norm_eps=1e-12,
            pad_token_id=0,
        ),
    )


def _layers(weights: Mapping[str, Tensor], prefix: str) -> int:
    return 1 + max(int(name.removeprefix(prefix).partition(".")[0]) for name in weights if name.startswith(prefix))
