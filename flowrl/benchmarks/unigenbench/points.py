"""UniGenBench's test points: 27 labels in two languages, how often each occurs, and what each means.

The counts are those of the published prompt files, of 600 prompts each; the English and the Chinese file of a length
agree. A label `Primary - Sub` belongs to the primary dimension before its first hyphen; one without is both.

The explanations are our own words, for `--option definitions=own`; judges are asked with the published ones, see
`flowrl.evaluation.unigenbench.wording`.
"""
# ruff: noqa: RUF001  (Chinese punctuation, as it should be)

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Language = Literal["en", "zh"]

NUM_PROMPTS = 600
NUM_IMAGES = 4
"""Prompts of a file, and images of each that the published scores are made of."""


@dataclass(frozen=True, slots=True)
class Point:
    """A test point: its label and meaning in English and Chinese, and its number in a short and in a long file."""

    en: str
    zh: str
    short: int
    long: int
    meaning_en: str
    meaning_zh: str


POINTS = (
    Point("Style", "风格", 250, 301,
          "The picture is made in the medium, the school, the technique or the manner that the text names.",
          "画面的媒介、流派、技法或作者手法与文字所要求的一致。"),
    Point("World Knowledge", "世界知识", 158, 173,
          "People, places, works, things and notions that the text names look as they are known to look.",
          "文字提到的人物、地点、作品、事物或概念，画得与人们所知的样子相符。"),
    Point("Attribute - Quantity", "属性-数量", 36, 47,
          "There are exactly as many as the text says; count them one by one.",
          "数目与文字所说的完全相同，请逐一清点。"),
    Point("Attribute - Expression", "属性-表情", 39, 180,
          "The face shows the feeling that the text asks for, beyond a mere movement of mouth or eyes.",
          "脸上流露出文字所要求的情绪，而不只是嘴或眼的某个动作。"),
    Point("Attribute - Material", "属性-材质", 53, 332,
          "A thing is visibly made of the substance that the text names, or has its surface.",
          "看得出物体由文字所说的材料制成，或具有该材料的质感。"),
    Point("Attribute - Size", "属性-大小", 36, 132,
          "A thing is as large, tall, long, wide or thick as the text says, by itself or next to others.",
          "物体的大小、高度、长度、宽度或厚度符合文字，单独看或与别物相比皆然。"),
    Point("Attribute - Shape", "属性-形状", 40, 143,
          "A thing has the outline or the form that the text gives it.",
          "物体具有文字所说的轮廓或形态。"),
    Point("Attribute - Color", "属性-颜色", 30, 477,
          "A thing has the colours that the text gives it.",
          "物体的颜色与文字所说的相同。"),
    Point("Action - Hand (Character/Anthropomorphic)", "动作-人物/拟人手部动作", 39, 78,
          "A person or a humanlike figure does with its hands what the text says, and the hands are sound: no finger "
          "is missing or misshapen.",
          "人物或拟人角色的手做着文字所说的动作，并且手是完好的：手指齐全、形状正常。"),
    Point("Action - Full-body (Character/Anthropomorphic)", "动作-人物/拟人全身动作", 46, 80,
          "The whole body of a person or a humanlike figure is in the movement or posture that the text describes.",
          "人物或拟人角色的整个身体处于文字描述的动作或姿势中。"),
    Point("Action - Animal", "动作-动物动作", 34, 69,
          "An animal does what the text says it does.",
          "动物正在做文字所说的事。"),
    Point("Action - Non-contact Interaction", "动作-实体间无接触互动", 49, 56,
          "Two or more have to do with each other without touching, by looks, gestures or direction, as the text says.",
          "两个或更多对象在不接触的情况下，以目光、手势或朝向发生文字所说的互动。"),
    Point("Action - Contact Interaction", "动作-实体间有接触互动", 42, 87,
          "Two or more touch, hold, carry or push each other as the text says.",
          "两个或更多对象按文字所说相互触碰、握持、托举或推动。"),
    Point("Action - State", "动作-状态", 53, 252,
          "A thing is in the lasting condition that a verb of the text describes, such as hanging or burning.",
          "物体处于文字中动词所说的持续状态，例如悬挂或燃烧。"),
    Point("Relationship - Composition", "关系-构成关系", 74, 196,
          "A thing is built up of the other things that the text names.",
          "某物由文字提到的其他事物组合而成。"),
    Point("Relationship - Similarity", "关系-相似关系", 45, 78,
          "Different things resemble each other in the respect that the text names.",
          "不同的事物在文字所说的方面彼此相像。"),
    Point("Relationship - Inclusion", "关系-包含关系", 46, 87,
          "A thing is in, or on, another one that holds or frames it; a screen or a printed page can hold things too.",
          "某物位于容纳它或框住它的另一物之内或之上，屏幕和印刷页面也算容纳。"),
    Point("Relationship - Comparison", "关系-比较关系", 32, 103,
          "Two things differ in a property in the direction that the text states, such as one being taller.",
          "两个事物在某一性质上的差别与文字所说的方向一致，例如其中一个更高。"),
    Point("Compound - Imagination", "复合考点-想象力", 98, 236,
          "Something that reality does not have is there as described, and can be recognised.",
          "现实中没有的情景按描述画出，并且能够辨认。"),
    Point("Compound - Feature Matching", "复合考点-不同实体特征匹配", 96, 107,
          "Each of several things has its own properties, and none has taken over those of another.",
          "几个事物各有各的特征，没有互相混淆或调换。"),
    Point("Grammar - Pronoun Reference", "语法-代词指代", 68, 63,
          "What the text says of a pronoun is true of the thing that the pronoun stands for.",
          "文字对代词所说的内容，体现在该代词真正所指的对象上。"),
    Point("Grammar - Consistency", "语法-统一性", 54, 63,
          "What the text says of several things together is true of every one of them.",
          "文字对几个事物共同的说明，对其中每一个都成立。"),
    Point("Grammar - Negation", "语法-否定", 65, 71,
          "What the text says is absent, or not so, is absent or not so.",
          "文字说没有的东西确实没有，说不是的情况确实不是。"),
    Point("Entity Layout - Two-Dimensional Space", "实体布局-二维空间", 68, 177,
          "Things stand in the picture's plane where the text puts them: left, right, above, below, middle or edge.",
          "事物在画面平面上的位置符合文字：左、右、上、下、中间或边缘。"),
    Point("Entity Layout - Three-Dimensional Space", "实体布局-三维空间", 66, 138,
          "Things stand in depth where the text puts them: in front, behind, near, far, around or inside.",
          "事物在纵深上的位置符合文字：前、后、近、远、周围或内部。"),
    Point("Logical Reasoning", "逻辑推理", 109, 102,
          "What the text implies without saying it is drawn: a cause, a consequence, an order or a purpose.",
          "文字没有明说而可以推知的内容画了出来：原因、结果、次序或目的。"),
    Point("Text Generation", "文本生成", 87, 92,
          "The words that the text asks for can be read, whole and rightly spelled, and no others are among them.",
          "文字要求的字句清晰可读、完整无误，没有多出别的字。"),
)  # fmt: skip
"""In the order of the published tables."""

