"""HPSv3++: human preference that knows how able a generator is and how far it was trained (arXiv 2606.14657).

HPSv3's reading on Qwen3-VL 8B: image and text, the last hidden state h at `<|Reward|>`, the same head. Before the head,
h is modulated by two numbers, how able the image's generator looks, and the share of 1000 steps of training behind it:

    c = sigmoid(out(proj(h))),     (gamma, beta) = film(cond([c, t])),     value = head(h (1 + gamma) + beta)[0]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flowrl.config.sections import at_least, share
from flowrl.rewards.base import FunctionReward, Model, Reward, RewardInputs, RewardOutput, output_of, to_uint8
from flowrl.rewards.hpsv3 import PIXELS, TOKEN, preference_head
from flowrl.rewards.judges.templates import read_template, template_name
from flowrl.rewards.networks import pretrained, qwen_vl
from flowrl.rewards.networks.model_sizes import sized
from flowrl.rewards.networks.qwen_vl import DTYPES, QWEN3_VL, Dtype, Scorer, TokenReward

FILE = "hpsv3++.pth"
HEADS = ("rm_head.", "cond_encoder.", "film_gen.", "cap_encoder.")
STEPS = 1000
OWNER = "reward 'hpsv3_plus'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Hpsv3Plus:
    """The score of image and prompt, on its own scale; needs about 18 GB in bfloat16.

    How able the generator is, is told from each image alone, as the repository does for batches of one; in larger
    batches it pools them, so that a score depends on its neighbours. Part: `capability`, c above. The text is HPSv3's
    (MIT) without its half on agreement with the prompt, as the checkpoint was trained; the repository states no licence
    of weights and code.
    """

    reproduces: ClassVar[str] = (
        "HPSv3++ (arXiv 2606.14657, PlantPotatoOnMoon/HPSv3-PlusPlus, film_hybrid) one image at a time; values of a "
        "tiny random Qwen3-VL equal those of the repository's own class under transformers 4.57.0, not checked on the "
        "released weights."
    )

    model: str = "Junjun2333/HPSv3-PlusPlus"
    """The file hpsv3++.pth, a folder that holds it, or a hub id."""
    revision: str | None = None
    """Branch, tag or commit of `model` on the hub."""
    base: str = "Qwen/Qwen3-VL-8B-Instruct"
    """The Qwen3-VL 8B whose configuration and processor are used, a folder or a hub id; not its weights."""
    base_revision: str | None = None
    """Likewise of `base`."""
    trained: float | None = 0.0
    """t above, min(1, steps / 1000) of the generator's own training; 0 for any image, as published scores have it; null
    takes the run's iteration."""
    dtype: Dtype = "bfloat16"
    """Precision of the backbone; the head and what modulates it run in float32."""
    batch_size: int = 1
    """Images that the model sees at once; with one, no score depends on the others."""

    def __post_init__(self) -> None:
        at_least(1, self, "batch_size")
        if self.trained is not None:
            share("trained", self.trained)
        pretrained.check_file(self.model, option="model")
        pretrained.check_model(self.base, what=QWEN3_VL.what, option="base")

    @property
    def models(self) -> tuple[Model, ...]:
        return (sized(self.model, DTYPES[self.dtype].itemsize),)

    def build(self, device: torch.device) -> Reward:
        """Loads model and processor."""
        config, processor, token_ids = qwen_vl.load_base(
            self.base, [TOKEN], revision=self.base_revision, owner=OWNER, family=QWEN3_VL
        )

        def load() -> TokenReward:
            path = pretrained.fetch_file(self.model, FILE, revision=self.revision, owner=OWNER, option="model")
            return qwen_vl.build_network(
                config, pretrained.read_weights(path, owner=OWNER),
                lambda found: ModulatedHead(config.text_config.hidden_size, _inner(found)), token_ids,
                dtype=self.dtype, device=device, owner=OWNER, family=QWEN3_VL, heads=HEADS,
            )  # fmt: skip

        key = ("hpsv3_plus", self.model, self.revision, self.base, self.base_revision, str(device), self.dtype)
        network = pretrained.shared_network(key, load)
        text = read_template("hpsv3_plus", None, source="hpsv3", once=(qwen_vl.PROMPT, TOKEN))
        scorer = Scorer(
            network=network, processor=processor, token_ids=token_ids, template=text, position_mode="mrope",
            device=device, owner=OWNER, resize=True,
        )  # fmt: skip
        return FunctionReward(
            name="hpsv3_plus",
            score=partial(_score, options=self, scorer=scorer),
            needs=frozenset({"images", "prompts"}),
            version=f"hpsv3_plus:{self.model}@{pretrained.fingerprint(network.head.parameters())}:"
            f"{template_name(text)}:trained-{'run' if self.trained is None else format(self.trained, 'g')}:{PIXELS}px:"
            f"{self.dtype}",
        )


class ModulatedHead(nn.Module):
    """[..., d] hidden states to [..., 3]: score, logarithm of its spread, and how able the generator looks.

    Names of its weights are those of the checkpoint.
    """

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.rm_head = preference_head(width)
        self.cond_encoder = nn.Sequential(nn.Linear(2, inner), nn.GELU(), nn.Linear(inner, inner))
        self.film_gen = nn.Sequential(nn.Linear(inner, width), nn.ReLU(), nn.Linear(width, 2 * width))
        # Its weights over several images, pool_attn, are 1 for one.
        self.cap_encoder = nn.ModuleDict(
            {"proj": nn.Linear(width, inner), "pool_attn": nn.Linear(inner, 1), "out_proj": nn.Linear(inner, 1)}
        )

    def forward(self, hidden: Float[Tensor, " *b d"], trained: float = 0.0) -> Float[Tensor, " *b 3"]:
        able = torch.sigmoid(self.cap_encoder["out_proj"](self.cap_encoder["proj"](hidden)))
        known = torch.cat([able, torch.full_like(able, trained)], -1)
        gamma, beta = self.film_gen(self.cond_encoder(known)).chunk(2, -1)
        return torch.cat([self.rm_head(hidden * (1 + gamma) + beta), able], -1)


def _inner(weights: Mapping[str, Tensor]) -> int:
    """The width of what modulates the head."""
    if (name := "cond_encoder.0.bias") not in weights:
        raise ValueError(f"{OWNER}: the checkpoint lacks {name}, so it is no HPSv3++ (a plain HPSv3 is reward hpsv3).")
    return len(weights[name])


def _score(inputs: RewardInputs, *, options: Hpsv3Plus, scorer: Scorer) -> RewardOutput:
    trained = min(1.0, inputs.iteration / STEPS) if options.trained is None else options.trained
    images = [qwen_vl.resized_image(i, min_pixels=PIXELS, max_pixels=PIXELS) for i in to_uint8(inputs.images)]
    read = partial(scorer.network.head, trained=trained)
    outputs = replace(scorer, read=read).outputs(
        inputs.prompts, batch_size=options.batch_size, images=images.__getitem__
    )
    values, _, able = outputs[:, 0].double().cpu().unbind(-1)
    return output_of(values.tolist(), inputs, {"capability": able.tolist()})