LABELS: dict[Language, tuple[str, ...]] = {"en": tuple(p.en for p in POINTS), "zh": tuple(p.zh for p in POINTS)}
MEANINGS: dict[Language, dict[str, str]] = {
    "en": {point.en: point.meaning_en for point in POINTS},
    "zh": {point.zh: point.meaning_zh for point in POINTS},
}


def primary_of(label: str) -> str:
    """The primary dimension of a label: what stands before its first hyphen, without the spaces around it."""
    return label.partition("-")[0].strip()


ENGLISH: dict[str, str] = {primary_of(point.zh): primary_of(point.en) for point in POINTS}
"""English name of a Chinese primary dimension."""

PRIMARIES = tuple(dict.fromkeys(primary_of(point.en) for point in POINTS))
"""The ten primary dimensions, in the order of the published tables."""


def published_counts(language: Language, *, long: bool, published: bool = False) -> dict[str, int]:
    """How often each test point occurs in a published file.

    Args:
        long: of the file with long prompts.
        published: in the English short file that the published scores are made of, which has one more test point.
    """
    labels = LABELS[language]
    counts = {label: point.long if long else point.short for label, point in zip(labels, POINTS, strict=True)}
    if published and language == "en" and not long:
        counts["Logical Reasoning"] += 1
    return counts
